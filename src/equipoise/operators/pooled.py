"""Operators that act on an image of averages, at a fraction of the price."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from equipoise.core.validate import SettingError, require_count, require_type
from equipoise.operators.operator import Operator, OperatorWeights

__all__ = ["Pooled"]


class Pooled(Operator):
    """`W = K P`: an operator on an image whose pixels are fields of `s x s`, `(P z)_f = sum_f z/s`.

    `P P^T = I`, so that the singular values of `W` are those of `K`, and zeros for what differs
    within a field, which `W` does not see. `K`'s bounds are `W`'s.
    The adjoint lays `K^T y / s` on all pixels of a field.

    Args:
        inner: `K`, an operator on images.
        side: The side `s` of a field.

    Shape:
        (batch, channels, height, width), sides multiples of `s`, to what `inner` makes of
        (batch, channels, height / s, width / s).
    """

    def __init__(self, inner: Operator, side: int) -> None:
        super().__init__()
        require_type("Pooled.inner", inner, Operator, "an operator of `equipoise.operators`")
        require_count("Pooled.side", side)
        self.inner = inner
        self.side = int(side)

    def weights(self) -> OperatorWeights:
        return self.inner.weights()

    def transposed(self, weights: OperatorWeights) -> OperatorWeights:
        # 1/s rides on the weights: one pass over the state less.
        return self.inner.scaled(self.inner.transposed(weights), 1 / self.side)

    def apply_with(self, weights: OperatorWeights, z: Tensor) -> Tensor:
        self._check_sides(z)  # or torch would leave the last rows out
        fields = F.avg_pool2d(z, self.side, divisor_override=self.side)
        return self.inner.apply_with(weights, fields)

    def adjoint_with(self, transposed: OperatorWeights, y: Tensor) -> Tensor:
        return self._spread(self.inner.adjoint_with(transposed, y))

    def _spread(self, fields: Tensor) -> Tensor:
        """Repeat each pixel on its field."""
        side = self.side
        if fields.dim() == 4 and side.bit_count() == 1:
            # Elsewhere it multiplies by a rounded 1/s, so that some pixels get the field before.
            return F.interpolate(fields, scale_factor=side, mode="nearest")
        pixels = fields.movedim(-3, -1)  # (..., h, w, c), as states lie in memory
        *rest, height, width, channels = pixels.shape
        spread = pixels[..., :, None, :, None, :].expand(*rest, height, side, width, side, channels)
        return spread.reshape(*rest, height * side, width * side, channels).movedim(-1, -3)

    def bound(self, weights: OperatorWeights) -> Tensor:
        return self.inner.bound(weights)

    def quick_bound(self, weights: OperatorWeights) -> float:
        return self.inner.quick_bound(weights)

    def within(self, weights: OperatorWeights, limit: float) -> bool:
        return self.inner.within(weights, limit)

    def drift(self, weights: OperatorWeights, other: OperatorWeights) -> float:
        return self.inner.drift(weights, other)

    def lower_bound(self, weights: OperatorWeights) -> float:
        return self.inner.lower_bound(weights)

    def zeros(self, c: Tensor) -> Tensor:
        return self._spread(self.inner.zeros(c))

    def draw_frame_(self) -> None:
        self.inner.draw_frame_()

    def orthogonalize_(self, size: float) -> None:
        self.inner.orthogonalize_(size)

    def check(self, x: Tensor) -> None:
        if x.dim() != 4:
            self.inner.check(x)
            return
        super().check(x)
        self._check_sides(x)
        try:
            self.inner.check(x[..., :: self.side, :: self.side])
        except ValueError as error:
            size = f"{x.shape[2]} x {x.shape[3]}"
            raise ValueError(
                f"{error} Fields of {self.side} x {self.side} pixels are pooled, of {size}."
            ) from error

    def _check_sides(self, z: Tensor) -> None:
        if z.shape[-2] % self.side or z.shape[-1] % self.side:
            rule = f"have sides that are multiples of {self.side}, which are pooled"
            raise SettingError("The input", rule, tuple(z.shape))

    def extra_repr(self) -> str:
        return f"side={self.side}"
