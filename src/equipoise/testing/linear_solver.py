"""What every solver promises on affine equations `v = A v + g`: the adjoints of equilibria."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.solvers import (
    Linearization,
    LinearProblem,
    Solution,
    Solver,
    Status,
    Stop,
    run,
    solve,
)
from equipoise.testing.contract import (
    distance,
    require,
    require_close,
    require_copies,
    require_settings,
)
from equipoise.testing.fates import FAMILIES, SYMMETRIC_FAMILIES, Maker, Sample, draw_batch, stack
from equipoise.testing.problems import KnownLinear, affine_problem, contraction, linear

__all__ = ["LINEAR_CHECKS", "REFUSALS", "SETTINGS", "SolverCase"]

ROWS = "Keep one row of memory for each sample, and drop the others in Rule.select_rows."
TRUTH = "Set tracks_residual = True if it gives Move.gap from a recurrence."

SINGULAR = (Maker.inconsistent, Maker.translation)
REGULAR = [family for family in FAMILIES[:13] if family not in (*SINGULAR, Maker.logistic)]
REGULAR_SYMMETRIC = [*SYMMETRIC_FAMILIES[:2], SYMMETRIC_FAMILIES[3], Maker.slow_expansion]


@dataclass(frozen=True)
class SolverCase:
    """A solver to check, and the steps that it may take on problems that contract."""

    solver: Solver
    max_steps: int

    @property
    def name(self) -> str:
        """What messages call it."""
        return type(self.solver).__name__

    def stop(self, tolerance: float, max_steps: int | None = None) -> Stop:
        """Return a rule with a relative tolerance alone."""
        return Stop(tolerance, absolute=0.0, max_steps=max_steps or self.max_steps)

    def affine(self, problem: LinearProblem, stop: Stop, start: Tensor | None = None) -> Solution:
        """Solve an affine problem, from zero by default."""
        start = torch.zeros_like(problem.g) if start is None else start
        return run(problem, start, self.solver, stop)


def _copies_equal_the_original(case: SolverCase) -> str | None:
    return require_copies(case.solver, case.name)


def _settings_are_validated(case: SolverCase) -> str | None:
    return require_settings(case.solver, case.name)


def _symmetry_is_asked_for(case: SolverCase) -> str | None:
    if not case.solver.needs_symmetric:
        return "it does not need a symmetric Jacobian"
    _refuses(case, "a map not declared symmetric", lambda: case.affine(linear().problem, Stop()))
    return None


def _nonlinear_map_is_refused(case: SolverCase) -> str | None:
    if not case.solver.linear:
        return "it solves nonlinear equations too"
    start = torch.zeros(2, 2, dtype=torch.float64)
    _refuses(case, "a nonlinear map", lambda: solve(torch.cos, start, case.solver, symmetric=True))
    return None


def _refuses(case: SolverCase, what: str, call: Callable[[], object]) -> None:
    try:
        call()
    except ValueError:
        return
    require(False, case.name, f"refuse {what} with a ValueError", "a solution")


def _solves_affine_equations(case: SolverCase) -> None:
    for dtype, tolerance, close in ((torch.float64, 1e-12, 1e-10), (torch.float32, 1e-5, 1e-3)):
        for transpose in (False, True):
            for symmetric in (True,) if case.solver.needs_symmetric else (False, True):
                known = linear(transpose=transpose, symmetric=symmetric, dtype=dtype)
                start = torch.zeros_like(known.answer)
                solution = case.affine(known.problem, case.stop(tolerance), start)
                where = f"v = A{'^T' if transpose else ''} v + g in {dtype}, A of norm at most 0.9"
                require(solution.converged, case.name, f"solve {where}", f"{solution!r}")
                require_close(
                    solution.value, known.answer, close, case.name, f"find the answer of {where}"
                )
                require(
                    torch.equal(start, torch.zeros_like(start)),
                    case.name,
                    "leave its start as it was",
                    "other values in it",
                    "Do not write into the tensors of a Point.",
                )


def _affine_residual(known: KnownLinear, value: Tensor) -> tuple[Tensor, Tensor]:
    f = torch.einsum("bij,bj->bi", known.matrix, value) + known.g
    return (f - value).norm(dim=1), torch.maximum(f.norm(dim=1), known.g.norm(dim=1))


def _affine_residual_is_recomputed(case: SolverCase) -> None:
    for max_steps in (1, 2, 4, case.max_steps):
        known = linear(symmetric=True)
        solution = case.affine(known.problem, case.stop(1e-9, max_steps), torch.randn_like(known.g))
        residual, scale = _affine_residual(known, solution.value)
        require(
            torch.allclose(solution.residual, residual / scale, rtol=1e-4, atol=1e-14)
            and torch.equal(solution.converged, residual / scale <= 1e-9)
            and (solution.steps <= max_steps).all(),
            case.name,
            "report the recomputed residual of an affine equation, relative to the larger of "
            "|f(v)| and |g|, within max_steps",
            f"{solution!r} where residuals reach {float((residual / scale).max()):.1e}",
            TRUTH,
        )


def _affine_work_is_counted(case: SolverCase) -> None:
    A, g = linear(symmetric=True).matrix, torch.randn(5, 7, dtype=torch.float64)
    calls = 0

    def counted(matrix: Tensor) -> Linearization:
        def product(v: Tensor) -> Tensor:
            nonlocal calls
            # A product with repeated rows is several for each sample.
            calls += max(len(v) // len(g), 1)
            return torch.einsum("bij,bj->bi", matrix, v)

        return Linearization(
            torch.zeros_like(matrix[:, 0]),
            product,
            product,
            select_rows=lambda index: counted(matrix[index]),
        )

    problem = affine_problem(A, g, transpose=True, symmetric=True, local=counted(A))
    solution = case.affine(problem, case.stop(1e-11))
    found = int(solution.evaluations.max())
    require(
        solution.converged.all() and found == calls,
        case.name,
        "count every product with the Jacobian",
        f"{found} counted of {calls}",
        "Multiply by calling the problem or its product.",
    )


def _affine_warm_start_takes_no_step(case: SolverCase) -> None:
    known = linear(symmetric=True)
    solution = case.affine(known.problem, Stop(tolerance=1e-10), known.answer)
    require(
        solution.converged.all() and (solution.steps == 0).all(),
        case.name,
        "take no step from the solution of an affine equation",
        f"{solution!r}",
    )


def _zero_constant_has_zero_answer(case: SolverCase) -> None:
    known = linear(symmetric=True)
    g = known.g.clone()
    g[2] = 0
    solution = case.affine(affine_problem(known.matrix, g, symmetric=True), case.stop(1e-11))
    kept = torch.tensor([0, 1, 3, 4])
    require(
        solution.converged.all()
        and solution.steps[2] == 0
        and not solution.value[2].any()
        and distance(solution.value[kept], known.answer[kept]) < 1e-9,
        case.name,
        "answer zero at once where g is zero, and solve the other samples",
        f"{solution!r}",
    )


def _affine_samples_are_independent(case: SolverCase) -> None:
    known = linear(symmetric=True)
    together = case.affine(known.problem, case.stop(1e-11))
    for sample in range(5):
        row = torch.tensor([sample])
        alone = case.affine(
            affine_problem(known.matrix[row], known.g[row], symmetric=True), case.stop(1e-11)
        )
        require(
            alone.status[0] == together.status[sample]
            and distance(alone.value, together.value[row]) < 1e-8,
            case.name,
            "solve each affine equation as if it were alone",
            f"{alone!r} for sample {sample} alone and {together.rows(row)!r} in a batch",
            ROWS,
        )


def _affine_statuses_are_true(case: SolverCase) -> None:
    symmetric = case.solver.needs_symmetric
    samples = draw_batch(0, REGULAR_SYMMETRIC if symmetric else REGULAR, 36)
    require_true_affine(case, *_matrices(samples))
    maker = Maker(0)
    A, g = _matrices([maker.translation() for _ in range(30)])
    solution = require_true_affine(case, A, g)
    require(
        not solution.converged.any(),
        case.name,
        "never call v = v + g solved, which has no solution",
        f"{solution!r}",
        "A residual that is small beside a huge iterate is no solution.",
    )


def _matrices(samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    _, (_, A, g, _) = stack(samples)
    return A, g


def require_true_affine(case: SolverCase, A: Tensor, g: Tensor, max_steps: int = 120) -> Solution:
    """Solve `v = A v + g`, and raise unless each verdict is true."""
    stop = case.stop(1e-8, max_steps)
    solution = case.affine(affine_problem(A, g, symmetric=case.solver.needs_symmetric), stop)
    f = torch.einsum("bij,bj->bi", A, solution.value) + g
    residual, size = (f - solution.value).norm(dim=1), g.norm(dim=1)
    scale = torch.maximum(f.norm(dim=1), size)
    told = f"{solution!r}, whose recomputed residuals reach {float((residual / scale).max()):.1e}"
    relative = torch.where(scale == 0, 0.0, residual / scale)
    require(
        solution.value.isfinite().all() and not (solution.status == Status.NONFINITE).any(),
        case.name,
        "stay finite on a finite affine equation",
        told,
    )
    require(
        not (solution.converged & (residual > stop.tolerance * scale * (1 + 1e-6))).any(),
        case.name,
        "call an affine equation solved only where the recomputed residual is within the tolerance",
        told,
        TRUTH,
    )
    require(
        residual <= size * (1 + 1e-9),
        case.name,
        "return nothing that is worse than zero, where it started",
        told,
    )
    noise = 100 * torch.finfo(g.dtype).eps * solution.value.norm(dim=1) / scale.clamp_min(1e-300)
    require(
        (solution.residual - relative).abs() <= 1e-3 * relative + 1e-9 + noise,
        case.name,
        "report the recomputed residual of an affine equation",
        told,
        TRUTH,
    )
    short = solution.status == Status.MAX_STEPS
    require(
        solution.steps[short] == max_steps,
        case.name,
        "make max_steps steps before it says MAX_STEPS",
        told,
    )
    return solution


def _drift_is_not_believed(case: SolverCase) -> str | None:
    if not case.solver.tracks_residual:
        return "it does not track its residual by a recurrence"
    for max_steps in (30, 300):
        for can_drop_rows in (True, False):
            A = contraction(6, 7, 7, norm=0.9)
            A, g = (A @ A.mT).float(), torch.randn(6, 7)
            g[1] = 0
            problem = affine_problem(A, g, symmetric=True, can_drop_rows=can_drop_rows)
            solution = case.affine(problem, case.stop(1e-9, max_steps))
            f = torch.einsum("bij,bj->bi", A, solution.value) + g
            reached = (f - solution.value).norm(dim=1) <= 1e-5 * solution.value.norm(dim=1)
            require(
                solution.status[1] == Status.CONVERGED
                and reached.all()
                # Recomputing in another order moves a residual at the limit of the dtype, so only
                # what was reported can be held to.
                and (solution.residual[solution.converged] <= 1e-9).all()
                and (solution.steps <= max_steps).all(),
                case.name,
                "not believe a residual that drifted below what float32 can reach",
                f"{solution!r} for a tolerance of 1e-9",
                TRUTH,
            )
    return None


def _nan_in_a_product_touches_nobody_else(case: SolverCase) -> None:
    A = contraction(4, 9, 9, norm=0.97)
    A, g = A @ A.mT, torch.randn(4, 9, dtype=torch.float64)
    for call in (0, 1, 3):
        clean = case.affine(_poisoned(A, g, -1, call, []), case.stop(1e-9))
        for victim in (0, 3):
            hits: list[int] = []
            solution = case.affine(_poisoned(A, g, victim, call, hits), case.stop(1e-9))
            others = [i for i in range(4) if i != victim]
            require(
                solution.status[victim] == (Status.NONFINITE if hits else Status.CONVERGED)
                and solution.value[victim].isfinite().all()
                and solution.converged[others].all()
                and distance(solution.value[others], clean.value[others]) <= 1e-7,
                case.name,
                "tell of NaN in one sample's product and solve the others as before",
                f"{solution!r} with NaN in sample {victim} from product {call} on",
                ROWS,
            )


def _poisoned(A: Tensor, g: Tensor, victim: int, call: int, hits: list[int]) -> LinearProblem:
    """`v = A v + g` with products that are NaN for one sample from a certain one on.

    The numbers of those products are appended to `hits`.
    """
    calls = 0

    def local(matrix: Tensor, number: Tensor) -> Linearization:
        def product(v: Tensor) -> Tensor:
            nonlocal calls
            hit = (number == victim) & (calls >= call)
            if hit.any():
                hits.append(calls)
            calls += 1
            return torch.where(hit[:, None], torch.nan, torch.einsum("bij,bj->bi", matrix, v))

        return Linearization(
            torch.zeros_like(matrix[:, 0]),
            product,
            product,
            lambda rows: local(matrix[rows], number[rows]),
        )

    return affine_problem(
        A, g, transpose=True, symmetric=True, local=local(A, torch.arange(len(A)))
    )


SETTINGS = (_copies_equal_the_original, _settings_are_validated)
REFUSALS = (_symmetry_is_asked_for, _nonlinear_map_is_refused)
LINEAR_CHECKS = (
    _solves_affine_equations,
    _affine_residual_is_recomputed,
    _affine_work_is_counted,
    _affine_warm_start_takes_no_step,
    _zero_constant_has_zero_answer,
    _affine_samples_are_independent,
    _affine_statuses_are_true,
    _drift_is_not_believed,
    _nan_in_a_product_touches_nobody_else,
)
