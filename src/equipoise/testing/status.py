"""Whether what a solve says of each sample is true, with all residuals recomputed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from equipoise.solvers import SOLVERS, Solution, Solver, Status, Stop, solve
from equipoise.testing.contract import require
from equipoise.testing.fates import AFFINE, Sample, draw_batch, stack, step

__all__ = ["check_statuses", "require_true_statuses"]

STOP = Stop(tolerance=1e-6, max_steps=120, patience=50)


def check_statuses(
    solver: str | Solver,
    samples: Sequence[Sample] | None = None,
    stop: Stop = STOP,
    *,
    symmetric: bool = False,
) -> Solution:
    """Solve a batch of problems whose fate is known, and raise unless each verdict is true.

    Args:
        solver: A nonlinear solver or its name.
        samples: The batch; by default one of every family.
        stop: The rules.
        symmetric: Whether all maps of the batch have symmetric positive semidefinite Jacobians.

    Returns:
        The solution, with its trace.
    """
    chosen = SOLVERS.resolve(solver)
    batch = draw_batch(0) if samples is None else samples
    start, context = stack(batch)
    solution = solve(step, start, chosen, stop, context=context, symmetric=symmetric, trace=True)
    require_true_statuses(type(chosen).__name__, batch, solution, stop)
    return solution


def require_true_statuses(
    subject: str, samples: Sequence[Sample], solution: Solution, stop: Stop
) -> None:
    """Raise unless what a solution with a trace says of each sample is true.

    Args:
        subject: Who solved it.
        samples: The batch.
        solution: Its solution, with a trace.
        stop: The rules.
    """
    _, context = stack(samples)
    f = step(solution.value, context)
    residual, scale = (f - solution.value).norm(dim=1), f.norm(dim=1)
    assert solution.trace is not None
    images = [step(state, context) for state in solution.trace.state]
    history = torch.stack(
        [(g - z).norm(dim=1) for g, z in zip(images, solution.trace.state, strict=True)]
    ).numpy()
    sizes = torch.stack([g.norm(dim=1) for g in images]).numpy()
    reach = stop.growth * np.maximum(
        np.maximum(history[0], sizes[0]), solution.trace.state[0].norm(dim=1).numpy()
    )
    for i, sample in enumerate(samples):
        status, steps = Status(int(solution.status[i])), int(solution.steps[i])
        made = history[: steps + 1, i]
        target = stop.absolute + stop.tolerance * float(scale[i])
        told = (
            f"{status.name} after {steps} steps of a sample of the family {sample.family!r}, whose "
            f"recomputed residual is {float(residual[i]):.1e} for a target of {target:.1e}"
        )

        def promise(holds: object, rule: str, remedy: str = "", told: str = told) -> None:
            require(holds, subject, rule, told, remedy)

        promise(
            solution.value[i].isfinite().all(),
            "return the best finite iterate, never NaN or infinity",
        )
        arrived = math.isfinite(residual[i]) and float(residual[i]) <= target * (1 + 1e-6)
        promise(
            (status == Status.CONVERGED) == (arrived and float(scale[i]) <= reach[i]),
            "call a sample CONVERGED if and only if its recomputed residual |f(z) - z| is within "
            "the tolerance",
            "Return Move.f only as the map at Move.z, and Move.gap only with "
            "tracks_residual = True.",
        )
        promise(
            (status == Status.NONFINITE) == (not np.isfinite(made[-1])),
            "say NONFINITE if and only if the map returned NaN or infinity",
        )
        promise(np.isfinite(made[:-1]).all(), "stop at the first NaN or infinity")
        if sample.kind == AFFINE:
            promise(status != Status.NONFINITE, "not overflow on an affine map")
        if np.isfinite(made).any():
            told_residual = float(solution.residual[i])
            truth = float(residual[i] / scale[i]) if residual[i] else 0.0
            promise(
                math.isclose(told_residual, truth, rel_tol=1e-4, abs_tol=1e-14),
                f"report the recomputed relative residual {truth:.3e}, not {told_residual:.3e}",
            )
            if status != Status.CONVERGED:
                promise(
                    float(residual[i]) <= np.nanmin(made) * (1 + 1e-9),
                    "return the best iterate that it met",
                )
        if status == Status.MAX_STEPS:
            promise(steps == stop.max_steps, "make max_steps steps before it says MAX_STEPS")
        if status == Status.DIVERGED:
            promise(
                made[-1] > 1.01 * made.min() or sizes[steps, i] > reach[i],
                "say DIVERGED only where residuals or iterates grow",
            )
        if status == Status.STALLED:
            recent, before = made[-stop.patience :], made[: -stop.patience]
            promise(
                made[-1] > 0.999 * made[:-1].min() and recent.min() > 0.99 * before.min(),
                "say STALLED only where the residual has stopped falling",
            )
