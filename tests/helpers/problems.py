"""Problems with known answers, and cells for gradient tests.

Answers are planted: the equilibrium is drawn first and the constant of the map chosen to fit, so
they owe nothing to a solver.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from equipoise import Cell, Linearization, Shared, Stop
from equipoise.solvers import Equation, LinearProblem, MapProblem

DOTTIE = 0.739085133215160641655312087673873404
TIGHT = Stop(tolerance=1e-13, max_steps=500)


@dataclass(frozen=True)
class Known:
    """A batch of equations `z = step(z, context)` with their answers."""

    step: Callable[[Any, Any], Any]
    start: Any
    context: Any
    answer: Any
    symmetric: bool = False
    settings: dict[str, Any] = field(
        default_factory=dict
    )  # further tensors that a test may look at


def leaves(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [
        leaf
        for branch in (tree.values() if isinstance(tree, dict) else tree)
        for leaf in leaves(branch)
    ]


def rows(tree: Any) -> Tensor:
    """The state as a matrix, by other means than the library's."""
    return torch.cat([leaf.reshape(leaf.shape[0], -1) for leaf in leaves(tree)], dim=1)


def pick(tree: Any, index: Any) -> Any:
    """Some samples of a tree of tensors; `Shared` leaves stay."""
    if isinstance(tree, Tensor):
        return tree[index]
    if isinstance(tree, Shared):
        return tree
    if isinstance(tree, dict):
        return {key: pick(value, index) for key, value in tree.items()}
    return tuple(pick(value, index) for value in tree)


def bare(tree: Any) -> Any:
    """A context as a step sees it."""
    if isinstance(tree, Shared):
        return tree.tensor
    if isinstance(tree, dict):
        return {key: bare(value) for key, value in tree.items()}
    return tree if isinstance(tree, Tensor) else tuple(bare(value) for value in tree)


def residual_of(problem: Known, z: Any) -> tuple[Tensor, Tensor]:
    """`|f(z) - z|` and `|f(z)|` for each sample."""
    f = rows(problem.step(z, bare(problem.context)))
    return (f - rows(z)).norm(dim=1), f.norm(dim=1)


