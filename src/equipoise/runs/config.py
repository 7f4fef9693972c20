"""The complete settings of a run: typed, read from TOML and written back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args

from equipoise.core import (
    SettingError,
    SourceError,
    choose,
    require_between,
    require_positive,
    require_size,
    require_whole,
)
from equipoise.data import DATASETS
from equipoise.engine.settings import OptimizerConfig, ScheduleConfig, TrainConfig
from equipoise.engine.tasks import TASKS
from equipoise.models import model_options, require_model
from equipoise.runs.toml import (
    MAX_CONFIG_BYTES,
    NESTED,
    decode_toml,
    dotted,
    merge_tables,
    override,
    read_value,
    write_value,
)

__all__ = [
    "Config",
    "DataConfig",
    "ModelConfig",
    "TaskConfig",
    "as_config_error",
    "dump_config",
    "list_presets",
    "load_config",
    "parse_config",
    "same_run",
]

Augment = Literal["none", "pad-crop-flip", "random-resized-crop"]
OnBadSample = Literal["stop", "skip"]


@dataclass(frozen=True)
class ModelConfig:
    """Which network.

    Args:
        name: One of `list_models()`, or `package.module:function` of your own (see `create_model`).
        options: Its options; `model_options(name)` names them.
        weights: The folder of a run whose weights training starts from; empty draws new ones.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    weights: str = ""

    def __post_init__(self) -> None:
        require_model("model.name", self.name)
        _check_options("model", self.name, self.options, model_options(self.name))


@dataclass(frozen=True)
class DataConfig:
    """Which samples, and what is done to them.

    Args:
        name: One of `list_data()`.
        root: The folder with the published files; empty for the default of `load_data`.
        download: Whether to download files that are missing.
        options: The options of the reader.
        classes: Names or numbers of the classes to use, which are then counted from 0; empty uses
            all.
        subset: How many training samples to use, the first ones in a fixed shuffled order; 0 uses
            all.
        holdout: Fraction of the training samples that is held out to score each epoch on; 0 scores
            on the test samples, or on the validation samples where there are no others.
        greyscale: Whether to convert images to greyscale.
        size: Height and width that images are resized to; empty leaves them.
        augment: How training images are varied at random.
        padding: Pixels on each side for `pad-crop-flip`.
        flip: Probability of a horizontal flip, for both augmentations.
        mean: What to subtract from the values in [0, 1], one number for each channel; empty
            subtracts nothing.
        std: What to divide by afterwards.
        noise: Standard deviation of the noise that a restoration is to remove.
        on_bad_sample: What to do about a file that cannot be read: `stop` the run, or `skip` the
            sample, which is then listed in the run's folder.
    """

    name: str
    root: str = ""
    download: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    classes: tuple[int | str, ...] = ()
    subset: int = 0
    holdout: float = 0.0
    greyscale: bool = False
    size: tuple[int, ...] = ()
    augment: Augment = "none"
    padding: int = 4
    flip: float = 0.5
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    noise: float = 0.0
    on_bad_sample: OnBadSample = "stop"

    def __post_init__(self) -> None:
        choose("data.name", self.name, DATASETS)
        _check_options(
            "data", self.name, self.options, [option.name for option in fields(DATASETS[self.name])]
        )
        choose("data.augment", self.augment, get_args(Augment))
        choose("data.on_bad_sample", self.on_bad_sample, get_args(OnBadSample))
        for name in ("subset", "padding"):
            require_whole(f"data.{name}", getattr(self, name))
        require_between("data.holdout", self.holdout, 0, 1, "[)")
        require_between("data.flip", self.flip, 0, 1)
        if self.size:
            require_size("data.size", self.size)
        if self.augment == "random-resized-crop" and not self.size:
            raise SettingError(
                "data.size",
                "be given for the augmentation 'random-resized-crop'",
                self.size,
                "Write data.size = [224, 224].",
                got="nothing",
            )
        if len(self.mean) != len(self.std):
            raise SettingError(
                "data.mean",
                "have as many numbers as data.std",
                self.mean,
                got=f"{len(self.mean)} and {len(self.std)}",
            )
        for value in self.std:
            require_positive("data.std", value)
        require_positive("data.noise", self.noise, or_zero=True)


@dataclass(frozen=True)
class TaskConfig:
    """What is learnt.

    Args:
        name: The name of a task; `auto` is the one that fits the data.
        label_smoothing: Fraction of the probability that targets spread over all classes.
    """

    name: str = "auto"
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        choose("task.name", self.name, ["auto", *TASKS])
        require_between("task.label_smoothing", self.label_smoothing, 0, 1, "[)")


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
        if self.data.noise and self.task.name != "restoration":
            raise SettingError(
                "data.noise",
                f"be 0 for the task {self.task.name!r}",
                self.data.noise,
                "Set task.name = 'restoration'.",
            )


