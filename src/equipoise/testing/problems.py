"""Problems with known answers, on which solvers are checked.

Answers are planted: the equilibrium is drawn first and the constant of the map chosen to fit, so
they owe nothing to a solver.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from equipoise.core.tree import Shared
from equipoise.solvers import Equation, Linearization, LinearProblem, MapProblem
from equipoise.testing.trees import bare, leaves, rows

__all__ = [
    "PROBLEMS",
    "Known",
    "KnownLinear",
    "Product",
    "affine",
    "affine_problem",
    "contraction",
    "dottie",
    "linear",
    "relative_residual_of",
    "relu",
    "residual_of",
    "symmetric",
    "symmetric_zero",
    "tanh",
    "tree",
    "zero",
]

DOTTIE = 0.739085133215160641655312087673873404
"""The solution of `z = cos z`."""


@dataclass(frozen=True)
class Known:
    """A batch of equations `z = step(z, context)` with their answers."""

    step: Callable[[Any, Any], Any]
    start: Any
    context: Any
    answer: Any
    symmetric: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    """Further tensors, for witnesses that compute the answer on their own."""


def residual_of(problem: Known, z: Any) -> tuple[Tensor, Tensor]:
    """`|f(z) - z|` and `|f(z)|` for each sample."""
    f = rows(problem.step(z, bare(problem.context)))
    return (f - rows(z)).norm(dim=1), f.norm(dim=1)


def relative_residual_of(problem: Known, z: Any) -> Tensor:
    """The largest `|f(z) - z| / |f(z)|` among the leaves of the state, for each sample."""
    f = problem.step(z, bare(problem.context))
    parts = [
        (image - leaf).flatten(1).norm(dim=1) / image.flatten(1).norm(dim=1)
        for image, leaf in zip(leaves(f), leaves(z), strict=True)
    ]
    return torch.stack(parts).amax(dim=0)


def contraction(*shape: int, norm: float = 0.8, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random matrices of exactly this spectral norm."""
    matrix = torch.randn(*shape, dtype=torch.float64)
    scaled: Tensor = norm * matrix / torch.linalg.matrix_norm(matrix, 2)[..., None, None]
    return scaled.to(dtype)


def affine(batch: int = 5, width: int = 6, dtype: torch.dtype = torch.float64) -> Known:
    """`z = A z + c` with a matrix for each sample."""
    A, c = contraction(batch, width, width), torch.randn(batch, width, dtype=torch.float64)
    answer = torch.linalg.solve(torch.eye(width, dtype=torch.float64) - A, c)
    return Known(
        step=lambda z, context: torch.einsum("bij,bj->bi", context[0], z) + context[1],
        start=torch.zeros(batch, width, dtype=dtype),
        context=(A.to(dtype), c.to(dtype)),
        answer=answer.to(dtype),
    )


def dottie(batch: int = 4, width: int = 3, dtype: torch.dtype = torch.float64) -> Known:
    """`z = cos z` in each component."""
    return Known(
        step=lambda z, _: z.cos(),
        start=torch.rand(batch, width, dtype=dtype),
        context=(),
        answer=torch.full((batch, width), DOTTIE, dtype=dtype),
    )


def relu(batch: int = 5, width: int = 8, dtype: torch.dtype = torch.float64) -> Known:
    """Rectified: `z = max(W z + c, 0)`, about half of the units off."""
    W, u = contraction(width, width), torch.randn(batch, width, dtype=torch.float64)
    answer = u.relu()
    c = u - answer @ W.T
    return Known(
        step=lambda z, context: (z @ context[0].T + context[1]).relu(),
        start=torch.zeros(batch, width, dtype=dtype),
        context=(Shared(W.to(dtype)), c.to(dtype)),
        answer=answer.to(dtype),
        settings={"W": W, "c": c},
    )


def tanh(batch: int = 5, width: int = 8, dtype: torch.dtype = torch.float64) -> Known:
    """Smooth: the hyperbolic tangent of `W z + c`."""
    W, u = contraction(width, width, norm=0.9), torch.randn(batch, width, dtype=torch.float64)
    answer = u.tanh()
    c = u - answer @ W.T
    return Known(
        step=lambda z, context: (z @ context[0].T + context[1]).tanh(),
        start=torch.zeros(batch, width, dtype=dtype),
        context=(Shared(W.to(dtype)), c.to(dtype)),
        answer=answer.to(dtype),
        settings={"W": W, "c": c},
    )


def symmetric(
    batch: int = 5, width: int = 6, hidden: int = 9, dtype: torch.dtype = torch.float64
) -> Known:
    """`z = W^T relu(W z + c)`, whose Jacobian is symmetric positive semidefinite."""
    W, u = contraction(hidden, width, norm=0.95), torch.randn(batch, hidden, dtype=torch.float64)
    answer = u.relu() @ W
    c = u - answer @ W.T
    return Known(
        step=lambda z, context: (z @ context[0].T + context[1]).relu() @ context[0],
        start=torch.zeros(batch, width, dtype=dtype),
        context=(Shared(W.to(dtype)), c.to(dtype)),
        answer=answer.to(dtype),
        symmetric=True,
        settings={"W": W, "c": c},
    )


