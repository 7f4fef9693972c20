"""Whether a solver finds fixed points and tells the truth about them."""

from __future__ import annotations

from typing import Any

import torch

from equipoise.solvers import Stop, solve
from equipoise.testing.contract import distance, require, require_close
from equipoise.testing.fates import SYMMETRIC_FAMILIES, draw_batch
from equipoise.testing.problems import contraction, relative_residual_of, residual_of
from equipoise.testing.solver_case import ForwardCase
from equipoise.testing.status import check_statuses
from equipoise.testing.trees import leaves, rows

__all__ = ["TRUTH_CHECKS"]

TRUTH = "Return Move.f only as the map at Move.z, and Move.gap only with tracks_residual = True."


def _finds_known_fixed_points(case: ForwardCase) -> None:
    for dtype, stop, tolerance in (
        (torch.float64, case.tight, 1e-10),
        (torch.float32, Stop(1e-6, absolute=1e-7, max_steps=case.max_steps), 1e-4),
    ):
        for name, known in case.problems(dtype).items():
            solution = case.find(known, stop)
            where = f"the problem {name!r} in {dtype}"
            require(
                solution.converged,
                case.name,
                f"converge on {where}, which has one fixed point and contracts",
                f"{solution!r}",
                "Raise max_steps if it is slow; see that Rule.select_rows keeps the given rows.",
            )
            require_close(
                rows(solution.value),
                rows(known.answer),
                tolerance,
                case.name,
                f"find the fixed point of {where}",
            )
            shapes = [(leaf.shape, leaf.dtype) for leaf in leaves(solution.value)]
            require(
                shapes == [(leaf.shape, leaf.dtype) for leaf in leaves(known.answer)],
                case.name,
                f"keep the shapes and the dtype of {where}",
                f"{shapes}",
            )


def _residual_is_recomputed(case: ForwardCase) -> None:
    for max_steps in (1, 3, case.max_steps):
        known = case.suitable()
        solution = case.find(known, Stop(tolerance=1e-9, max_steps=max_steps))
        residual, scale = residual_of(known, solution.value)
        worst = int((solution.residual - residual / scale).abs().argmax())
        require(
            torch.allclose(solution.residual, residual / scale, rtol=1e-4, atol=1e-15),
            case.name,
            "report the recomputed relative residual |f(z) - z| / |f(z)|",
            f"{float(solution.residual[worst]):.3e} where it is "
            f"{float(residual[worst] / scale[worst]):.3e}, after at most {max_steps} steps",
            TRUTH,
        )
        require(
            torch.equal(solution.converged, residual <= 1e-9 * scale),
            case.name,
            "call a sample CONVERGED if and only if its recomputed residual is within the "
            "tolerance",
            f"{solution!r}, whose recomputed residuals reach {float(residual.max()):.1e}",
            TRUTH,
        )


def _max_steps_is_honoured(case: ForwardCase) -> None:
    known = case.suitable()
    for max_steps in (1, 2, 5):
        solution = case.find(known, Stop(tolerance=1e-13, max_steps=max_steps))
        require(
            (solution.steps <= max_steps).all() and (solution.steps >= 1).all(),
            case.name,
            f"make at most {max_steps} steps when max_steps is {max_steps}",
            f"{solution.steps.tolist()} steps",
        )
        before, _ = residual_of(known, known.start)
        after, _ = residual_of(known, solution.value)
        require(
            after <= before,
            case.name,
            "return no iterate that is worse than the start",
            f"a residual {float((after / before).max()):.2g} times larger after {max_steps} steps",
        )


def _statuses_are_true(case: ForwardCase) -> None:
    stop = Stop(tolerance=1e-6, max_steps=60, patience=25)
    if not case.solver.needs_symmetric:
        check_statuses(case.solver, draw_batch(0, size=34), stop)
    check_statuses(case.solver, draw_batch(0, SYMMETRIC_FAMILIES, 12), stop, symmetric=True)


def _evaluations_are_counted(case: ForwardCase) -> None:
    known = case.suitable()
    calls = 0

    def step(z: Any, context: Any) -> Any:
        nonlocal calls
        calls += 1
        return known.step(z, context)

    solution = solve(
        step,
        known.start,
        case.solver,
        Stop(tolerance=1e-10, max_steps=case.max_steps),
        context=known.context,
        symmetric=known.symmetric,
    )
    require(
        int(solution.evaluations.max()) >= calls,
        case.name,
        "count every evaluation of the map",
        f"{int(solution.evaluations.max())} counted of {calls}",
        "Evaluate the map by calling the problem.",
    )


