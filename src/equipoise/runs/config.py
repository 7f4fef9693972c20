"""What a run is told, in full: typed settings, read from TOML and written back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args

from equipoise.core import choose, require_count, require_positive
from equipoise.data import DATASETS
from equipoise.engine.settings import OptimizerConfig, ScheduleConfig, TrainConfig
from equipoise.engine.tasks import TASKS
from equipoise.models import model_options, require_model
from equipoise.runs.toml import (
    MAX_CONFIG_BYTES,
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
    "dump_config",
    "list_presets",
    "load_config",
    "parse_config",
    "same_run",
]

Augment = Literal["none", "pad-crop-flip", "random-resized-crop"]


@dataclass(frozen=True)
class ModelConfig:
    """Which network.

    Args:
        name: One of `list_models()`, or `package.module:function` of your own (see `create_model`).
        options: Its options; `model_options(name)` names them.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_model("model.name", self.name)
        _check_options("model", self.name, self.options, model_options(self.name))


@dataclass(frozen=True)
class DataConfig:
    """Which samples, and what is done to them.

    Args:
        name: One of `list_data()`.
        root: The folder with the published files; empty for the default of `load_data`.
        download: Whether to fetch files that are not there.
        options: The options of the reader.
        classes: Numbers of the classes to use, which are numbered anew; empty uses all.
        subset: How many training samples to use, the first ones in a fixed shuffled order; 0 uses
            all.
        holdout: Part of the training samples that is held out to watch the training; 0 watches the
            test samples.
        greyscale: Whether to turn colours into grey.
        size: Height and width to bring pictures to; empty leaves them.
        augment: How training pictures are varied at random.
        padding: Pixels on each side for `pad-crop-flip`.
        flip: Probability of mirroring, for both ways of varying pictures.
        mean: What to subtract from the values in [0, 1], one number for each channel; empty
            subtracts nothing.
        std: What to divide by afterwards.
        noise: Standard deviation of the noise that a restoration is to remove.
    """

    name: str
    root: str = ""
    download: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    classes: tuple[int, ...] = ()
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

    def __post_init__(self) -> None:
        choose("data.name", self.name, DATASETS)
        _check_options(
            "data", self.name, self.options, [option.name for option in fields(DATASETS[self.name])]
        )
        choose("data.augment", self.augment, get_args(Augment))
        for name in ("subset", "padding"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"data.{name} must be a whole number of at least 0; got {getattr(self, name)}."
                )
        if not 0 <= self.holdout < 1:
            raise ValueError(f"data.holdout must be in [0, 1); got {self.holdout}.")
        if not 0 <= self.flip <= 1:
            raise ValueError(f"data.flip must be in [0, 1]; got {self.flip}.")
        if len(self.size) not in (0, 2):
            raise ValueError(
                f"data.size must be height and width, or empty; got {list(self.size)}."
            )
        for side in self.size:
            require_count("data.size", side)
        if self.augment == "random-resized-crop" and not self.size:
            raise ValueError(
                "data.size must be given for the augmentation 'random-resized-crop'; got "
                "none. Write data.size = [224, 224]."
            )
        if len(self.mean) != len(self.std):
            raise ValueError(
                f"data.mean must have as many numbers as data.std; got {len(self.mean)} and "
                f"{len(self.std)}."
            )
        for value in self.std:
            require_positive("data.std", value)
        require_positive("data.noise", self.noise, or_zero=True)


@dataclass(frozen=True)
class TaskConfig:
    """What is learnt.

    Args:
        name: `auto` goes by the data; or the name of a task.
        label_smoothing: Part of the probability that targets spread over all classes.
    """

    name: str = "auto"
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        choose("task.name", self.name, ["auto", *TASKS])
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"task.label_smoothing must be in [0, 1); got {self.label_smoothing}.")


@dataclass(frozen=True)
class Config:
    """All that a run is told.

    Args:
        model: Which network.
        data: Which samples.
        task: What is learnt.
        train: How the run goes.
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
            raise ValueError(
                f"train.patience must be 0 where nothing is held out; got {self.train.patience}. "
                "Early stopping must watch held-out samples: set data.holdout."
            )
        if self.data.noise and self.task.name != "restoration":
            raise ValueError(
                f"data.noise must be 0 for the task {self.task.name!r}; got "
                f"{self.data.noise}. Set task.name = 'restoration'."
            )


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
            raise ValueError(f"{text}: {error}") from None
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
        part = getattr(config, section.name)
        lines += ["", f"[{section.name}]"]
        lines += [
            f"{each.name} = {write_value(getattr(part, each.name), f'{section.name}.{each.name}')}"
            for each in fields(part)
        ]
    return "\n".join(lines) + "\n"


def same_run(first: Config, second: Config) -> bool:
    """Return whether two configs compute the same: where data lie, and how often things are written, may differ.

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
    """The place and the table that a source means."""
    presets = list_presets()
    if isinstance(source, str) and source in presets:
        return f"preset {source}", _preset(source)
    path = Path(source)
    if path.is_dir():
        if not (path / "config.toml").is_file():
            raise ValueError(f"{path}: must be a run folder; it has no config.toml.")
        path /= "config.toml"
    if not path.is_file():
        if isinstance(source, Path) or len(path.parts) > 1 or path.suffix == ".toml":
            raise ValueError(f"{path}: there is no such file or folder.")
        choose("A config that is neither a TOML file nor a run folder", str(source), presets)
    with path.open("rb") as stream:
        table = decode_toml(stream.read(MAX_CONFIG_BYTES + 1), str(path))
    if "extends" in table:
        base = table.pop("extends")
        try:
            table = merge_tables(_preset(choose("extends", base, presets)), table)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: {error}") from None
    return str(path), table


def _preset(name: str) -> dict[str, Any]:
    return decode_toml(
        files("equipoise.runs").joinpath("preset", f"{name}.toml").read_bytes(), f"preset {name}"
    )


def _build(table: Mapping[str, Any], where: str, overrides: Mapping[str, str]) -> Config:
    try:
        config: Config = read_value(Config, table, "")
    except RecursionError:
        raise ValueError(f"{where}: must not nest lists and tables so deeply.") from None
    except ValueError as error:
        about = str(error).split()[0].rstrip(":") + "."
        blame = [
            text
            for key, text in overrides.items()
            if about.startswith(f"{key}.") or f"{key}.".startswith(about)
        ]
        raise ValueError(f"{blame[-1] if blame else where}: {error}") from None
    return config


def _check_options(
    section: str, name: str, options: Mapping[str, Any], known: Sequence[str]
) -> None:
    for option in options:
        key = dotted(f"{section}.options", option)
        if not known:
            raise ValueError(f"{key} must not be given: {name!r} has no options.")
        choose(f"{key}: an option of {name!r}", option, known)
