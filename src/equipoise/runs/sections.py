"""The sections of a config that say which model, which data and which task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from equipoise.core import (
    SettingError,
    choose,
    require_between,
    require_positive,
    require_size,
    require_whole,
)
from equipoise.data import DATASETS, Dataset, Loading
from equipoise.data.encoding import Impute
from equipoise.data.loader import MAX_WORKERS
from equipoise.engine.correction import Correction
from equipoise.engine.distillation import Distillation
from equipoise.engine.tasks import TASKS, Task, make_task
from equipoise.models import model_options, require_model
from equipoise.operators import DEGRADATIONS
from equipoise.runs.toml import dotted

__all__ = ["DataConfig", "ModelConfig", "TaskConfig", "as_config_error"]

Augment = Literal["none", "pad-crop-flip", "random-resized-crop"]
Mix = Literal["none", "mixup", "cutmix"]
OnBadSample = Literal["stop", "skip"]
Loss = Literal["auto", "square", "absolute", "huber"]


@dataclass(frozen=True)
class ModelConfig:
    """Which network.

    Args:
        name: One of `equipoise list models`, or code of your own: `package.module:function` or
            `file.py:function`.
        options: Its options; `equipoise list models NAME` explains them.
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
        name: One of `equipoise list data`, or a reader of your own: `package.module:Name` or
            `file.py:Name`.
        root: The folder with the published files; empty for the default of `load_data`.
        download: Whether to download files that are missing.
        options: The options of the reader; `equipoise list data NAME` explains them.
        classes: Names or numbers of the classes to use, which are then counted from 0; empty uses
            all.
        subset: How many training samples to use, the first ones in a fixed shuffled order; 0 uses
            all.
        samples_per_class: How many training samples of each class to use, the first ones of it in
            that order, in place of `subset`; 0 uses all.
        holdout: Fraction of the training samples that is held out to score each epoch on; 0 scores
            on the test samples, or on the validation samples where there are no others.
        greyscale: Whether to convert images to greyscale.
        size: Height and width that images are resized to; empty leaves them.
        augment: How training images are varied at random.
        padding: Pixels on each side for `pad-crop-flip`.
        flip: Probability of a horizontal flip, for both augmentations.
        rand_augment: How many random operations change each training image: its colours, its
            contrast, or where it is a little; 0 changes nothing.
        rand_strength: How strong they are, from 0 to 1.
        mix: How each training image is mixed with another one, and its class as well: `mixup` adds
            them, `cutmix` replaces a box.
        mix_alpha: The weights of a mixture are drawn from Beta(alpha, alpha).
        standardize: Whether each number of a table, features and numbers to predict, is brought to
            mean 0 and deviation 1 over the training samples; predictions and scores are in their
            own units.
        impute: What stands for missing cells of a table and categories that training does not know:
            of numbers the `mean` or the `median` of the training samples, of categories the most
            frequent one; `none` refuses them.
        mean: What to subtract from the values in [0, 1], one number for each channel, or from each
            feature of a table; empty subtracts nothing.
        std: What to divide by afterwards.
        noise: Standard deviation of the noise that a restoration is to remove.
        degradation: What else a restoration is to undo: `{ name = "blur", deviation = 1.6 }` or
            `{ name = "mask", missing = 0.5 }`; empty for noise alone.
        on_bad_sample: What to do about a file that cannot be read: `stop` the run, or `skip` the
            sample, which is then listed in the run's folder.
        workers: Processes that read images ahead of their use, at most one for each core, in each
            process that trains; 0 reads them when they are needed. Data in memory need none.
        memory: MiB of images that each process keeps, so that files are read once; larger data
            sets are not kept.
    """

    name: str
    root: str = ""
    download: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    classes: tuple[int | str, ...] = ()
    subset: int = 0
    samples_per_class: int = 0
    holdout: float = 0.0
    greyscale: bool = False
    size: tuple[int, ...] = ()
    augment: Augment = "none"
    padding: int = 4
    flip: float = 0.5
    rand_augment: int = 0
    rand_strength: float = 0.3
    mix: Mix = "none"
    mix_alpha: float = 1.0
    standardize: bool = False
    impute: Impute = "none"
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    noise: float = 0.0
    degradation: dict[str, Any] = field(default_factory=dict)
    on_bad_sample: OnBadSample = "stop"
    workers: int = 2
    memory: int = 1024

    def __post_init__(self) -> None:
        known = [option.name for option in fields(DATASETS.find("data.name", self.name))]
        _check_options("data", self.name, self.options, known)
        choose("data.augment", self.augment, get_args(Augment))
        choose("data.on_bad_sample", self.on_bad_sample, get_args(OnBadSample))
        choose("data.impute", self.impute, get_args(Impute))
        choose("data.mix", self.mix, get_args(Mix))
        require_positive("data.mix_alpha", self.mix_alpha)
        require_between("data.rand_strength", self.rand_strength, 0, 1)
        for name in ("subset", "samples_per_class", "padding", "memory", "rand_augment"):
            require_whole(f"data.{name}", getattr(self, name))
        require_whole("data.workers", self.workers, MAX_WORKERS)
        if self.subset and self.samples_per_class:
            raise SettingError(
                "data.samples_per_class",
                "be 0 with data.subset, which says how many samples there are in all",
                self.samples_per_class,
                "Set one of them to 0.",
            )
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
        if self.mean and self.standardize:
            raise SettingError(
                "data.mean",
                "be left out with data.standardize = true, which finds it in the training samples",
                self.mean,
            )
        require_positive("data.noise", self.noise, or_zero=True)
        if self.degradation:
            try:
                DEGRADATIONS.resolve(self.degradation)
            except SettingError as error:
                raise error.about(f"data.{error.key}") from error

    def make_loading(self) -> Loading:
        """Return how samples are loaded."""
        return Loading(self.workers, self.memory * 2**20)


@dataclass(frozen=True)
class TaskConfig:
    """What is learnt.

    Args:
        name: One of `equipoise list tasks`, or a task of your own: `package.module:Name` or
            `file.py:Name`; `auto` is the one that fits the data.
        label_smoothing: Fraction of the probability that targets spread over all classes.
        loss: The loss of a regression; `auto` is the task's own.
        delta: Where the Huber loss becomes linear, in the units of the targets.
        jacobian_penalty: Weight of the squared norm of the Jacobians of all equilibrium layers in
            the training loss; 0 adds nothing.
        correction: Iterates of a solve at which the loss is taken too, such as
            `{ steps = [2, 4], weight = 0.5, decay = 0.8 }`; empty takes it at the equilibrium
            alone.
        teacher: A run whose model teaches this one, of the same classes and with the same scaling
            of samples, such as `{ run = "runs/teacher", weight = 4, temperature = 4 }`; empty
            learns from the data alone.
    """

    name: str = "auto"
    label_smoothing: float = 0.0
    loss: Loss = "auto"
    delta: float = 1.0
    jacobian_penalty: float = 0.0
    correction: dict[str, Any] = field(default_factory=dict)
    teacher: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name != "auto":
            TASKS.find("task.name", self.name, also=["auto"])
        require_between("task.label_smoothing", self.label_smoothing, 0, 1, "[)")
        choose("task.loss", self.loss, get_args(Loss))
        require_positive("task.delta", self.delta)
        require_positive("task.jacobian_penalty", self.jacobian_penalty, or_zero=True)
        self.make_correction()
        self.make_distillation()

    def make_correction(self) -> Correction | None:
        """Return at which iterates the loss is taken too, or raise if that makes no sense."""
        return Correction.from_table(self.correction) if self.correction else None

    def make_distillation(self) -> Distillation | None:
        """Return who teaches, or raise if that makes no sense; its run need not be there."""
        return Distillation.from_table(self.teacher) if self.teacher else None

    def make(self, dataset: Dataset) -> Task:
        """Return the task for a data set, or raise if they do not fit.

        Args:
            dataset: What to learn from.
        """
        try:
            return make_task(
                self.name,
                dataset,
                label_smoothing=self.label_smoothing,
                loss=self.loss,
                delta=self.delta,
            )
        except SettingError as error:
            section, _, name = error.key.partition(".")
            raise error if section != "make_task" else error.about(f"task.{name}") from error


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
    path = error.key.split(".")
    for place, name in enumerate(path):
        if name in options:  # and what follows is inside it, such as solver.regularizer.epsilon
            return error.about(f"{section}.options.{'.'.join(path[place:])}")
    name = path[-1]
    if name in [each.name for each in fields(kind)]:
        return error.about(f"{section}.{name}")
    return error


def _check_options(
    section: str, name: str, options: Mapping[str, Any], known: Sequence[str]
) -> None:
    for option in options:
        key = dotted(f"{section}.options", option)
        if not known:
            raise SettingError(key, f"be left out, since {name!r} has no options", options[option])
        choose(key, option, known, f"be an option of {name!r}, one of")
