"""A differentiable penalty on the size of the Jacobian of a step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from equipoise.core.tree import Layout, Tree
from equipoise.core.validate import require_count

__all__ = ["frobenius_penalty"]


def frobenius_penalty(
    step: Callable[[Tree], Tree],
    z: Tree,
    *,
    samples: int = 1,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Estimate `|J|_F^2 / width` for each sample, differentiably.

    See Hutchinson (1990) and Bai et al. (2021). `E |J^T v|^2 = |J|_F^2` for `v ~ N(0, I)`. Add its
    mean, times a small weight, to a training loss.

    Args:
        step: `z -> f(z)`; for a layer, `layer.map(x)`.
        z: Where, usually the equilibrium. The penalty is differentiated through it too, unless it
            is detached.
        samples: Random vectors to average over.
        generator: Source of randomness.

    Shape:
        Returns (batch,).
    """
    require_count("frobenius_penalty.samples", samples)
    layout = Layout(z)
    with torch.enable_grad():
        point = layout.pack(z, "z")
        if not point.requires_grad:
            point = point.detach().requires_grad_()
        value = layout.pack(step(layout.unpack(point)), "step")
        total = value.new_zeros(value.shape[0])
        if not value.requires_grad:
            return total
        for _ in range(samples):
            v = torch.randn(
                value.shape, dtype=value.dtype, device=value.device, generator=generator
            )
            (pulled,) = torch.autograd.grad(value, point, v, create_graph=True)
            total = total + pulled.square().sum(dim=1)
    return total / (samples * layout.width)
