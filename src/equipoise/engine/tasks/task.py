"""The protocol of tasks: the loss of a network's outputs, their scores, and the answers in them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Self, TypeVar, final

import torch
from torch import Tensor

from equipoise.core import Registry, SettingError
from equipoise.data import Dataset
from equipoise.engine.tasks.answer import Answer, FileAnswer
from equipoise.engine.tasks.metric import Metric
from equipoise.engine.tasks.score import Score

__all__ = [
    "TASKS",
    "Task",
    "find_metric",
    "finite_samples",
    "make_task",
    "refuse_smoothing",
    "require_data",
    "to_full_precision",
]


C = TypeVar("C", bound=type)


class Task(ABC):
    """One kind of problem: what is learnt, how it is scored, and what a trained model then answers.

    A config names a task of your own by its code, `package.module:Name` or `file.py:Name`.

    Attributes:
        name: The name under which it is registered.
        metrics: What its score computes, as far as it applies to the data; the first one always
            does, and decides which of two models is better. A name that a metric of another task
            has must mean the same metric.
        answer_type: The kind of its answers.
        data_kinds: The kinds of data (`Dataset.task`) for which it is the task `auto`.
        learns_classes: Whether outputs mean the classes of the data, in their order.
        reads_text: Whether predictions are for text files, and the classes are a vocabulary.
        takes_whole_images: Whether predictions are for images of any size that the model can take,
            and not for images brought to the size of the training data.
        takes_mixed_targets: Whether a target may be weights of all classes, as `Mixup` makes them.
        shown_samples: How many samples the page of a run shows with what `illustrate` returns.
        input_caption: What the page calls the sample itself beside that.
    """

    name: ClassVar[str]
    metrics: ClassVar[tuple[Metric, ...]]
    answer_type: ClassVar[type[Answer]]
    data_kinds: ClassVar[tuple[str, ...]] = ()
    learns_classes: ClassVar[bool] = True
    reads_text: ClassVar[bool] = False
    takes_whole_images: ClassVar[bool] = False
    takes_mixed_targets: ClassVar[bool] = False
    shown_samples: ClassVar[int] = 0
    input_caption: ClassVar[str] = "image"

    @classmethod
    @abstractmethod
    def for_dataset(cls, dataset: Dataset, label_smoothing: float) -> Self:
        """Return the task for a data set, or raise if they do not fit.

        Args:
            dataset: What to learn from.
            label_smoothing: As in `make_task`.
        """

    def with_loss(self, loss: str, delta: float) -> Self:
        """Return the task with another loss, or raise if there is none to choose.

        Args:
            loss: The name of the loss; `auto` is the one that the task has.
            delta: As in `make_task`.
        """
        if loss != "auto":
            raise SettingError(
                "make_task.loss", f"be 'auto' for task {self.name!r}, which has one loss", loss
            )
        return self

    @abstractmethod
    def outputs(self, dataset: Dataset) -> int | None:
        """Return how many outputs (`num_classes`) a model needs; None leaves that to the model.

        Args:
            dataset: What to learn from, its `shape` as the model sees it.
        """

    @abstractmethod
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss over all that counts: samples, or pixels or words not ignored.

        Args:
            output: What the model returned.
            target: What it should have been.
        """

    def weight(self, target: Tensor) -> float:
        """Return how many things the mean of `loss` is over; by default samples."""
        return float(len(target))

    @abstractmethod
    def score(self) -> Score:
        """Return a new score that has seen nothing."""

    @abstractmethod
    def check(self, output: Tensor, target: Tensor) -> None:
        """Raise unless outputs and targets have the shapes and dtypes that the task needs."""

    @abstractmethod
    def answer(self, output: Tensor, classes: Sequence[str]) -> list[Answer]:
        """Return what a model's output says, one answer for each sample.

        Args:
            output: What the model returned, on the CPU and of full precision.
            classes: Names of the classes, or the vocabulary.
        """

    def respond(
        self, model: Callable[[Tensor], Tensor], x: Tensor, classes: Sequence[str]
    ) -> list[Answer]:
        """Return a model's answers for a batch; by default those in its output.

        Args:
            model: The model.
            x: Samples, ready for the model.
            classes: As in `answer`.
        """
        return self.answer(to_full_precision(model(x)).cpu(), classes)

    def illustrate(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Return what the page of a run shows beside a sample, by caption.

        Each is an image, (channels, height, width), or a mask of classes, int64 (height, width).

        Args:
            output: What the model returned for one sample, without a batch dimension.
            target: What it should have been.
        """
        return {}

    @property
    def metric(self) -> Metric:
        """The score that decides which of two models is better."""
        return self.metrics[0]

    @property
    def writes_files(self) -> bool:
        """Whether each answer becomes a file, so that predictions need a folder."""
        return issubclass(self.answer_type, FileAnswer)

    def mismatch(self, what: str, rule: str, got: object, remedy: str = "") -> SettingError:
        """Return the error for `check` to raise: "The WHAT of task NAME must RULE; got GOT".

        Args:
            what: `output` or `target`.
            rule: What must hold of it, as the sentence goes on after "must".
            got: What was given, in words.
            remedy: What to do about it, as a sentence.
        """
        return SettingError(f"The {what} of task {self.name!r}", rule, got, remedy, got=str(got))


@final
class TaskRegistry(Registry[Task]):
    """All tasks by name, among which the name of a metric means one thing."""

    def register(self, name: str, *, needs_options: bool = False) -> Callable[[C], C]:
        add = super().register(name, needs_options=needs_options)

        def add_task(entry: C) -> C:
            _check_metrics(name, entry)
            return add(entry)

        return add_task

    def _adopt(self, key: str, name: str, found: object) -> type[Task]:
        self._outside.pop(name, None)  # a file that has changed may change its metrics
        for member in ("metrics", "answer_type"):
            if isinstance(found, type) and issubclass(found, Task) and not hasattr(found, member):
                raise SettingError(key, f"name a class that defines {member}", name)
        _check_metrics(name, found)
        return super()._adopt(key, name, found)


def _check_metrics(name: str, task: object) -> None:
    """Raise if a metric of a task has the name of another one."""
    for metric in getattr(task, "metrics", ()):
        known = find_metric(metric.name, metric)
        if known != metric:
            raise SettingError(
                f"The metrics of task {name!r}",
                f"have names that no other metric has; {known.name!r} is {known.title!r}",
                metric.name,
                "Give it another name.",
            )


TASKS = TaskRegistry("task", Task, "equipoise.tasks")  # type: ignore[type-abstract]
"""All tasks by name."""


def make_task(
    name: str,
    dataset: Dataset,
    *,
    label_smoothing: float = 0.0,
    loss: str = "auto",
    delta: float = 1.0,
) -> Task:
    """Return a task for a data set.

    Args:
        name: One of `TASKS`, a plug-in, code (`package.module:Name`, `file.py:Name`), or `auto` to
            choose among `TASKS` by what the targets of the data are.
        dataset: What to learn from.
        label_smoothing: Fraction of the true class's weight that is spread over all classes
            (Szegedy et al., 2016).
        loss: The loss of a regression: `square`, `absolute` or `huber`; `auto` is the task's own.
        delta: Where the Huber loss becomes linear.
    """
    if name == "auto":
        name = next(each for each in TASKS if dataset.task in TASKS[each].data_kinds)
    kind = TASKS.find("task", name, also=["auto"])
    return kind.for_dataset(dataset, float(label_smoothing)).with_loss(loss, delta)


def find_metric(name: str, default: Metric | None = None) -> Metric:
    """Return what the tasks say of a score; all that have one of that name say the same.

    Args:
        name: The name of the score, as in logs and summaries.
        default: What to return if none of them has it; a plain `Metric` if it is left out.
    """
    for task in TASKS.loaded():
        for metric in task.metrics:
            if metric.name == name:
                return metric
    return default or Metric(name, name.replace("_", " ").capitalize())


def to_full_precision(output: Tensor) -> Tensor:
    """Return half-precision outputs in float32, in which losses and probabilities are computed."""
    return output.float() if output.dtype in (torch.float16, torch.bfloat16) else output


def finite_samples(output: Tensor) -> Tensor:
    """Return which samples of a model's output have no NaN and no infinity, bools (batch,)."""
    return output.isfinite().reshape(len(output), -1).all(1)


def refuse_smoothing(name: str, label_smoothing: float) -> None:
    """Raise if label smoothing is asked of a task that has no cross-entropy."""
    if label_smoothing:
        raise SettingError(
            "make_task.label_smoothing",
            f"be 0 for task {name!r}, which has no cross-entropy",
            label_smoothing,
        )


def require_data(name: str, dataset: Dataset, kinds: tuple[str, ...], rule: str) -> None:
    """Raise unless data are of one of these kinds and have classes.

    Args:
        name: The name of the task.
        dataset: The data.
        kinds: What `Dataset.task` may be.
        rule: What the data must do, as the sentence goes on after "must".
    """
    if dataset.task not in kinds or not dataset.classes:
        classes = f"{len(dataset.classes)} classes" if dataset.task in kinds else dataset.task
        raise SettingError(
            f"The data of task {name!r}", rule, dataset, got=f"{classes} in {dataset.name!r}"
        )
