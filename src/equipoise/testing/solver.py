"""What every solver promises."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from equipoise.core.tree import Shared
from equipoise.solvers import SOLVERS, Solution, Solver, Status, Stop, solve
from equipoise.testing.contract import (
    Report,
    distance,
    require,
    require_close,
    run_checks,
)
from equipoise.testing.fates import SYMMETRIC_FAMILIES, Poison, draw_batch
from equipoise.testing.linear_solver import LINEAR_CHECKS, REFUSALS, ROWS, SETTINGS, SolverCase
from equipoise.testing.problems import (
    PROBLEMS,
    Known,
    contraction,
    residual_of,
    symmetric,
    tanh,
)
from equipoise.testing.status import check_statuses
from equipoise.testing.trees import bare, leaves, pick, rows

__all__ = ["check_solver"]

TRUTH = "Return Move.f only as the map at Move.z, and Move.gap only with tracks_residual = True."


def check_solver(
    solver: str | Solver, *, max_steps: int = 2000, skip: Iterable[str] = (), seed: int = 0
) -> Report:
    """Raise `ContractError` unless a solver keeps every promise of the protocol.

    It is run on problems with known answers, on problems that diverge, cycle, stall or meet NaN, on
    batches whose samples end at different times, and on affine equations.

    Args:
        solver: A solver, or the name of a registered one.
        max_steps: Steps within which it must solve contractions of norm 0.95.
        skip: Names of checks to leave out.
        seed: Seed of the problems.
    """
    chosen = SOLVERS.resolve(solver)
    case = _Case(chosen, max_steps)
    checks = [*SETTINGS, *(() if chosen.linear else _CHECKS), *LINEAR_CHECKS, *REFUSALS]
    inapplicable = {}
    if chosen.runs_all_steps:
        reason = "it uses all its steps, so that reaching a fixed point does not end a solve"
        inapplicable = {
            check.__name__.lstrip("_"): reason
            for check in checks
            if check not in (*SETTINGS, *REFUSALS, *_ALWAYS)
        }
    return run_checks(
        "check_solver",
        case.name,
        case,
        checks,
        skip=skip,
        seed=seed,
        inapplicable=inapplicable,
    )


class _Case(SolverCase):
    @property
    def tight(self) -> Stop:
        return Stop(tolerance=1e-13, max_steps=self.max_steps)

    def problems(self, dtype: torch.dtype = torch.float64) -> dict[str, Known]:
        """Return the problems that the solver may run on."""
        made = {name: make(dtype=dtype) for name, make in PROBLEMS.items()}
        if self.solver.runs_all_steps:  # it chooses by a function of a state of one tensor
            del made["tree"]
        needed = self.solver.needs_symmetric
        return {name: known for name, known in made.items() if known.symmetric or not needed}

    def suitable(self) -> Known:
        """Return a batch that the solver may run on and that takes it several steps."""
        return symmetric() if self.solver.needs_symmetric else tanh()

    def find(self, known: Known, stop: Stop, **options: Any) -> Solution:
        return solve(
            known.step,
            known.start,
            self.solver,
            stop,
            context=known.context,
            symmetric=known.symmetric,
            **options,
        )

    def run(self, step: Callable[..., Any], start: Tensor, stop: Stop, context: Any) -> Solution:
        """Solve an equation whose Jacobian is symmetric."""
        return solve(step, start, self.solver, stop, context=context, symmetric=True)


def _finds_known_fixed_points(case: _Case) -> None:
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


def _residual_is_recomputed(case: _Case) -> None:
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
            torch.equal(solution.converged, residual <= 1e-14 + 1e-9 * scale),
            case.name,
            "call a sample CONVERGED if and only if its recomputed residual is within the "
            "tolerance",
            f"{solution!r}, whose recomputed residuals reach {float(residual.max()):.1e}",
            TRUTH,
        )


def _max_steps_is_honoured(case: _Case) -> None:
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


def _statuses_are_true(case: _Case) -> None:
    stop = Stop(tolerance=1e-6, max_steps=60, patience=25)
    if not case.solver.needs_symmetric:
        check_statuses(case.solver, draw_batch(0, size=34), stop)
    check_statuses(case.solver, draw_batch(0, SYMMETRIC_FAMILIES, 12), stop, symmetric=True)


def _evaluations_are_counted(case: _Case) -> None:
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


def _trace_is_the_path(case: _Case) -> None:
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
            residual, scale = residual_of(known, state)
            require(
                torch.allclose(path.residual[look], residual / scale, rtol=1e-4, atol=1e-15),
                case.name,
                "leave the true residuals in its trace",
                f"{path.residual[look].tolist()} at step {look} where they are "
                f"{(residual / scale).tolist()}",
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


def _looking_less_often_changes_nothing(case: _Case) -> None:
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


def _warm_start_takes_no_step(case: _Case) -> None:
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


def _samples_are_independent(case: _Case) -> None:
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


def _dropping_rows_changes_nothing(case: _Case) -> None:
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


def _writes_into_nothing(case: _Case) -> None:
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


def _solves_are_repeatable(case: _Case) -> None:
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


def _empty_batch_is_solved(case: _Case) -> None:
    start = torch.zeros(0, 3, dtype=torch.float64)
    solution = case.run(lambda z, _: z.cos(), start, Stop(), ())
    require(
        solution.value.shape == (0, 3) and solution.status.shape == (0,),
        case.name,
        "accept an empty batch",
        f"shape {tuple(solution.value.shape)}",
    )


def _constant_map_is_solved(case: _Case) -> None:
    constant = torch.randn(4, 3, dtype=torch.float64)
    solution = case.run(lambda z, c: c + 0 * z, torch.zeros_like(constant), case.tight, constant)
    require(
        solution.converged.all() and distance(solution.value, constant) < 1e-11,
        case.name,
        "solve a map that ignores its state",
        f"{solution!r}",
    )


def _coupled_batch_is_one_problem(case: _Case) -> None:
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


def _infinity_is_told(case: _Case) -> None:
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


def _nan_touches_nobody_else(case: _Case) -> None:
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


def _precision_is_not_exceeded(case: _Case) -> None:
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


_ALWAYS = (_writes_into_nothing, _solves_are_repeatable, _empty_batch_is_solved)
_CHECKS = (
    _finds_known_fixed_points,
    _residual_is_recomputed,
    _max_steps_is_honoured,
    *_ALWAYS,
    _samples_are_independent,
    _dropping_rows_changes_nothing,
    _statuses_are_true,
    _evaluations_are_counted,
    _trace_is_the_path,
    _looking_less_often_changes_nothing,
    _warm_start_takes_no_step,
    _constant_map_is_solved,
    _coupled_batch_is_one_problem,
    _infinity_is_told,
    _nan_touches_nobody_else,
    _precision_is_not_exceeded,
)
