"""Eigenvalues of the Jacobian of a step, for diagnosis."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from equipoise.core.errors import ConvergenceWarning
from equipoise.core.tree import Layout, Tree, row_norm
from equipoise.core.validate import require_count, require_positive
from equipoise.solvers.problem import linearize_by_autograd

__all__ = ["Eigenvalues", "SpectralRadius", "jacobian_eigenvalues", "spectral_radius"]

MAX_DENSE_WIDTH = 512
"""States up to this long have the Jacobian written out, of which all eigenvalues are computed."""
MAX_BASIS = 200
"""Vectors of a Krylov basis before a restart."""
LOOK = 10
"""Products between two looks at the Ritz values."""


class SpectralRadius(NamedTuple):
    """The largest modulus of an eigenvalue for each sample, and how certain it is.

    Attributes:
        value: The radius, shape (batch,).
        error: Estimated relative error, shape (batch,): rounding where all eigenvalues were
            computed, otherwise from how much the estimate still changes.
        settled: Whether `error` is within the tolerance, shape (batch,).
    """

    value: Tensor
    error: Tensor
    settled: Tensor


def spectral_radius(
    step: Callable[[Tree], Tree],
    z: Tree,
    *,
    tolerance: float = 3e-3,
    max_steps: int = 512,
    generator: torch.Generator | None = None,
) -> SpectralRadius:
    """Return the largest modulus of an eigenvalue of the Jacobian, for each sample.

    States of up to `max_steps` numbers, 512 at most, have their Jacobian written out, a product
    for each column, and all of its eigenvalues computed. Longer ones get the Ritz values of an
    Arnoldi basis (Saad, 2011, chapter 6), which serve complex pairs, opposite signs and many
    eigenvalues of one modulus alike, where power iteration finds none of them. It settles when the
    largest modulus no longer changes. Samples that did not settle are warned of.

    Args:
        step: `z -> f(z)`; for a layer, `layer.map(x)`.
        z: Where.
        tolerance: Relative error at which to stop.
        max_steps: Products with the Jacobian at most.
        generator: Source of randomness.
    """
    require_count("spectral_radius.max_steps", max_steps)
    require_positive("spectral_radius.tolerance", tolerance)
    layout = Layout(z)
    point = layout.pack(z, "z").detach()
    jvp = linearize_by_autograd(
        lambda flat: layout.pack(step(layout.unpack(flat)), "step"), point
    ).jvp
    if not point.numel():
        nothing = point.new_zeros(point.shape[0])
        return SpectralRadius(nothing, nothing, nothing == 0)
    if point.shape[1] <= min(max_steps, MAX_DENSE_WIDTH):
        value, error = _by_all_eigenvalues(jvp, point)
    else:
        value, error = _by_arnoldi(jvp, point, tolerance, max_steps, generator)
    settled = error <= tolerance
    if not bool(settled.all()):
        worst = float(error.nan_to_num(torch.inf).max())
        warnings.warn(
            f"spectral_radius: {int((~settled).sum())} of {len(settled)} samples did not settle in "
            f"{max_steps} products (estimated relative error {worst:.1e}): "
            "raise max_steps.",
            ConvergenceWarning,
            stacklevel=2,
        )
    return SpectralRadius(value.to(point.dtype), error.to(point.dtype), settled)


class Eigenvalues(NamedTuple):
    """Eigenvalues of a Jacobian for each sample.

    Attributes:
        value: Complex, shape (batch, eigenvalues); NaN where the Jacobian is not finite.
        whole: Whether these are all of them. If not, they are Ritz values, which outline the
            spectrum: those far out come close to eigenvalues first.
    """

    value: Tensor
    whole: bool


def jacobian_eigenvalues(
    step: Callable[[Tree], Tree],
    z: Tree,
    *,
    products: int = 60,
    generator: torch.Generator | None = None,
) -> Eigenvalues:
    """Return eigenvalues of the Jacobian of a step for each sample.

    States of up to 512 numbers have all of them computed; of longer ones the Ritz values of an
    Arnoldi basis outline the spectrum (Saad, 2011, chapter 6).

    Args:
        step: `z -> f(z)`; for a layer, `layer.map(x)`.
        z: Where.
        products: Products with the Jacobian for an outline, and Ritz values in it.
        generator: Source of randomness.
    """
    require_count("jacobian_eigenvalues.products", products, MAX_BASIS)
    layout = Layout(z)
    point = layout.pack(z, "z").detach()
    jvp = linearize_by_autograd(
        lambda flat: layout.pack(step(layout.unpack(flat)), "step"), point
    ).jvp
    if point.shape[1] <= MAX_DENSE_WIDTH:
        return Eigenvalues(_eigenvalues(_write_out(jvp, point)), whole=True)
    start = torch.randn(point.shape, dtype=point.dtype, device=point.device, generator=generator)
    basis = point.new_zeros(point.shape[0], products + 1, point.shape[1])
    hessenberg = torch.zeros(
        point.shape[0], products + 1, products, dtype=torch.float64, device=point.device
    )
    basis[:, 0] = start / row_norm(start)[:, None]
    for k in range(products):
        _extend(jvp, basis, hessenberg, k)
    return Eigenvalues(_ritz_values(hessenberg), whole=False)


def _ritz_values(hessenberg: Tensor) -> Tensor:
    """The Ritz values of each sample's basis; NaN in place of those that it ended before."""
    batch, _, most = hessenberg.shape
    found = torch.full((batch, most), torch.nan, dtype=torch.complex128, device=hessenberg.device)
    for row, matrix in enumerate(hessenberg):
        ends = torch.nonzero(matrix.diagonal(-1) == 0)
        size = int(ends[0]) + 1 if len(ends) else most
        found[row, :size] = _eigenvalues(matrix[None, :size, :size])[0]
    return found


