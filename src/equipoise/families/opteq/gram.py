"""`W W^T` of one layer, formed where it pays and remembered while the weights stay."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from equipoise.operators.operator import Operator, OperatorWeights

__all__ = ["Gram"]

EVALUATIONS = 20
"""Evaluations of a forward and a backward solve together, about."""
MIN_SAVED = 2**19
"""Multiplications that an evaluation must save at least.

A step in coordinates has more and smaller operations; they take as long as these.
"""


class Gram:
    """Remembers `W W^T`, which makes one product of two in each evaluation of a layer.

    What is decided depends on shapes and modes alone, so that equal runs form it in equal solves.
    """

    def __init__(self) -> None:
        self._known: tuple[Tensor, int, Tensor] | None = None

    def find(
        self, operator: Operator, weights: OperatorWeights, samples: int, *, stays: bool
    ) -> Tensor | None:
        """Return `W W^T`, or None if it does not pay.

        With `W` of shape (n, m), forming it costs `n^2 m` multiplications, and saves `n (2 m - n)`
        for each sample in each evaluation.

        Args:
            operator: What `W` is.
            weights: Its weights.
            samples: Samples of the solve.
            stays: Whether the same weights will be used for many solves.
        """
        weight = weights[0].detach()
        if weight.dim() != 2 or weight.is_inference():
            return None
        n, m = weight.shape
        gain = 2 * m - n
        saved = samples * n * gain
        if gain <= 0 or saved < MIN_SAVED or not (stays or EVALUATIONS * saved >= n * n * m):
            return None
        if self._known is not None:
            last, version, matrix = self._known
            # The weight that is kept cannot give its memory to another one.
            same = last.data_ptr() == weight.data_ptr() and version == weight._version
            if same and (last.shape, last.stride()) == (weight.shape, weight.stride()):
                return matrix
        with torch.no_grad():
            found = operator.gram((weight,))
        if found is not None:
            self._known = (weight, weight._version, found)
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return Gram, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Gram:
        return Gram()
