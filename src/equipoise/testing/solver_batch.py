"""Whether a solver treats each sample of a batch for itself, and touches nothing else."""

from __future__ import annotations

import torch

from equipoise.core.tree import Shared
from equipoise.solvers import Status, Stop, solve
from equipoise.testing.contract import distance, require
from equipoise.testing.fates import Poison
from equipoise.testing.linear_solver import ROWS
from equipoise.testing.problems import contraction, residual_of
from equipoise.testing.solver_case import ForwardCase
from equipoise.testing.trees import bare, leaves, pick, rows

__all__ = ["ALWAYS", "BATCH_CHECKS"]


def _samples_are_independent(case: ForwardCase) -> None:
    stop = Stop(tolerance=1e-11, max_steps=case.max_steps)
    for name, known in case.problems().items():
        together = case.find(known, stop)
        for sample in range(rows(known.start).shape[0]):
            index = slice(sample, sample + 1)
            alone = solve(
                known.step,
                pick(known.start, index),
                case.solver,
                stop,
                context=pick(known.context, index),
                symmetric=known.symmetric,
            )
            difference = abs(int(alone.steps[0]) - int(together.steps[sample]))
            require(
                alone.status[0] == together.status[sample]
                and difference <= 1
                and distance(alone.value, pick(together.value, index)) <= 1e-8,
                case.name,
                "solve each sample as if it were alone",
                f"{alone!r} for sample {sample} of {name!r} alone, and another answer in a batch",
                ROWS,
            )


def _dropping_rows_changes_nothing(case: ForwardCase) -> None:
    rates = torch.tensor([0.0, 0.1, 0.9, 0.99, 0.5, 0.98], dtype=torch.float64)[:, None]
    start = torch.linspace(1, 2, 6, dtype=torch.float64)[:, None].repeat(1, 3)
    solution = case.run(
        lambda z, rate: rate * z + 1,
        start,
        Stop(tolerance=1e-12, max_steps=10 * case.max_steps),
        rates,
    )
    require(
        solution.converged.all()
        and torch.allclose(solution.value, (1 / (1 - rates)).expand(6, 3), rtol=1e-9)
        and solution.steps[0] <= solution.steps[3],
        case.name,
        "solve easy and hard samples in one batch, from which the easy ones leave",
        f"{solution!r}, off by "
        f"{float(((1 - rates) * solution.value - 1).abs().max()):.1e} of the answer",
        ROWS,
    )
    known = case.suitable()
    context = bare(known.context)
    stay = solve(
        lambda z: known.step(z, context),
        known.start,
        case.solver,
        case.tight,
        symmetric=known.symmetric,
    )
    require(
        stay.converged.all() and distance(stay.value, known.answer) < 1e-10,
        case.name,
        "solve samples that cannot leave their batch",
        f"{stay!r}",
        ROWS,
    )
    residual, scale = residual_of(known, stay.value)
    require(
        torch.allclose(stay.residual, residual / scale, rtol=1e-2, atol=1e-15),
        case.name,
        "freeze finished samples that stay in the batch",
        f"residuals {stay.residual.tolist()} where they are {(residual / scale).tolist()}",
        ROWS,
    )


def _writes_into_nothing(case: ForwardCase) -> None:
    for name, known in case.problems().items():
        mine = [*leaves(known.start), *leaves(known.context)]
        before = [leaf.clone() for leaf in mine]
        case.find(known, Stop(tolerance=1e-8, max_steps=case.max_steps), trace=True)
        require(
            all(torch.equal(old, new) for old, new in zip(before, mine, strict=True)),
            case.name,
            "leave its start and its context as they were",
            f"other values in those of {name!r} after a solve",
            "Do not write into the tensors of a Point.",
        )


def _solves_are_repeatable(case: ForwardCase) -> None:
    for name, known in case.problems().items():
        stop = Stop(tolerance=1e-9, max_steps=case.max_steps)
        first, second = (case.find(known, stop) for _ in range(2))
        require(
            all(
                torch.equal(getattr(first, field), getattr(second, field))
                for field in ("status", "residual", "steps", "evaluations")
            )
            and torch.equal(rows(first.value), rows(second.value)),
            case.name,
            "do the same in every solve of the same problem",
            f"{first!r} and {second!r} for {name!r}",
            "Keep memory in the Rule, not in the Solver.",
        )