def as_config_error(
    error: SettingError, kind: type[ModelConfig | DataConfig], options: Iterable[str]
) -> SettingError:
    """Return an error by the name that the config has for the setting, where it has one.

    `OptEq.alpha` is `model.options.alpha` to the user, and `load_data.root` is `data.root`.

    Args:
        error: What a model or a reader said.
        kind: The section of the config that it was made from.
        options: The options it has.
    """
    section = "model" if kind is ModelConfig else "data"
    name = error.key.rpartition(".")[2]
    if name in options:
        return error.about(f"{section}.options.{name}")
    if name in [each.name for each in fields(kind)]:
        return error.about(f"{section}.{name}")
    return error


def load_config(source: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Return the config of a preset, a TOML file or a run folder.

    A file may start from a preset: `extends = "cifar10"` on top of it.

    Args:
        source: The name of a preset, a path to a TOML file, or a folder with a `config.toml`. Write
            `./cifar10` for a folder that is called like a preset.
        overrides: Settings such as `train.epochs=3`. Values are TOML; those that are not are text.
    """
    where, table = _find(source)
    given: dict[str, str] = {}
    for text in overrides:
        try:
            given[override(Config, table, text)] = text
        except (ValueError, RecursionError) as error:
            raise SourceError(text, error) from None
    return _build(table, where, given)


def parse_config(table: Mapping[str, Any], where: str) -> Config:
    """Return the config in a TOML table.

    Args:
        table: The table.
        where: Where it comes from, for messages.
    """
    return _build(table, where, {})


def dump_config(config: Config) -> str:
    """Return a config as TOML that reads back as an equal one.

    Args:
        config: The config; the options of its model and data must be text, numbers, booleans, or
            lists and tables of them.
    """
    lines = [
        "# The complete config of a run. Repeat it with: equipoise train THIS_FILE --output DIR"
    ]
    for section in fields(config):
        settings = getattr(config, section.name)
        lines += ["", f"[{section.name}]"]
        for each in fields(settings):
            value = write_value(getattr(settings, each.name), f"{section.name}.{each.name}")
            lines.append(f"{each.name} = {value}")
    return "\n".join(lines) + "\n"


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
            data=replace(config.data, root="", download=False),
            train=replace(config.train, **free),
        )
        for config in (first, second)
    )
    return one == other


def list_presets() -> dict[str, str]:
    """Return the names of the presets, each with one sentence about it."""
    found = {}
    for entry in sorted(
        files("equipoise.runs").joinpath("preset").iterdir(), key=lambda entry: entry.name
    ):
        if entry.name.endswith(".toml"):
            words = entry.read_text("utf-8").partition("\n\n")[0].replace("#", " ").split()
            found[entry.name.removesuffix(".toml")] = " ".join(words).partition(". ")[0] + "."
    return found


def _find(source: str | Path) -> tuple[str, dict[str, Any]]:
    """What to call a source in messages, and its table."""
    presets = list_presets()
    if isinstance(source, str) and source in presets:
        return f"preset {source}", _preset(source)
    path = Path(source)
    if path.is_dir():
        if not (path / "config.toml").is_file():
            raise SourceError(path, "must be the folder of a run; it has no config.toml.")
        path /= "config.toml"
    if not path.is_file():
        if isinstance(source, Path) or len(path.parts) > 1 or path.suffix == ".toml":
            raise SourceError(path, "there is no such file or folder.")
        choose("config", str(source), presets, "be a TOML file, the folder of a run or one of")
    with path.open("rb") as stream:
        table = decode_toml(stream.read(MAX_CONFIG_BYTES + 1), str(path))
    if "extends" in table:
        base = table.pop("extends")
        try:
            table = merge_tables(_preset(choose("extends", base, presets)), table)
        except (ValueError, RecursionError) as error:
            raise SourceError(path, error) from None
    return str(path), table


def _preset(name: str) -> dict[str, Any]:
    return decode_toml(
        files("equipoise.runs").joinpath("preset", f"{name}.toml").read_bytes(), f"preset {name}"
    )


def _build(table: Mapping[str, Any], where: str, overrides: Mapping[str, str]) -> Config:
    try:
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


def _check_options(
    section: str, name: str, options: Mapping[str, Any], known: Sequence[str]
) -> None:
    for option in options:
        key = dotted(f"{section}.options", option)
        if not known:
            raise SettingError(key, f"be left out, since {name!r} has no options", options[option])
        choose(key, option, known, f"be an option of {name!r}, one of")
