"""What every solver promises."""

from __future__ import annotations

from collections.abc import Iterable

from equipoise.solvers import SOLVERS, Solver
from equipoise.testing.contract import Report, run_checks
from equipoise.testing.linear_solver import LINEAR_CHECKS, REFUSALS, SETTINGS
from equipoise.testing.solver_batch import ALWAYS, BATCH_CHECKS
from equipoise.testing.solver_case import ForwardCase
from equipoise.testing.solver_truth import TRUTH_CHECKS

__all__ = ["check_solver"]


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
    case = ForwardCase(chosen, max_steps)
    # Easy questions first: what they find explains what the later ones would only notice.
    nonlinear = [*TRUTH_CHECKS[:3], *BATCH_CHECKS, *TRUTH_CHECKS[3:]]
    checks = [*SETTINGS, *([] if chosen.linear else nonlinear), *LINEAR_CHECKS, *REFUSALS]
    inapplicable = {}
    if chosen.runs_all_steps:
        reason = "it uses all its steps, so that reaching a fixed point does not end a solve"
        inapplicable = {
            check.__name__.lstrip("_"): reason
            for check in checks
            if check not in (*SETTINGS, *REFUSALS, *ALWAYS)
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