def _trace_is_the_path(case: ForwardCase) -> None:
    for name, known in case.problems().items():
        if name not in ("tanh", "symmetric", "tree"):
            continue
        solution = case.find(known, Stop(tolerance=1e-8, max_steps=case.max_steps), trace=True)
        path = solution.trace
        steps, batch = int(solution.steps.max()), rows(known.start).shape[0]
        require(
            path is not None
            and path.residual.shape == (steps + 1, batch)
            and len(path.state) == steps + 1,
            case.name,
            "leave one trace entry for each look at the residuals",
            "another number of entries",
        )
        assert path is not None
        for look, state in enumerate(path.state):
            residual = relative_residual_of(known, state)
            require(
                torch.allclose(path.residual[look], residual, rtol=1e-4, atol=1e-15),
                case.name,
                "leave the true residuals in its trace",
                f"{path.residual[look].tolist()} at step {look} where they are {residual.tolist()}",
                TRUTH,
            )
        for sample, ended in enumerate(solution.steps.tolist()):
            end = rows(path.state[ended])[sample]
            require(
                torch.equal(rows(path.state[-1])[sample], end)
                and torch.equal(rows(solution.value)[sample], end)
                and (path.residual[:ended, sample] > 1e-8).all()
                and (path.residual[ended:, sample] <= 1e-8).all(),
                case.name,
                "leave a finished sample where it ended",
                f"sample {sample} of {name!r} moved after step {ended}",
                "Do not write into the tensors of a Point or a Move.",
            )


def _looking_less_often_changes_nothing(case: ForwardCase) -> None:
    known = case.suitable()
    often = case.find(known, Stop(tolerance=1e-10, max_steps=case.max_steps))
    rarely = case.find(
        known, Stop(tolerance=1e-10, max_steps=case.max_steps, check_every=3), trace=True
    )
    require(rarely.converged, case.name, "converge with check_every=3", f"{rarely!r}")
    require_close(
        rarely.value, often.value, 1e-8, case.name, "find the same fixed point with check_every=3"
    )
    require(
        (rarely.steps % 3 == 0).all()
        and (rarely.steps >= often.steps).all()
        and rarely.trace is not None
        and len(rarely.trace.state) == int(rarely.steps.max()) // 3 + 1,
        case.name,
        "stop at every third step with check_every=3",
        f"{rarely.steps.tolist()} steps where it made {often.steps.tolist()} before",
    )


def _warm_start_takes_no_step(case: ForwardCase) -> None:
    for name, known in case.problems().items():
        solution = solve(
            known.step,
            known.answer,
            case.solver,
            Stop(tolerance=1e-10),
            context=known.context,
            symmetric=known.symmetric,
            trace=True,
        )
        require(
            solution.converged.all()
            and (solution.steps == 0).all()
            and (solution.evaluations == 1).all()
            and distance(rows(solution.value), rows(known.answer)) == 0,
            case.name,
            f"take no step from the fixed point of {name!r}",
            f"{solution!r}",
            "Evaluate nothing in Solver.start.",
        )


def _precision_is_not_exceeded(case: ForwardCase) -> None:
    for dtype in (torch.float32, torch.float64):
        A, c = contraction(8, 5, 5), torch.randn(8, 5, dtype=torch.float64)
        A, c = (A @ A.mT).to(dtype), c.to(dtype)
        solution = case.run(
            lambda z, context: torch.einsum("bij,bj->bi", context[0], z) + context[1],
            torch.zeros_like(c),
            Stop(tolerance=1e-20, absolute=0.0, max_steps=1000),
            (A, c),
        )
        require(
            torch.equal(solution.converged, solution.residual == 0),
            case.name,
            f"not claim a tolerance beyond the reach of {dtype}",
            f"{solution!r} for a tolerance of 1e-20",
            TRUTH,
        )


TRUTH_CHECKS = (
    _finds_known_fixed_points,
    _residual_is_recomputed,
    _max_steps_is_honoured,
    _statuses_are_true,
    _evaluations_are_counted,
    _trace_is_the_path,
    _looking_less_often_changes_nothing,
    _warm_start_takes_no_step,
    _precision_is_not_exceeded,
)
