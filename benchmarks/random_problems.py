"""Random problems at default settings: no sample may be called converged that has not.

The truth is the residual of the whole map, recomputed in float64 at the value that was returned.

Run: python benchmarks/random_problems.py --count 20000      (or in parts, with --first)
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise import SOLVERS, Cell, ConvergenceWarning, Equilibrium, Status, Stop, solve

SOLVER_NAMES = ["auto", *(name for name in SOLVERS if not SOLVERS[name].linear)]
EXAMINED_ADJOINTS = 5
"""One problem in so many is also differentiated."""


@dataclass
class Case:
    """A problem in float64.

    Attributes:
        step: The map `(state, context) -> state`.
        start: Where to begin; a tree of tensors.
        context: The tensors that it depends on, batch first.
        symmetric: Whether its Jacobian is symmetric positive semidefinite.
    """

    step: Callable[[Any, Any], Any]
    start: Any
    context: tuple[Tensor, ...]
    symmetric: bool = False


class Draw:
    """Random numbers of one problem."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        unit = torch.rand(*shape, generator=self.generator, dtype=torch.float64)
        return low + (high - low) * unit

    def integer(self, low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=self.generator))

    def number(self, low: float, high: float) -> float:
        return float(self.uniform(low, high, 1))

    def choice(self, values: list[Any]) -> Any:
        return values[self.integer(0, len(values))]

    def matrix(self, n: int, norm: float) -> Tensor:
        made = self.normal(n, n)
        return made * (norm / torch.linalg.matrix_norm(made, 2))

    def rotation(self, n: int) -> Tensor:
        return torch.linalg.qr(self.normal(n, n))[0]


def per_sample(A: Tensor, batch: int) -> Tensor:
    return A.expand(batch, *A.shape)


def product(A: Tensor, z: Tensor) -> Tensor:
    return torch.einsum("bij,bj->bi", A, z)


def affine(z: Tensor, context: tuple[Tensor, ...]) -> Tensor:
    A, gain, c = context
    return gain * product(A, z) + c


def recurrence(z: Tensor, context: tuple[Tensor, ...]) -> Tensor:
    return torch.tanh(affine(z, context))


def contracting(draw: Draw, batch: int, n: int) -> Case:
    A, gain = per_sample(draw.matrix(n, 1.0), batch), draw.uniform(0.05, 0.97, batch, 1)
    step = draw.choice([affine, recurrence])
    return Case(step, draw.normal(batch, n), (A, gain, draw.normal(batch, n)))


