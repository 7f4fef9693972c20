"""What a run ended with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Summary"]


@dataclass(frozen=True)
class Summary:
    """What a run ended with.

    Attributes:
        stopped: `finished`, or `early` where the score on held-out samples no longer got better.
        epochs: Epochs that were made.
        kept_epoch: The one whose weights were kept, counted from 1: the last, unless the run keeps
            the best.
        steps: Steps that were made, skipped ones among them.
        seconds: Time of the run, before it was resumed too.
        parameters: Numbers of weights.
        metric: The name of the task's score.
        train: Means over the last epoch that was made, while its steps were made.
        validation: Scores of the weights that were kept on samples held out of the training data;
            empty if there were none.
        test: Scores of the weights that were kept on the test samples, with `samples` and `missed`.
        skipped: Steps that were skipped.
        bad_samples: Samples that could not be read and were skipped.
        forward_status: How all samples of forward solves ended, in training.
        backward_status: Likewise of backward solves.
        classes: Names of the classes.
        confusion: How often which class (row) was taken for which (column) among the test samples.
    """

    stopped: str
    epochs: int
    kept_epoch: int
    steps: int
    seconds: float
    parameters: Mapping[str, int]
    metric: str
    train: Mapping[str, Any]
    validation: Mapping[str, Any]
    test: Mapping[str, Any]
    skipped: int
    forward_status: Mapping[str, int]
    backward_status: Mapping[str, int]
    bad_samples: int = 0
    classes: tuple[str, ...] = field(default=(), repr=False)
    confusion: list[list[int]] | None = field(default=None, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values; without a confusion matrix if there is none."""
        values = asdict(self)
        if self.confusion is None:
            del values["confusion"]
        return values
