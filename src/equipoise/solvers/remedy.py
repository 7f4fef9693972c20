"""What to try after a failed solve, in the names of the settings that rule it."""

from __future__ import annotations

from typing import Literal

import torch

from equipoise.solvers.protocol import SOLVERS, Solution, Solver, Status

__all__ = ["Direction", "find_remedy"]

Direction = Literal["forward", "backward"]

FORWARD_SOLVERS = {
    Status.MAX_STEPS: ("newton", "broyden"),
    Status.STALLED: ("fixed_point", "broyden", "newton"),
    Status.DIVERGED: ("anderson", "newton", "broyden"),
}
"""Solvers to try, the likeliest first; one more than is told, as one may be what has failed."""
BACKWARD_SOLVERS = ("gmres", "dense", "bicgstab")


def find_remedy(solution: Solution, status: Status, direction: Direction) -> str:
    """Return what to try, as the end of a sentence.

    Args:
        solution: The solve.
        status: Its worst status.
        direction: Whose settings rule it: the layer's, or those of `Implicit`.
    """
    backward = direction == "backward"
    dtype = solution.residual.dtype
    eps = torch.finfo(dtype).eps
    if (
        status in (Status.STALLED, Status.MAX_STEPS)
        and solution.stop.tolerance < 10 * eps
        and float(solution.residual[~solution.converged].max()) < 1000 * eps
    ):
        setting = "Implicit(tolerance=...)" if backward else "it"
        return (
            f"a tolerance of {solution.stop.tolerance:.0e} is at the limit of {dtype}: loosen "
            f"{setting} or use float64"
        )
    if backward:
        return _backward(solution.solver, status)
    if status == Status.MAX_STEPS and solution.solver is not None and solution.solver.remedy:
        return solution.solver.remedy
    return _forward(solution, status)


def _forward(solution: Solution, status: Status) -> str:
    if status == Status.NONFINITE:
        return (
            "look for NaN or infinity in the input and the weights, bound the "
            "cell's growth, or lower the learning rate"
        )
    solver = solution.solver
    others = _others(solver, FORWARD_SOLVERS[status], 1 if status == Status.MAX_STEPS else 2)
    attempt = f"try solver {' or '.join(repr(name) for name in others)}"
    steps = "max_steps"
    if solution.unrolled:  # whose steps are made by the gradient strategy, whatever the solver
        attempt, steps = "take gradient 'implicit'", "Unrolled(steps=...)"
    if status == Status.MAX_STEPS:
        return f"raise {steps}, loosen tolerance, or {attempt}"
    if status == Status.DIVERGED:
        return f"bound the norm of the cell's Jacobian below 1, or {attempt}"
    damping = "add damping, " if hasattr(solver, "damping") else ""
    return f"{attempt}, {damping}loosen tolerance, and see that the step is not random"


def _backward(solver: Solver | None, status: Status) -> str:
    if status == Status.NONFINITE:
        return (
            "look for NaN or infinity in the gradient of the loss and in the derivatives of the "
            "cell at its equilibrium"
        )
    others = _others(solver, BACKWARD_SOLVERS, 2)
    attempt = f"try {' or '.join(f'Implicit(solver={name!r})' for name in others)}"
    if status == Status.MAX_STEPS:
        return f"raise Implicit(max_steps=...), loosen Implicit(tolerance=...), or {attempt}"
    if status == Status.DIVERGED:
        return f"{attempt}, or bound the norm of the cell's Jacobian below 1"
    return (
        f"{attempt}, loosen Implicit(tolerance=...), and see that 1 is no eigenvalue of the "
        "cell's Jacobian at its equilibrium"
    )


def _others(solver: Solver | None, names: tuple[str, ...], count: int) -> list[str]:
    """Return the first of `names` that are not the solver that has failed."""
    return [name for name in names if type(solver) is not SOLVERS[name]][:count]