def cycling(draw: Draw, batch: int, n: int) -> Case:
    gain = draw.uniform(0.9, 1.1, batch, 1)
    gain[: (batch + 1) // 2] = 1.0
    A = per_sample(draw.choice([-torch.eye(n, dtype=torch.float64), draw.rotation(n)]), batch)
    return Case(affine, draw.normal(batch, n), (A, gain, draw.normal(batch, n)))


def chaotic(draw: Draw, batch: int, n: int) -> Case:
    if draw.integer(0, 2):
        rate = draw.uniform(2.5, 4.0, batch, n)
        return Case(
            lambda z, context: context[0] * z * (1 - z),
            draw.uniform(0.05, 0.95, batch, n),
            (rate,),
        )
    A, gain = per_sample(draw.matrix(n, 1.0), batch), draw.uniform(1.5, 6.0, batch, 1)
    return Case(recurrence, draw.normal(batch, n), (A, gain, 0.1 * draw.normal(batch, n)))


def singular(draw: Draw, batch: int, n: int) -> Case:
    Q = draw.rotation(n)
    values = draw.uniform(0.0, 0.9, n)
    values[0] = 1.0
    c = draw.normal(batch, n)
    if draw.integer(0, 2):  # solvable: nothing along the singular direction
        c = c - (c @ Q[:, :1]) @ Q[:, :1].T
    c = c * 10 ** draw.uniform(-6, 1, batch, 1)
    A = per_sample((Q * values) @ Q.T, batch)
    ones = torch.ones(batch, 1, dtype=torch.float64)
    return Case(affine, draw.normal(batch, n), (A, ones, c), symmetric=True)


def scaled_recurrence(z: Tensor, context: tuple[Tensor, ...]) -> Tensor:
    *rest, size = context
    A, gain, c = rest
    return size * torch.tanh(gain * product(A, z / size) + c)


def badly_scaled(draw: Draw, batch: int, n: int) -> Case:
    size = 10 ** draw.uniform(-30, 30, batch, 1)
    A, gain = per_sample(draw.matrix(n, 1.0), batch), draw.uniform(0.05, 1.2, batch, 1)
    start = draw.choice([size * draw.normal(batch, n), torch.zeros_like(size).expand(batch, n)])
    return Case(scaled_recurrence, start.clone(), (A, gain, draw.normal(batch, n), size))


def leaves_of_many_scales(draw: Draw, batch: int, n: int) -> Case:
    sizes = 10 ** draw.uniform(-8, 8, batch, 2)
    A, B = per_sample(draw.matrix(n, 0.9), batch), per_sample(draw.rotation(n), batch)
    rate = draw.uniform(0.3, 0.999, batch, 1)
    c, d = draw.normal(batch, n), draw.normal(batch, n)

    def step(state: dict[str, Tensor], context: tuple[Tensor, ...]) -> dict[str, Tensor]:
        A, B, rate, c, d, size, other = context
        first = size * torch.tanh(product(A, state["first"] / size) + c)
        second = rate * product(B, state["second"]) + other * d
        return {"first": first, "second": second}

    start = {"first": torch.zeros_like(c), "second": torch.zeros_like(d)}
    return Case(step, start, (A, B, rate, c, d, sizes[:, :1], sizes[:, 1:]))


def several_leaves(draw: Draw, batch: int, n: int) -> Case:
    A, gain = per_sample(draw.matrix(3 * n, 1.0), batch), draw.uniform(0.05, 1.1, batch, 1)
    c = draw.normal(batch, 3 * n)

    def step(state: tuple[Tensor, Tensor], context: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        flat = torch.cat([state[0], state[1].flatten(1)], dim=1)
        value = recurrence(flat, context)
        return value[:, :n], value[:, n:].unflatten(1, (2, n))

    start = (draw.normal(batch, n), draw.normal(batch, 2, n))
    return Case(step, start, (A, gain, c))


MIXERS: list[Callable[[Tensor], Tensor]] = [
    lambda z: torch.softmax(z @ z.mT, dim=1) @ z,
    lambda z: z.mean(dim=0, keepdim=True).expand_as(z),
    lambda z: z.cumsum(dim=0) / len(z),
    lambda z: z.roll(1, dims=0),
    lambda z: z.amax(dim=0, keepdim=True).expand_as(z),
    lambda z: z.sort(dim=0).values,
    lambda z: (z - z.mean(0)) / (z.var(0, correction=0) + 0.1).sqrt(),
]


def coupled_by_mistake(draw: Draw, batch: int, n: int) -> Case:
    mix, strength = draw.choice(MIXERS), 10 ** draw.number(-3, 0)
    A, gain = per_sample(draw.matrix(n, 1.0), batch), draw.uniform(0.01, 0.95, batch, 1)

    def step(z: Tensor, context: tuple[Tensor, ...]) -> Tensor:
        A, gain, c = context
        return torch.tanh(gain * (product(A, z) + strength * mix(z))) + c

    return Case(step, torch.zeros(batch, n, dtype=torch.float64), (A, gain, draw.normal(batch, n)))


def non_normal(draw: Draw, batch: int, n: int) -> Case:
    A = 10 ** draw.number(-1, 2) * draw.normal(n, n).triu(1)
    A = A + torch.diag(draw.uniform(-0.9, 0.9, n))
    ones = torch.ones(batch, 1, dtype=torch.float64)
    step = draw.choice([affine, recurrence])
    return Case(step, draw.normal(batch, n), (per_sample(A, batch), ones, draw.normal(batch, n)))


def piecewise_linear(draw: Draw, batch: int, n: int) -> Case:
    W = per_sample(draw.matrix(n, 1.0), batch)
    gain = draw.uniform(0.05, 1.0, batch, 1)
    if draw.integer(0, 2):
        gain = gain * 1.5
        return Case(
            lambda z, context: affine(z, context).abs(),
            draw.normal(batch, n),
            (W, gain, draw.normal(batch, n)),
        )

    def step(z: Tensor, context: tuple[Tensor, ...]) -> Tensor:
        W, gain, c = context
        return gain * product(W.mT, torch.relu(product(W, z) + c))

    return Case(step, draw.normal(batch, n), (W, gain, draw.normal(batch, n)), symmetric=True)


def expansive(draw: Draw, batch: int, n: int) -> Case:
    """An equilibrium `c/(1 - rate)` that plain iteration flees, up to 1e8 away."""
    rate = 1 + 10 ** draw.uniform(-8, 0, batch, 1)
    A = per_sample(torch.eye(n, dtype=torch.float64), batch)
    return Case(affine, draw.normal(batch, n), (A, rate, draw.normal(batch, n)))


def equilibrium_at_zero(draw: Draw, batch: int, n: int) -> Case:
    start = draw.normal(batch, n) * 10 ** draw.uniform(-20, 3, batch, 1)
    A, gain = per_sample(draw.rotation(n), batch), draw.uniform(0.1, 1.05, batch, 1)
    zero = torch.zeros(batch, n, dtype=torch.float64)
    if draw.integer(0, 2):
        return Case(lambda z, _: z - z**3, start.clamp(-1, 1), (gain,))
    return Case(draw.choice([affine, recurrence]), start, (A, gain, zero))


def overflowing(draw: Draw, batch: int, n: int) -> Case:
    rate = draw.uniform(0.1, 1.5, batch, 1)

    def step(z: Tensor, context: tuple[Tensor, ...]) -> Tensor:
        return context[0] * torch.exp(z) - 0.5

    return Case(step, draw.uniform(-1, 3, batch, n), (rate,))


KINDS = [
    contracting,
    cycling,
    chaotic,
    singular,
    badly_scaled,
    leaves_of_many_scales,
    several_leaves,
    coupled_by_mistake,
    non_normal,
    piecewise_linear,
    expansive,
    equilibrium_at_zero,
    overflowing,
]


def leaves(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree.flatten(1)]
    values = [tree[key] for key in sorted(tree)] if isinstance(tree, dict) else tree
    return [value.flatten(1) for value in values]


def cast(tree: Any, dtype: torch.dtype) -> Any:
    if isinstance(tree, Tensor):
        return tree.to(dtype)
    if isinstance(tree, dict):
        return {key: cast(value, dtype) for key, value in tree.items()}
    return tuple(cast(value, dtype) for value in tree)


def excess(case: Case, value: Any, context: Any, dtype: torch.dtype, stop: Stop) -> Tensor:
    """Return the largest residual over what it may be, for each sample, in float64.

    Rounding in the solve's own dtype is allowed for; a leaf may be at zero.
    """
    value, context = cast(value, torch.float64), cast(context, torch.float64)
    start = cast(cast(case.start, dtype), torch.float64)
    worst = torch.zeros(len(leaves(value)[0]), dtype=torch.float64)
    four = [leaves(value), leaves(case.step(value, context))]
    four += [leaves(start), leaves(case.step(start, context))]
    if stop.norm == "state":  # one length for all leaves together
        four = [[torch.cat(parts, dim=1)] for parts in four]
    for z, f, z0, f0 in zip(*four, strict=True):
        size = torch.maximum(_norm(f), _norm(z))
        began = torch.maximum(_norm(z0), _norm(f0))
        allowed = 2 * stop.target(size) + 200 * torch.finfo(dtype).eps * size + 1e-13 * began
        residual = _norm(f - z)
        ratio = torch.where(residual == 0, 0.0, residual / allowed)
        worst = torch.maximum(worst, ratio.nan_to_num(math.inf))
    return worst


def _norm(matrix: Tensor) -> Tensor:
    largest = matrix.abs().amax(dim=1, keepdim=True)
    unit = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
    return torch.linalg.vector_norm(matrix / unit, dim=1) * unit.squeeze(1)


@dataclass
class Verdict:
    """What became of one problem.

    Attributes:
        kind: Its kind.
        description: Which one it was.
        statuses: How many samples ended how; `REFUSED` and `FALSE` besides.
        error: The sentence with which it was refused.
    """

    kind: str
    description: str
    statuses: Counter[str]
    error: str = ""


def problem(seed: int, index: int) -> tuple[str, Case, torch.dtype, str, bool]:
    """Return kind, problem, dtype, solver and whether the step closes over its context."""
    draw = Draw(1_000_003 * seed + index)
    kind = KINDS[index % len(KINDS)]
    batch = min(64, int(2 ** draw.number(0, 6.5)))
    case = kind(draw, batch, draw.integer(1, 9))
    dtype = draw.choice([torch.float32, torch.float64])
    solver = draw.choice(SOLVER_NAMES)
    if solver == "accelerated" and not case.symmetric:
        solver = "auto"
    return kind.__name__, case, dtype, solver, draw.integer(0, 4) == 0


def examine(seed: int, index: int) -> Iterator[Verdict]:
    """Solve one problem, and for some its adjoint, and compare with the truth."""
    kind, case, dtype, solver, closed = problem(seed, index)
    start, context = cast(case.start, dtype), cast(case.context, dtype)
    description = f"{index}: {solver} {dtype} batch {len(context[0])}"
    stop = Stop()
    try:
        if closed:
            solution = solve(
                lambda z: case.step(z, context), start, solver, stop, symmetric=case.symmetric
            )
        else:
            solution = solve(
                case.step, start, solver, stop, context=context, symmetric=case.symmetric
            )
    except ValueError as error:
        yield Verdict(kind, description, Counter(REFUSED=1), str(error))
        return
    statuses = Counter(Status(code).name for code in solution.status.tolist())
    wrong = solution.converged & (excess(case, solution.value, context, dtype, stop) > 1)
    statuses["FALSE"] = int(wrong.sum())
    yield Verdict(kind, description, statuses)
    if index % EXAMINED_ADJOINTS == 0 and isinstance(case.start, Tensor):
        yield from examine_adjoint(kind, case, dtype, solver, description)


class Shifted(Cell):
    """The map of a case plus its input, whose gradient is the adjoint solution."""

    def __init__(self, case: Case, context: tuple[Tensor, ...], start: Tensor) -> None:
        super().__init__()
        self.case, self.start = case, start
        self.fixed = context
        self.symmetric = case.symmetric

    def inject(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x, *self.fixed)

    def initial(self, x: Tensor, context: tuple[Tensor, ...]) -> Tensor:
        return self.start

    def step(self, z: Tensor, context: tuple[Tensor, ...]) -> Tensor:
        return self.case.step(z, context[1:]) + context[0]


def examine_adjoint(
    kind: str, case: Case, dtype: torch.dtype, solver: str, description: str
) -> Iterator[Verdict]:
    """Compare the gradient with a dense solve where both directions say CONVERGED."""
    start, context = cast(case.start, dtype), cast(case.context, dtype)
    layer = Equilibrium(Shifted(case, context, start), solver, on_failure="ignore")
    x = torch.zeros_like(start, requires_grad=True)
    g = torch.linspace(-1, 1, x.numel(), dtype=dtype).view_as(x) + 0.1
    kind = f"{kind}, adjoint"
    try:
        z = layer(x)
        z.backward(g)
    except ValueError as error:
        yield Verdict(kind, description, Counter(REFUSED=1), str(error))
        return
    last = layer.last
    assert last is not None
    assert last.adjoint is not None
    assert x.grad is not None
    both = last.converged & last.adjoint.converged
    statuses = Counter(Status(code).name for code in last.adjoint.status.tolist())
    statuses["FORWARD FAILED"] = int((last.adjoint.converged & ~last.converged).sum())
    statuses["CONVERGED"] -= statuses["FORWARD FAILED"]
    state, exact = z.detach().double(), cast(context, torch.float64)
    J = torch.autograd.functional.jacobian(lambda v: case.step(v, exact), state)
    n = state.numel()
    system = torch.eye(n, dtype=torch.float64) - J.reshape(n, n).T
    found, right = x.grad.double(), g.double()
    remainder = right.flatten() - system @ found.flatten()
    inverse = torch.linalg.pinv(system)
    error = (inverse @ remainder).view_as(found).norm(dim=1)
    size = torch.maximum(found.norm(dim=1), right.norm(dim=1))
    rounding = 200 * torch.finfo(dtype).eps * (1 + float(torch.linalg.matrix_norm(system, 2)))
    amplified = float(torch.linalg.matrix_norm(inverse, 2))
    allowed = amplified * (2 * layer.stop.tolerance + rounding) * size
    statuses["FALSE"] = int((both & ~(error <= allowed)).sum())
    yield Verdict(kind, description, statuses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore", ConvergenceWarning)
    torch.set_num_threads(1)
    table: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for index in range(options.first, options.first + options.count):
        for verdict in examine(options.seed, index):
            table[verdict.kind] += verdict.statuses
            table[verdict.kind]["PROBLEMS"] += 1
            if verdict.statuses["FALSE"]:
                print(f"FALSE {verdict.kind} {verdict.description} {dict(verdict.statuses)}")
            if verdict.error and "coupled must be True" not in verdict.error:
                print(f"REFUSED {verdict.kind} {verdict.description}: {verdict.error}")
    columns = ["PROBLEMS", *(status.name for status in Status), "FORWARD FAILED"]
    columns += ["REFUSED", "FALSE"]
    print("| kind | " + " | ".join(name.lower() for name in columns) + " |")
    print("|---|" + "---|" * len(columns))
    for kind, found in sorted(table.items()):
        print(f"| {kind} | " + " | ".join(str(found[name]) for name in columns) + " |")


if __name__ == "__main__":
    main()
