"""The complete settings of a run: typed, read from TOML and written back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from equipoise.core import SettingError, SourceError, choose
from equipoise.core.option import Option, field_options
from equipoise.data import DATASETS
from equipoise.engine.settings import OptimizerConfig, ScheduleConfig, TrainConfig
from equipoise.models import describe_options, list_models
from equipoise.runs.own_code import check_trust, name_code_beside
from equipoise.runs.presets import list_presets, read_preset
from equipoise.runs.sections import DataConfig, ModelConfig, TaskConfig
from equipoise.runs.toml import (
    MAX_CONFIG_BYTES,
    NESTED,
    decode_toml,
    merge_tables,
    override,
    read_value,
    write_value,
)

__all__ = [
    "Config",
    "describe",
    "dump_config",
    "load_config",
    "parse_config",
    "same_run",
]


@dataclass(frozen=True)
class Config:
    """The settings of a run.

    Args:
        model: Which network.
        data: Which samples.
        task: What is learnt.
        train: How it is trained.
        optimizer: Which optimiser.
        schedule: How the learning rate changes.
    """

    model: ModelConfig
    data: DataConfig
    task: TaskConfig = field(default_factory=TaskConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)

    def __post_init__(self) -> None:
        if self.train.patience and not self.data.holdout:
            raise SettingError(
                "train.patience",
                "be 0 when no samples are held out",
                self.train.patience,
                "Early stopping needs held-out samples: set data.holdout.",
            )
        if self.data.mix != "none" and self.train.batch == 1:
            raise SettingError(
                "data.mix",
                "be 'none' with train.batch = 1, since there is no other image to mix with",
                self.data.mix,
            )
        for name, nothing in (("noise", "0"), ("degradation", "left out")):
            asked = getattr(self.data, name)
            if asked and self.task.name != "restoration":
                raise SettingError(
                    f"data.{name}",
                    f"be {nothing} for the task {self.task.name!r}",
                    asked,
                    "Set task.name = 'restoration'.",
                )


def load_config(
    source: str | Path, overrides: Sequence[str] = (), *, trust: bool = False
) -> Config:
    """Return the config of a preset, a TOML file or a run folder.

    A file may start from a preset: `extends = "cifar10"` on top of it. Code that a config names is
    run; a run folder may come from somebody else, so what it alone names is run only if this user
    has trained with it on this machine, or `trust` is given. A file of code that a config file
    names is looked for beside it, and one that an override names in the current folder.

    Args:
        source: The name of a preset, a path to a TOML file, or a folder with a `config.toml`. Write
            `./cifar10` for a folder that is called like a preset.
        overrides: Settings such as `train.epochs=3`. Values are TOML; those that are not are text.
        trust: Whether to run the code that a run folder names, whoever made it.
    """
    where, table, folder = _find(source)
    given: dict[str, str] = {}
    for text in overrides:
        try:
            given[override(Config, table, text)] = text
        except (ValueError, RecursionError) as error:
            raise SourceError(text, error) from None
    return _build(table, where, given, folder, trust=trust)


def parse_config(table: Mapping[str, Any], where: str) -> Config:
    """Return the config in a TOML table.

    Args:
        table: The table.
        where: Where it comes from, for messages.
    """
    return _build(table, where, {})


def dump_config(config: Config, *, comments: bool = False) -> str:
    """Return a config as TOML that reads back as an equal one.

    Args:
        config: The config; the options of its model and data must be text, numbers, booleans, or
            lists and tables of them.
        comments: Whether to say of each setting what it means, its type and its default.
    """
    lines = [
        "# The complete config of a run. Repeat it with: equipoise train THIS_FILE --output DIR"
    ]
    for section in fields(config):
        settings = getattr(config, section.name)
        lines += ["", f"[{section.name}]"]
        for name, option in field_options(type(settings)).items():
            key = f"{section.name}.{name}"
            lines += [f"# {describe(key, option)}"] if comments else []
            if comments and name == "options":
                lines += _comment_options(section.name, settings)
            lines.append(f"{name} = {write_value(getattr(settings, name), key)}")
    return "\n".join(lines) + "\n"


def describe(key: str, option: Option) -> str:
    """Return a line about an option: what it means, its type and its default.

    Args:
        key: Its dotted name, for messages.
        option: What is known of it.
    """
    about = [option.kind]
    if option.has_default:
        nothing = option.default is None
        about.append(f"default {'none' if nothing else write_value(option.default, key)}")
    return f"{option.text} ({'; '.join(about)})".strip()


def _comment_options(section: str, settings: Any) -> list[str]:
    """Lines about the options that a model or a reader has."""
    known = (
        describe_options(settings.name)
        if section == "model"
        else field_options(DATASETS[settings.name])
    )
    return [
        f"#   {name}: {describe(f'{section}.options.{name}', option)}"
        for name, option in known.items()
    ]


def same_run(first: Config, second: Config) -> bool:
    """Return whether two configs compute the same; where data are kept, say, may differ.

    Args:
        first: A config.
        second: Another one.
    """
    plain = TrainConfig()
    free = {name: getattr(plain, name) for name in TrainConfig.free}
    one, other = (
        replace(
            config,
            data=replace(config.data, root="", download=False, workers=0, memory=0),
            train=replace(config.train, **free),
        )
        for config in (first, second)
    )
    return one == other


def _find(source: str | Path) -> tuple[str, dict[str, Any], Path | None]:
    """What to call a source in messages, its table, and its folder if it is a run."""
    presets = list_presets()
    if isinstance(source, str) and source in presets:
        return f"preset {source}", _read_preset(source), None
    path = Path(source)
    folder = path if path.is_dir() else None
    if folder is not None:
        if not (path / "config.toml").is_file():
            raise SourceError(path, "must be the folder of a run; it has no config.toml.")
        path /= "config.toml"
    if not path.is_file():
        if isinstance(source, Path) or len(path.parts) > 1 or path.suffix == ".toml":
            raise SourceError(path, "there is no such file or folder.")
        _refuse_other_name(str(source))
        choose("config", str(source), presets, "be a TOML file, the folder of a run or one of")
    with path.open("rb") as stream:
        table = decode_toml(stream.read(MAX_CONFIG_BYTES + 1), str(path))
    name_code_beside(table, path.parent)
    if "extends" in table:
        base = table.pop("extends")
        try:
            table = merge_tables(_read_preset(choose("extends", base, presets)), table)
        except (ValueError, RecursionError) as error:
            raise SourceError(path, error) from None
    return str(path), table, folder


def _refuse_other_name(source: str) -> None:
    """Raise if a source is the name of a model or of data, with what trains it."""
    for section, names in (("model", list_models()), ("data", DATASETS.names)):
        if source not in names:
            continue
        presets = [name for name in list_presets() if _read_preset(name)[section]["name"] == source]
        example = (
            f"Train one with it: equipoise train {presets[0]}"
            if presets
            else f"Set it in one: equipoise train PRESET {section}.name={source}"
        )
        raise SettingError(
            "config",
            "be a TOML file, the folder of a run or a preset (equipoise list presets)",
            source,
            f"{example}.",
            got=f"{source!r}, the name of {'a model' if section == 'model' else 'data'}",
        )


def _read_preset(name: str) -> dict[str, Any]:
    return decode_toml(read_preset(name), f"preset {name}")


def _build(
    table: Mapping[str, Any],
    where: str,
    overrides: Mapping[str, str],
    folder: Path | None = None,
    *,
    trust: bool = False,
) -> Config:
    try:
        check_trust(table, folder, overrides, trust=trust)
        config: Config = read_value(Config, table, "")
    except RecursionError:
        raise SourceError(where, NESTED) from None
    except SettingError as error:
        # The last override that set it, or something inside it, is to blame; else the source.
        about = f"{error.key}."
        blame = [
            text
            for key, text in overrides.items()
            if about.startswith(f"{key}.") or f"{key}.".startswith(about)
        ]
        raise SourceError(blame[-1] if blame else where, error) from None
    return config
