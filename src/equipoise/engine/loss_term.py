"""What may be added to the loss of a task in training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import ClassVar

from torch import Tensor

__all__ = ["LossTerm"]


class LossTerm(ABC):
    """A term of the training loss besides that of the task: `weight` times what it estimates.

    Attributes:
        name: What the log calls the estimate.
        weight: Its weight in the loss.
        over_samples: Whether it is a mean over all samples, in place of over what the loss of the
            task is a mean of, which may leave some targets out.
        failure: A sentence on why a step with this term must not count, empty if it may; cleared
            before each step.
        missed: How many samples of the step have a solve of the term's own that missed its
            tolerance; cleared before each step.
    """

    name: ClassVar[str]
    weight: float
    over_samples: ClassVar[bool] = True
    failure: str = ""
    missed: int = 0

    @abstractmethod
    def watching(self, x: Tensor) -> AbstractContextManager[None]:
        """Note what the term needs of one pass of the model while the context lasts.

        Args:
            x: The samples of the pass, images at their own size.
        """

    @abstractmethod
    def estimate(self, loss: Callable[[Tensor], Tensor], output: Tensor) -> Tensor:
        """Return the term for the pass that was watched, a differentiable number.

        Args:
            loss: The loss of the task, given an output of the model for the same samples.
            output: What the model returned.
        """