def tree(batch: int = 4, dtype: torch.dtype = torch.float64) -> Known:
    """A state of two tensors that feed each other, of shapes (batch, 3) and (batch, 2, 2)."""
    A, B = contraction(3, 4, norm=0.7), contraction(4, 3, norm=0.9)
    u, v = torch.randn(batch, 3, dtype=torch.float64), torch.randn(batch, 2, 2, dtype=torch.float64)
    first, second = u.tanh(), v.sigmoid()
    c, d = u - second.flatten(1) @ A.T, v - (first @ B.T).view(batch, 2, 2)

    def step(z: dict[str, Any], context: dict[str, Any]) -> dict[str, Any]:
        fed = (z["first"] @ context["B"].T).view(-1, 2, 2) + context["d"]
        return {
            "first": (z["rest"][0].flatten(1) @ context["A"].T + context["c"]).tanh(),
            "rest": (fed.sigmoid(),),
        }

    return Known(
        step=step,
        start={
            "first": torch.zeros(batch, 3, dtype=dtype),
            "rest": (torch.zeros(batch, 2, 2, dtype=dtype),),
        },
        context={
            "A": Shared(A.to(dtype)),
            "B": Shared(B.to(dtype)),
            "c": c.to(dtype),
            "d": d.to(dtype),
        },
        answer={"first": first.to(dtype), "rest": (second.to(dtype),)},
    )


def zero(batch: int = 4, width: int = 5, dtype: torch.dtype = torch.float64) -> Known:
    """`z = sin(A z)`: the equilibrium is zero, where no relative residual is small."""
    A = contraction(width, width, norm=0.9)
    A = (A @ A.T).to(dtype)
    return Known(
        step=lambda z, context: (z @ context[0]).sin(),
        start=0.1 * torch.randn(batch, width, dtype=dtype),
        context=(Shared(A),),
        answer=torch.zeros(batch, width, dtype=dtype),
    )


def symmetric_zero(batch: int = 4, width: int = 5, dtype: torch.dtype = torch.float64) -> Known:
    """`z = S z` with `S` symmetric positive semidefinite."""
    A = contraction(width, width, norm=0.9)
    S = (A @ A.T).to(dtype)
    return Known(
        step=lambda z, context: z @ context[0],
        start=torch.randn(batch, width, dtype=dtype),
        context=(Shared(S),),
        answer=torch.zeros(batch, width, dtype=dtype),
        symmetric=True,
    )


PROBLEMS: dict[str, Callable[..., Known]] = {
    "affine": affine,
    "dottie": dottie,
    "relu": relu,
    "symmetric": symmetric,
    "symmetric_zero": symmetric_zero,
    "tanh": tanh,
    "tree": tree,
    "zero": zero,
}


class Product(Equation):
    """`z = A z` with a matrix for each sample: what `LinearProblem` linearises."""

    rows = (True,)

    def __init__(self, symmetric: bool = False) -> None:
        self.symmetric = symmetric

    def bind(self, args: Any) -> Callable[[Tensor], Tensor]:
        return lambda z: torch.einsum("bij,bj->bi", args[0], z)


def affine_problem(
    A: Tensor,
    g: Tensor,
    *,
    transpose: bool = False,
    symmetric: bool = False,
    local: Linearization | None = None,
    can_drop_rows: bool = True,
) -> LinearProblem:
    """Return `v = A v + g` as solvers of linear equations see it.

    Args:
        A: A matrix for each sample.
        g: The constants.
        transpose: Whether to use the transposed matrices.
        symmetric: Whether to declare them symmetric positive semidefinite.
        local: How products with the matrices are computed, if not in the plain way.
        can_drop_rows: Whether samples may leave the batch.
    """
    equation = Product(symmetric)
    equation.can_drop_rows = can_drop_rows
    base, point = MapProblem(equation, [A]), torch.zeros_like(g)
    local = local or base.linearize(point)
    return LinearProblem(base, point, g, transpose=transpose, local=local)


@dataclass(frozen=True)
class KnownLinear:
    """`v = A v + g`, or with the transpose of `A`, as the adjoint solver sees it."""

    problem: LinearProblem
    matrix: Tensor
    g: Tensor
    answer: Tensor


def linear(
    batch: int = 5,
    width: int = 7,
    *,
    transpose: bool = False,
    symmetric: bool = False,
    dtype: torch.dtype = torch.float64,
) -> KnownLinear:
    """A matrix of norm 0.9 for each sample, or of norm 0.81 and symmetric."""
    A = contraction(batch, width, width, norm=0.9)
    if symmetric:
        A = A @ A.mT
    g = torch.randn(batch, width, dtype=torch.float64)
    answer = torch.linalg.solve(
        torch.eye(width, dtype=torch.float64) - (A.mT if transpose else A), g
    )
    problem = affine_problem(A.to(dtype), g.to(dtype), transpose=transpose, symmetric=symmetric)
    return KnownLinear(problem, A.mT if transpose else A, g, answer.to(dtype))