def _write_out(jvp: Callable[[Tensor], Tensor], point: Tensor) -> Tensor:
    """The Jacobian of each sample, shape (batch, width, width)."""
    columns = []
    for index in range(point.shape[1]):
        direction = torch.zeros_like(point)
        direction[:, index] = 1
        columns.append(jvp(direction))
    return torch.stack(columns, dim=2).double()


def _by_all_eigenvalues(jvp: Callable[[Tensor], Tensor], point: Tensor) -> tuple[Tensor, Tensor]:
    value = _eigenvalues(_write_out(jvp, point)).abs().amax(dim=1)
    return value, torch.where(value.isfinite(), torch.finfo(point.dtype).eps, torch.inf)


def _extend(jvp: Callable[[Tensor], Tensor], basis: Tensor, hessenberg: Tensor, k: int) -> None:
    """Add the next vector to an Arnoldi basis of `k + 1`; one that has ended gets zeros."""
    image = jvp(basis[:, k])
    scale = row_norm(image)
    for _ in range(2):  # once loses orthogonality
        overlap = torch.einsum("bkn,bn->bk", basis[:, : k + 1], image)
        image = image - torch.einsum("bk,bkn->bn", overlap, basis[:, : k + 1])
        hessenberg[:, : k + 1, k] += overlap.double()
    rest = row_norm(image)
    # An image within the span of the basis ends it: all that can be reached is found.
    ended = rest <= 10 * torch.finfo(basis.dtype).eps * scale
    rest = torch.where(ended, 0.0, rest)
    hessenberg[:, k + 1, k] = rest.double()
    basis[:, k + 1] = image / torch.where(ended, torch.inf, rest)[:, None]


def _by_arnoldi(
    jvp: Callable[[Tensor], Tensor],
    point: Tensor,
    tolerance: float,
    max_steps: int,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor]:
    batch, width = point.shape
    start = torch.randn(point.shape, dtype=point.dtype, device=point.device, generator=generator)
    value = torch.zeros(batch, dtype=torch.float64, device=point.device)
    error = torch.full_like(value, torch.inf)
    changes = [error] * 3
    products = 0
    while products < max_steps:
        size = min(MAX_BASIS, width, max_steps - products)
        basis = point.new_zeros(batch, size + 1, width)
        hessenberg = torch.zeros(batch, size + 1, size, dtype=torch.float64, device=point.device)
        basis[:, 0] = start / row_norm(start)[:, None]
        for k in range(size):
            _extend(jvp, basis, hessenberg, k)
            products += 1
            if (k + 1) % LOOK and k + 1 < size:
                continue
            before, (value, vector) = value, _dominant(hessenberg[:, : k + 1, : k + 1])
            unit = torch.where(value > 0, value, 1.0)
            # Moduli that many eigenvalues share are approached like 1/k^2, so that what is missing
            # is k/2 times the change of one step. Several in a row: one may be small by chance.
            changes = [*changes[1:], (value - before).abs() / unit * (k + 1) / LOOK]
            error = torch.stack(changes).amax(dim=0)
            if bool(((error <= tolerance) | value.isnan()).all()):
                return value, error
        start = torch.einsum("bk,bkn->bn", vector.to(point.dtype), basis[:, :size])
    return value, error


def _dominant(hessenberg: Tensor) -> tuple[Tensor, Tensor]:
    """The largest modulus of a Ritz value, and where to restart from, in terms of the basis."""
    finite = hessenberg.isfinite().flatten(1).all(dim=1)
    values, vectors = torch.linalg.eig(torch.where(finite[:, None, None], hessenberg, 0.0))
    largest = values.abs().argmax(dim=1)
    vector = vectors[torch.arange(len(values), device=values.device), :, largest]
    # Real and imaginary part span the space of a complex pair.
    value = torch.where(finite, values.abs().amax(dim=1), torch.nan)
    return value, vector.real + vector.imag


def _eigenvalues(matrices: Tensor) -> Tensor:
    """All eigenvalues of each matrix; NaN where an entry is not finite."""
    finite = matrices.isfinite().flatten(1).all(dim=1)
    safe = torch.where(finite[:, None, None], matrices, 0.0)
    return torch.where(finite[:, None], torch.linalg.eigvals(safe), torch.nan)
