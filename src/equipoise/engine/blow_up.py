"""Runs that blow up before anything is infinite."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from equipoise.core import ConvergenceWarning

__all__ = ["BlowUp", "largest_magnitude"]

GROWTH = 1e4  # times the first loss
MIN_LOSS = 1e-2  # what a first loss counts for at least: the growth of next to nothing says nothing
REMEDY = "lower optimizer.learning_rate, or set train.clip or schedule.warmup"


class BlowUp:
    """Warns once if a run's loss or the numbers in its network grow out of all proportion.

    Such a run goes on to its end with finite numbers, and what it then keeps is worth nothing.
    """

    def __init__(self) -> None:
        self._warned = False

    def look(self, step: int, loss: float | None, first: float | None, largest: float) -> None:
        """Look at a step.

        Args:
            step: Its number.
            loss: Its mean loss, if it has one.
            first: The loss of the first step.
            largest: The largest number in the states and outputs of the network.
        """
        if self._warned:
            return
        reason = ""
        if loss is not None and first is not None and loss > GROWTH * max(abs(first), MIN_LOSS):
            reason = f"the loss is {loss:.1e} and was {first:.1e} at first"
        elif largest > torch.finfo(torch.float32).max ** 0.5:
            reason = f"numbers in the network reach {largest:.1e} and will soon overflow"
        if reason:
            self._warned = True
            warnings.warn(
                f"the run blows up: at step {step} {reason}; {REMEDY}.",
                ConvergenceWarning,
                stacklevel=2,
            )


def largest_magnitude(tensor: Tensor) -> float:
    """Return the largest absolute value in a tensor; 0 if it is empty."""
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0
