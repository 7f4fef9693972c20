"""The iterates of a solve: how far they are from an equilibrium, and the way they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Unpack, get_args

import numpy as np
import torch

from equipoise.core.registry import choose
from equipoise.core.tree import Layout, Tree
from equipoise.core.validate import SettingError
from equipoise.layers.equilibrium import Equilibrium
from equipoise.layers.options import CallOptions
from equipoise.solvers.protocol import SOLVERS, Status

__all__ = ["Trajectory", "project_paths", "trace_solve"]

Components = Literal["iterates", "ends"]
"""Whose principal directions a plane has."""
FEW = 64
"""Rows or columns of a matrix up to which all of its singular vectors are computed."""


@dataclass(frozen=True)
class Trajectory:
    """The iterates of one solve.

    Attributes:
        state: Each sample's state at each look, shape (looks, samples, width).
        residual: `|f(z) - z| / |f(z)|`, shape (looks, samples).
        steps: Steps that each sample made, shape (samples,); it stays where it ended.
        status: How each sample ended, shape (samples,).
        solver: Which solver ran.
    """

    state: np.ndarray
    residual: np.ndarray
    steps: np.ndarray
    status: np.ndarray
    solver: str

    @property
    def missed(self) -> int:
        """Samples that did not converge."""
        return int((self.status != Status.CONVERGED).sum())

    @property
    def lengths(self) -> np.ndarray:
        """How long each sample's path is, `sum_k |z_{k+1} - z_k|`."""
        found: np.ndarray = np.linalg.norm(np.diff(self.state, axis=0), axis=2).sum(axis=0)
        return found


@torch.no_grad()
def trace_solve(layer: Equilibrium, x: Tree, **options: Unpack[CallOptions]) -> Trajectory:
    """Solve a layer for `x` and keep every iterate.

    A solve that fails is a trajectory too: `status` says so.

    Args:
        layer: The layer.
        x: Its input, batch first.
        **options: How to solve in place of the layer's own settings; see `CallOptions`.
    """
    if options.get("solver", "auto") != "auto":
        solver = SOLVERS.resolve(options["solver"], also=["auto"])
        if solver.linear:
            raise SettingError(
                "trace_solve.solver", "solve nonlinear equations", solver, got=str(solver)
            )
    chosen: CallOptions = {**options, "on_failure": "ignore"}
    layer(x, trace=True, **chosen)
    solution = layer.last
    assert solution is not None
    assert solution.trace is not None
    layout = Layout(solution.trace.state[0])
    return Trajectory(
        np.stack([layout.pack(state, "state").cpu().numpy() for state in solution.trace.state]),
        solution.trace.residual.cpu().numpy(),
        solution.steps.cpu().numpy(),
        solution.status.cpu().numpy(),
        _name(solution.solver),
    )


def _name(solver: object) -> str:
    """The name by which a solver is registered."""
    known = [name for name in SOLVERS if SOLVERS[name] is type(solver)]
    return known[0] if known else type(solver).__name__


def project_paths(
    paths: Sequence[np.ndarray], components: Components = "iterates"
) -> tuple[list[np.ndarray], np.ndarray]:
    """Project the states of several trajectories on two principal directions of them all.

    Args:
        paths: States, each of shape (looks, samples, width), all of one width.
        components: Whose principal directions: of all `iterates`, or of the `ends` alone, which
            tells classes apart where starts differ more than equilibria.

    Returns:
        The paths in the plane, each of shape (looks, samples, 2), and the fraction of those states'
        variance along each direction, shape (2,). One direction is enough for states on a line:
        the second coordinate is then zero.
    """
    choose("project_paths.components", components, get_args(Components))
    first = 0 if components == "iterates" else -1
    rows = np.concatenate([path[first:].reshape(-1, path.shape[2]) for path in paths])
    rows = rows.astype(np.float64)
    if not all(np.isfinite(path).all() for path in paths):
        raise SettingError(
            "project_paths.paths",
            "hold finite states",
            None,
            "Make fewer steps, or look at weights at which the solve does not run away.",
            got="NaN or infinity",
        )
    middle = rows.mean(axis=0)
    centred = rows - middle
    axes = _principal(centred)
    total = float(np.square(centred).sum())
    flat = [(path.astype(np.float64) - middle) @ axes.T for path in paths]
    along = np.square(centred @ axes.T).sum(axis=0)
    return flat, along / total if total else np.zeros(2)


def _principal(centred: np.ndarray) -> np.ndarray:
    """The first two right singular vectors, shape (2, width); zeros where there are fewer."""
    from scipy.sparse.linalg import svds  # type: ignore[import-untyped]

    scale = np.abs(centred).max()
    axes = np.zeros((2, centred.shape[1]))
    if scale == 0:
        return axes
    if min(centred.shape) <= FEW:
        values, found = np.linalg.svd(centred / scale, full_matrices=False)[1:]
    else:
        # from a start of its own choice, ARPACK would give other signs each time
        start = np.ones(min(centred.shape))
        _, values, found = svds(centred / scale, k=2, v0=start)
        order = np.argsort(-values)
        values, found = values[order], found[order]
    for place in range(min(2, len(values))):
        if values[place] > 1e-12 * values[0]:
            peak = found[place, np.abs(found[place]).argmax()]
            axes[place] = found[place] * np.sign(peak)
    return axes
