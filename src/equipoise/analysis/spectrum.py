"""The spectral radius of the Jacobian of a step, for diagnosis."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from equipoise.core.errors import ConvergenceWarning
from equipoise.core.tree import Layout, Tree, row_norm
from equipoise.core.validate import require_count
from equipoise.solvers.problem import linearize_by_autograd

__all__ = ["spectral_radius"]


def spectral_radius(
    step: Callable[[Tree], Tree],
    z: Tree,
    *,
    tolerance: float = 1e-4,
    max_steps: int = 500,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return the Jacobian's largest eigenvalue modulus for each sample, by power iteration.

    The dominant eigenvalues of a real matrix are often a complex pair or a pair of opposite signs,
    for which a Rayleigh quotient means nothing. So the last three iterates are fitted by
    `J^2 v = a J v + b v`, whose roots `x^2 = a x + b` are the dominant pair.

    Args:
        step: `z -> f(z)`; for a layer, `layer.map(x)`.
        z: Where.
        tolerance: Relative change between ten iterations at which to stop.
        max_steps: Products at most.
        generator: Source of randomness.

    Shape:
        Returns (batch,).
    """
    require_count("spectral_radius.max_steps", max_steps)
    layout = Layout(z)
    point = layout.pack(z, "z").detach()
    jvp = linearize_by_autograd(
        lambda flat: layout.pack(step(layout.unpack(flat)), "step"), point
    ).jvp
    v = torch.randn(point.shape, dtype=point.dtype, device=point.device, generator=generator)
    v = v / row_norm(v)[:, None]
    radius = torch.zeros(point.shape[0], dtype=point.dtype, device=point.device)
    for k in range(max_steps):
        once = jvp(v)
        if k % 10 == 9 or k == max_steps - 1:
            before, radius = radius, _dominant(v, once, jvp(once))
            if bool(((radius - before).abs() <= tolerance * radius).all()):
                return radius
        size = row_norm(once)[:, None]
        v = torch.where(size > 0, once / torch.where(size > 0, size, 1.0), v)
    message = (
        f"spectral_radius: still changing after {max_steps} products; eigenvalues of "
        "nearly equal size need more max_steps."
    )
    warnings.warn(message, ConvergenceWarning, stacklevel=2)
    return radius


def _dominant(v: Tensor, once: Tensor, twice: Tensor) -> Tensor:
    """Modulus of the larger root of `x^2 = a x + b`.

    `a` and `b` are the least-squares fit of `twice = a once + b v`.
    """
    basis = torch.stack([once, v], dim=2).double()  # (batch, width, 2)
    target = twice.unsqueeze(2).double()
    if basis.shape[1] == 1:
        return (once / v).abs().squeeze(1)
    gram = basis.mT @ basis
    # Parallel iterates mean one real dominant eigenvalue; the smallest-norm fit then still has it
    # as its larger root.
    a, b = (
        (torch.linalg.pinv(gram, rtol=1e-10, hermitian=True) @ (basis.mT @ target))
        .squeeze(2)
        .unbind(dim=1)
    )
    root = torch.sqrt(torch.complex(a * a / 4 + b, torch.zeros_like(a)))
    larger = torch.maximum((a / 2 + root).abs(), (a / 2 - root).abs())
    return larger.to(v.dtype)
