"""How sharp a minimum is: the width of its basin, and the largest curvatures."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from equipoise.analysis.landscape import Landscape
from equipoise.core.errors import ConvergenceError, ConvergenceWarning
from equipoise.core.validate import SettingError, require_count, require_finite, require_positive

__all__ = ["Basin", "Curvature", "find_basin", "hessian_product", "top_eigenvalues"]


@dataclass(frozen=True)
class Basin:
    """Where the loss stays below a level, connected with the centre of a landscape.

    Attributes:
        level: The level.
        width: Along the first direction through the centre, between interpolated crossings.
        height: Along the second direction; zero in a landscape of one dimension.
        area: Of all grid cells in it; zero in a landscape of one dimension.
        open: Whether it reaches the edge of the landscape, so that these are lower bounds.
    """

    level: float
    width: float
    height: float
    area: float
    open: bool


def find_basin(landscape: Landscape, level: float) -> Basin:
    """Measure the connected region around the centre where the loss is at most `level`.

    A point without a loss is outside.

    Args:
        landscape: The losses.
        level: At least the loss at the centre.
    """
    from scipy.ndimage import label  # type: ignore[import-untyped]

    require_finite("find_basin.level", level)
    row, column = landscape.centre
    if not landscape.loss[row, column] <= level:
        raise SettingError(
            "find_basin.level",
            f"be at least {landscape.loss[row, column]:.4g}, the loss at the centre",
            level,
        )
    inside = landscape.loss <= level
    labels, _ = label(inside)
    basin = labels == labels[row, column]
    edges = [basin[:, 0], basin[:, -1]]
    flat = len(landscape.y) == 1
    if not flat:
        edges += [basin[0], basin[-1]]
    area = 0.0
    if not flat:
        area = float(np.outer(_cells(landscape.y), _cells(landscape.x))[basin].sum())
    return Basin(
        float(level),
        _crossing(landscape.x, landscape.loss[row], column, level),
        0.0 if flat else _crossing(landscape.y, landscape.loss[:, column], row, level),
        area,
        bool(np.concatenate(edges).any()),
    )


def _cells(axis: np.ndarray) -> np.ndarray:
    """The length that each point of an axis stands for."""
    gaps = np.diff(axis) / 2
    lengths: np.ndarray = np.concatenate([gaps, [0.0]]) + np.concatenate([[0.0], gaps])
    return lengths


def _crossing(axis: np.ndarray, loss: np.ndarray, start: int, level: float) -> float:
    """The distance between the crossings of a level on both sides of a point."""
    ends = []
    for step in (-1, 1):
        at = start
        while 0 <= at + step < len(axis) and loss[at + step] <= level:
            at += step
        end = axis[at]
        if 0 <= at + step < len(axis) and np.isfinite(loss[at + step]):
            beyond = (level - loss[at]) / (loss[at + step] - loss[at])
            end += beyond * (axis[at + step] - axis[at])
        ends.append(end)
    return float(ends[1] - ends[0])


class Curvature(NamedTuple):
    """Eigenvalues of a symmetric matrix at both ends of its spectrum, and how certain they are.

    Attributes:
        largest: The largest, falling.
        smallest: The smallest one.
        error: A bound of the distance from each value (the largest ones, then the smallest) to
            an eigenvalue: `|H v - theta v|` of its Ritz vector.
        products: Products with the matrix that were made.
    """

    largest: np.ndarray
    smallest: float
    error: np.ndarray
    products: int


def hessian_product(
    loss: Callable[[], Tensor], weights: Sequence[Tensor]
) -> Callable[[Tensor], Tensor]:
    """Return `v -> H v` for the Hessian of a loss, by differentiating its gradient once more.

    Through an equilibrium both derivatives are implicit (`gradients.Implicit`), so that the product
    is exact up to the tolerances of the solves; no matrix is built.

    Args:
        loss: Computes the loss anew.
        weights: What it is differentiated by.
    """

    def product(vector: Tensor) -> Tensor:
        with torch.enable_grad():
            gradient = torch.autograd.grad(
                loss(), weights, create_graph=True, allow_unused=True, materialize_grads=True
            )
            flat = torch.cat([one.reshape(-1) for one in gradient])
            if not flat.requires_grad:  # a loss that is linear in them
                return torch.zeros_like(vector)
            found = torch.autograd.grad(
                flat @ vector, weights, allow_unused=True, materialize_grads=True
            )
        return torch.cat([one.reshape(-1) for one in found]).detach()

    return product


def top_eigenvalues(
    product: Callable[[Tensor], Tensor],
    start: Tensor,
    count: int = 3,
    *,
    tolerance: float = 1e-3,
    max_products: int = 100,
    on_product: Callable[[int], None] | None = None,
) -> Curvature:
    """Return the ends of the spectrum of a symmetric matrix, by Lanczos.

    The basis is kept orthogonal by a second pass against all of it (Golub & Van Loan, 2013,
    section 10.3), so that no eigenvalue appears twice. Values that have not settled are warned of.

    Args:
        product: `v -> H v`.
        start: Where the Krylov basis begins; a random vector, in float64 for small errors.
        count: How many of the largest to find.
        tolerance: Error to reach, relative to the largest modulus.
        max_products: Products at most.
        on_product: Called with the number of products made.
    """
    require_count("top_eigenvalues.count", count)
    require_count("top_eigenvalues.max_products", max_products)
    require_positive("top_eigenvalues.tolerance", tolerance)
    most = min(max_products, start.numel())
    count = min(count, start.numel())
    basis = [start / start.norm()]
    diagonal: list[float] = []
    beside: list[float] = []
    while True:
        image = product(basis[-1])
        if not bool(image.isfinite().all()):
            raise ConvergenceError(
                "top_eigenvalues: a product with the Hessian is not finite; look at other samples "
                "or at weights where the loss is finite."
            )
        diagonal.append(float(basis[-1] @ image))
        size = float(image.norm())
        for _ in range(2):  # once loses orthogonality
            for one in basis:
                image = image - (one @ image) * one
        rest = float(image.norm())
        made = len(diagonal)
        if on_product is not None:
            on_product(made)
        matrix = np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1)
        values, vectors = np.linalg.eigh(matrix)
        ended = rest <= 1e-12 * max(size, np.abs(values).max(), np.finfo(float).tiny)
        error = (0.0 if ended else rest) * np.abs(vectors[-1])
        wanted = [*range(made - 1, max(made - 1 - count, -1), -1), 0]
        scale = max(np.abs(values).max(), np.finfo(float).tiny)
        settled = made >= count and bool((error[wanted] <= tolerance * scale).all())
        if settled or ended or made >= most:
            break
        beside.append(rest)
        basis.append(image / rest)
    if not settled and not ended and made < start.numel():
        warnings.warn(
            f"top_eigenvalues: not settled after {made} products (errors up to "
            f"{error[wanted].max() / scale:.1e} of the largest): raise max_products.",
            ConvergenceWarning,
            stacklevel=2,
        )
    return Curvature(values[wanted[:-1]], float(values[0]), error[wanted], made)
