"""The spectral norm of a matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from equipoise.core.transforms import full_precision, outside_graphs

__all__ = ["MARGIN", "at_most", "dense_norm", "start_vector"]

LANCZOS = 256  # the size from which Lanczos steps cost less than all eigenvectors
STEPS = 64  # Lanczos steps after which all eigenvectors are the cheaper way
MARGIN = 1e-12  # well above the relative rounding errors of a Cholesky factorisation


@outside_graphs
def dense_norm(W: Tensor) -> Tensor:
    """Return the spectral norm of a matrix, its largest singular value.

    `|W| = max_v |W v| / |v|`, attained at the top eigenvector of the smaller Gram matrix `G`. A
    large `G` gets it from Lanczos steps, followed by a Cholesky factorisation of
    `(1 + eps) |W v|^2 I - G`, which exists only if no eigenvalue was missed (Golub & Van Loan,
    2013, chapters 4 and 10); otherwise all eigenvectors are computed. The gradient is `u v^T` with
    the top singular vectors, a subgradient where they are not unique, and zero at zero. Second
    derivatives are right too.

    All work is done in float64. The result is rounded up by two units of its own precision and
    `4 min(n, m)` of float64's, so that it is an upper bound despite rounding. It is NaN if an entry
    is not finite.

    Args:
        W: Shape (n, m), real or complex.
    """
    if W.dim() != 2 or not W.numel():
        raise ValueError(
            f"dense_norm.W must be a matrix with at least one entry; got shape {tuple(W.shape)}."
        )
    size = W.detach().abs().amax().double()
    # A complex quotient by a subnormal number overflows.
    size = torch.where(size > 0, size.clamp(min=torch.finfo(torch.float64).tiny), 1.0)
    scaled = (
        W.to(torch.promote_types(W.dtype, torch.float64)) / size
    )  # squares of entries must neither overflow nor vanish
    tall = scaled if W.shape[0] >= W.shape[1] else scaled.mT
    slack = 4 * tall.shape[1] * torch.finfo(torch.float64).eps + 2 * torch.finfo(W.dtype).eps
    v: Tensor = _TopVector.apply(tall.mH @ tall, slack)  # type: ignore[no-untyped-call]
    norm = torch.linalg.vector_norm(tall @ v) / torch.linalg.vector_norm(v)
    rounded: Tensor = (1 + slack) * size * norm
    return rounded.to(W.dtype.to_real())


class _TopVector(torch.autograd.Function):
    """A unit eigenvector `v` of the largest eigenvalue `l` of a Gram matrix `G`.

    Its derivative is `dv = (l - G)^+ dG v`.

    Only for functions that are stationary in `v`: their gradients do not depend on this derivative,
    so it is worked out only when gradients are to be differentiated again.
    """

    @staticmethod
    def forward(gram: Tensor, slack: float) -> Tensor:
        with full_precision(gram.device.type):
            return _find_top(gram, slack)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.save_for_forward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, None]:
        if not torch.is_grad_enabled():
            return None, None
        gram, v = ctx.saved_tensors
        return torch.outer(_respond(gram, g), v.conj()), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _slack: None) -> Tensor:
        gram, v = ctx.saved_tensors
        return _respond(gram, tangent @ v)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int, None], gram: Tensor, slack: float
    ) -> tuple[Tensor, int]:
        members = (gram.select(in_dims[0], member) for member in range(info.batch_size))
        return torch.stack([_TopVector.apply(member, slack) for member in members]), 0  # type: ignore[no-untyped-call]


def _respond(gram: Tensor, g: Tensor) -> Tensor:
    """`(l - G)^+ g`; eigenvalues equal to the largest, `l`, up to rounding count as `l`."""
    values, vectors = torch.linalg.eigh(gram.detach())
    gaps = values[-1] - values
    inverse = torch.where(gaps > MARGIN**0.5 * values[-1], gaps, torch.inf).reciprocal()
    response: Tensor = vectors @ (inverse * (vectors.mH @ g))
    return response


def _find_top(gram: Tensor, slack: float) -> Tensor:
    """A unit eigenvector of the largest eigenvalue: `v^H G v` up to a factor of `1 + slack`."""
    if not bool(gram.isfinite().all()):
        return torch.full_like(gram[0], torch.nan)
    if len(gram) >= LANCZOS:
        v = _lanczos(gram, slack / 4)
        if v is not None and bool(at_most(gram, (1 + slack) * float(torch.vdot(v, gram @ v).real))):
            return v
    vectors: Tensor = torch.linalg.eigh(gram)[1]
    return vectors[:, -1].clone()  # a view could not carry a tangent of its own


def _lanczos(gram: Tensor, tolerance: float) -> Tensor | None:
    """The top eigenvector by Lanczos steps, or nothing if they do not suffice.

    Each new vector is made orthogonal to all before it, twice, so that no eigenvalue appears again.
    A Ritz pair with residual `r` and a gap `d` to the next has an error of at most `r`, and about
    `r^2 / d`.
    """
    basis = gram.new_zeros(STEPS, len(gram))
    basis[0] = start_vector(gram)
    for count in range(1, STEPS + 1):
        known = basis[:count]
        new = gram @ known[-1]
        for _ in range(2):
            new = new - known.mT @ (known.conj() @ new)
        length = float(torch.linalg.vector_norm(new))
        if count % 8 == 0 or length == 0:
            values, vectors = torch.linalg.eigh(known.conj() @ gram @ known.mT)
            residual = length * float(vectors[-1, -1].abs())
            gap = float(values[-1] - values[-2]) if count > 1 else 0.0
            if residual**2 <= tolerance * float(values[-1]) * max(residual, gap):
                return functional.normalize(known.mT @ vectors[:, -1], dim=0)
        if count < STEPS:
            basis[count] = new / length
    return None


def start_vector(grams: Tensor) -> Tensor:
    """A random unit vector, always the same and without a trace in the global generator."""
    v = torch.randn(
        grams.shape[-1], dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    return functional.normalize(v, dim=0).to(grams)


def at_most(grams: Tensor, level: float) -> Tensor:
    """Whether all eigenvalues of Hermitian matrices are below a level, proven by Cholesky."""
    shifted = -grams
    shifted.diagonal(dim1=-2, dim2=-1).add_(level)
    proven: Tensor = torch.linalg.cholesky_ex(shifted)[1] == 0
    return proven