def _empty_batch_is_solved(case: ForwardCase) -> None:
    start = torch.zeros(0, 3, dtype=torch.float64)
    solution = case.run(lambda z, _: z.cos(), start, Stop(), ())
    require(
        solution.value.shape == (0, 3) and solution.status.shape == (0,),
        case.name,
        "accept an empty batch",
        f"shape {tuple(solution.value.shape)}",
    )


def _constant_map_is_solved(case: ForwardCase) -> None:
    constant = torch.randn(4, 3, dtype=torch.float64)
    solution = case.run(lambda z, c: c + 0 * z, torch.zeros_like(constant), case.tight, constant)
    require(
        solution.converged.all() and distance(solution.value, constant) < 1e-11,
        case.name,
        "solve a map that ignores its state",
        f"{solution!r}",
    )


def _coupled_batch_is_one_problem(case: ForwardCase) -> None:
    mixing = torch.full((3, 3), 0.3, dtype=torch.float64)
    c = torch.randn(3, 2, dtype=torch.float64)
    answer = torch.linalg.solve(torch.eye(3, dtype=torch.float64) - mixing, c)
    solution = solve(
        lambda z, context: context[0] @ z + context[1],
        torch.zeros_like(c),
        case.solver,
        case.tight,
        context=(Shared(mixing), c),
        symmetric=True,
        coupled=True,
    )
    require(
        solution.status.shape == (1,)
        and solution.converged.all()
        and distance(solution.value, answer) < 1e-10,
        case.name,
        "solve a coupled batch as one problem with one status",
        f"{solution!r}, off by {distance(solution.value, answer):.1e}",
    )


def _infinity_is_told(case: ForwardCase) -> None:
    for dtype in (torch.float32, torch.float64):
        start = torch.ones(3, 2, dtype=dtype)
        jump = torch.tensor([[0.0], [torch.inf], [torch.nan]], dtype=dtype)
        solution = case.run(
            lambda z, c: 0.5 * z + 1 + c, start, Stop(max_steps=case.max_steps), jump
        )
        wanted = [Status.CONVERGED, Status.NONFINITE, Status.NONFINITE]
        require(
            solution.status.tolist() == wanted and torch.equal(solution.value[1:], start[1:]),
            case.name,
            "say NONFINITE where the map is infinite or NaN, and return the start there",
            f"{solution!r}",
        )
    for bad in (torch.inf, -torch.inf, torch.nan):
        start = torch.ones(2, 2, dtype=torch.float64)
        start[0, 1] = bad
        solution = case.run(lambda z, _: 0.5 * z + 1, start, Stop(max_steps=case.max_steps), ())
        require(
            solution.status.tolist() == [Status.NONFINITE, Status.CONVERGED],
            case.name,
            f"say NONFINITE of a start that holds {bad}, and of no other sample",
            f"{solution!r}",
        )


def _nan_touches_nobody_else(case: ForwardCase) -> None:
    stop = Stop(tolerance=1e-10, max_steps=case.max_steps)
    for count, call in ((1, 1), (5, 0), (5, 1), (5, 3)):
        A = contraction(count, 6, 6, norm=0.97)
        A, c = A @ A.mT, torch.randn(count, 6, dtype=torch.float64)
        start, context = torch.randn(count, 6, dtype=torch.float64), (torch.arange(count), A, c)
        clean = case.run(Poison(-1, 0), start, stop, context)
        for victim in range(0, count, 2):
            poison = Poison(victim, call)
            solution = case.run(poison, start, stop, context)
            others = [i for i in range(count) if i != victim]
            require(
                not poison.struck
                or (
                    solution.status[victim] == Status.NONFINITE
                    and solution.value[victim].isfinite().all()
                    and solution.converged[others].all()
                    and distance(solution.value[others], clean.value[others]) <= 1e-8
                ),
                case.name,
                "tell of NaN in one sample and solve the others as before",
                f"{solution!r} with NaN in sample {victim} from call {call} on",
                ROWS,
            )


ALWAYS = (
    _writes_into_nothing,
    _solves_are_repeatable,
    _empty_batch_is_solved,
)
"""What holds of solvers that use all their steps, too."""
BATCH_CHECKS = (
    *ALWAYS,
    _samples_are_independent,
    _dropping_rows_changes_nothing,
    _constant_map_is_solved,
    _coupled_batch_is_one_problem,
    _infinity_is_told,
    _nan_touches_nobody_else,
)
