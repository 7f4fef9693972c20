"""Whether what a solve says of each sample is true, with all residuals recomputed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from equipoise.solvers import SOLVERS, Solution, Solver, Status, Stop, solve
from equipoise.testing.contract import require
from equipoise.testing.fates import AFFINE, Sample, draw_batch, stack, step

__all__ = ["check_statuses", "relative_to", "require_true_statuses"]

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


def relative_to(stop: Stop, made: np.ndarray, sizes: np.ndarray, start: float) -> np.ndarray:
    """Return what the residuals of one sample are judged by at each step.

    `|f(z)|`, but at most the largest of `start`, the worst residual so far and the first one over
    `10 tolerance`, and at least `min(1e-14 / tolerance, 1e-3) * start`.

    Args:
        stop: The rules, with the norm of the whole state.
        made: Its residuals, one for each step.
        sizes: Its `|f(z)|`.
        start: The size of the start, the larger of `|z|`, `|f(z)|` and `|f(z) - z|`.
    """
    most = np.maximum(max(start, 0.1 / stop.tolerance * made[0]), np.fmax.accumulate(made))
    capped = np.minimum(sizes, most)
    unit: np.ndarray = np.maximum(capped, min(1e-14 / stop.tolerance, 1e-3) * start)
    return unit


def _length(matrix: Tensor) -> Tensor:
    """The norm of each row, also where its square would overflow."""
    unit = matrix.abs().amax(dim=1, keepdim=True).clamp(torch.finfo(matrix.dtype).tiny)
    unit = torch.where(unit.isfinite(), unit, 1.0)
    length: Tensor = (matrix / unit).norm(dim=1) * unit[:, 0]
    return length


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
    residual, scale = _length(f - solution.value), _length(f)
    assert solution.trace is not None
    images = [step(state, context) for state in solution.trace.state]
    history = torch.stack(
        [_length(g - z) for g, z in zip(images, solution.trace.state, strict=True)]
    ).numpy()
    sizes = torch.stack([_length(g) for g in images]).numpy()
    first = np.maximum(
        np.maximum(history[0], sizes[0]), solution.trace.state[0].norm(dim=1).numpy()
    )
    reach = stop.growth * np.maximum(first, 1)
    for i, sample in enumerate(samples):
        status, steps = Status(int(solution.status[i])), int(solution.steps[i])
        made = history[: steps + 1, i]
        # What is returned need not be the last iterate.
        path = (
            np.append(made, float(residual[i])),
            np.append(sizes[: steps + 1, i], float(scale[i])),
        )
        unit = float(relative_to(stop, *path, float(first[i]))[-1])
        target = stop.absolute + stop.tolerance * unit
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
        if float(scale[i]) > 2 * float(first[i]):  # there rounding must not hide a residual
            most = relative_to(stop, path[0], np.full_like(path[1], np.inf), float(first[i]))[-1]
            hidden = torch.finfo(f.dtype).eps * float(scale[i])
            arrived &= hidden <= stop.absolute + stop.tolerance * float(most)
        promise(
            (status == Status.CONVERGED) == arrived,
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
            truth = 0.0
            if residual[i] != 0:
                truth = float(residual[i]) / max(float(scale[i]), unit)
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