def contraction(*shape: int, norm: float = 0.8, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random matrices of exactly this spectral norm."""
    matrix = torch.randn(*shape, dtype=torch.float64)
    return (norm * matrix / torch.linalg.matrix_norm(matrix, 2)[..., None, None]).to(dtype)


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
    """`z = relu(W z + c)`, about half of the units off."""
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
    """`z = tanh(W z + c)`."""
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
    """`z = sin(A z)`, `A` symmetric: at its equilibrium, zero, no relative residual is small."""
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
    """`z = A z` with a matrix for each sample: what `LinearProblem` is made from."""

    rows = (True,)

    def __init__(self, symmetric: bool = False) -> None:
        self.symmetric = symmetric

    def bind(self, args: Any) -> Callable[[Tensor], Tensor]:
        return lambda z: torch.einsum("bij,bj->bi", args[0], z)


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
    A = contraction(batch, width, width, norm=0.9)
    if symmetric:
        A = A @ A.mT
    g = torch.randn(batch, width, dtype=torch.float64)
    answer = torch.linalg.solve(
        torch.eye(width, dtype=torch.float64) - (A.mT if transpose else A), g
    )
    base = MapProblem(Product(symmetric), [A.to(dtype)])
    point = torch.zeros(batch, width, dtype=dtype)
    problem = LinearProblem(base, point, g.to(dtype), transpose=transpose).linearized()
    return KnownLinear(problem, A.mT if transpose else A, g, answer.to(dtype))


class SmoothCell(Cell):
    """`z = tanh(W z + U x + b)`."""

    def __init__(self, inputs: int = 2, width: int = 3, norm: float = 0.7) -> None:
        super().__init__()
        self.W = nn.Parameter(contraction(width, width, norm=norm))
        self.U = nn.Parameter(torch.randn(width, inputs, dtype=torch.float64))
        self.b = nn.Parameter(torch.randn(width, dtype=torch.float64))

    def inject(self, x: Tensor) -> Tensor:
        return x @ self.U.T + self.b

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return (z @ self.W.T + context).tanh()


class EasyCell(SmoothCell):
    """A small Lipschitz bound, for which `auto` takes plain iteration and the Neumann series."""

    def __init__(self) -> None:
        super().__init__(norm=0.25)

    def lipschitz(self) -> Tensor:
        return torch.linalg.matrix_norm(self.W, 2)


class MaskCell(SmoothCell):
    """`z = relu(W z + U x + b)` with its own linearisation, which keeps the mask."""

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return (z @ self.W.T + context).relu()

    def linearize(self, z: Tensor, context: Tensor) -> Linearization:
        u = z @ self.W.T + context
        return self._masked(u.relu(), (u > 0).to(u.dtype))

    def _masked(self, value: Tensor, mask: Tensor) -> Linearization:
        return Linearization(
            value=value,
            jvp=lambda v: mask * (v @ self.W.T),
            vjp=lambda v: (mask * v) @ self.W,
            select_rows=lambda index: self._masked(value[index], mask[index]),
        )


class SymmetricCell(Cell):
    """`z = W^T softplus(W z + U x + b)`, whose Jacobian is symmetric positive semidefinite."""

    symmetric = True

    def __init__(self, inputs: int = 2, width: int = 3, hidden: int = 4) -> None:
        super().__init__()
        self.W = nn.Parameter(contraction(hidden, width, norm=0.7))
        self.U = nn.Parameter(torch.randn(hidden, inputs, dtype=torch.float64))
        self.b = nn.Parameter(torch.randn(hidden, dtype=torch.float64))

    def inject(self, x: Tensor) -> Tensor:
        return x @ self.U.T + self.b

    def initial(self, x: Tensor, context: Tensor) -> Tensor:
        return context.new_zeros(context.shape[0], self.W.shape[1])

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return nn.functional.softplus(z @ self.W.T + context) @ self.W


class SymmetricMaskCell(SymmetricCell):
    """The same with its own linearisation."""

    def linearize(self, z: Tensor, context: Tensor) -> Linearization:
        u = z @ self.W.T + context
        return self._sloped(nn.functional.softplus(u) @ self.W, u.sigmoid())

    def _sloped(self, value: Tensor, slope: Tensor) -> Linearization:
        def product(v: Tensor) -> Tensor:
            return (slope * (v @ self.W.T)) @ self.W

        return Linearization(
            value,
            product,
            product,
            select_rows=lambda index: self._sloped(value[index], slope[index]),
        )


class TreeCell(Cell):
    """A state of two tensors, (batch, 2) and (batch, 1, 2), and a shared context tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.A = nn.Parameter(contraction(2, 2, norm=0.8))
        self.B = nn.Parameter(contraction(2, 2, norm=0.8))
        self.U = nn.Parameter(torch.randn(2, 2, dtype=torch.float64))

    def inject(self, x: Tensor) -> tuple[Tensor, Shared]:
        return x @ self.U.T, Shared(0.9 * self.A)

    def initial(self, x: Tensor, context: Any) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(context[0]), torch.zeros_like(context[0])[:, None]

    def step(
        self, z: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        first, second = z
        u, A = context
        return (second[:, 0] @ A.T + u).tanh(), (first @ self.B.T - u).sigmoid()[:, None]

    def readout(self, z: tuple[Tensor, Tensor], context: Any) -> Tensor:
        return torch.cat([z[0], z[1][:, 0]], dim=1)


CELLS: dict[str, Callable[[], Cell]] = {
    "easy": EasyCell,
    "mask": MaskCell,
    "smooth": SmoothCell,
    "symmetric": SymmetricCell,
    "symmetric_mask": SymmetricMaskCell,
    "tree": TreeCell,
}
