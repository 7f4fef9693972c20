"""What every cell promises."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from equipoise.core.validate import SettingError, require_type
from equipoise.layers.cell import Cell
from equipoise.solvers import Solver, Stop
from equipoise.testing.cell_case import CellCase
from equipoise.testing.cell_declaration import DECLARATION_CHECKS
from equipoise.testing.cell_equilibrium import EQUILIBRIUM_CHECKS
from equipoise.testing.cell_step import STEP_CHECKS
from equipoise.testing.contract import Report, run_checks
from equipoise.testing.trees import leaves

__all__ = ["check_cell"]

STOP = Stop(tolerance=1e-13, max_steps=1000)


def check_cell(
    cell: Cell,
    x: Any,
    *,
    solver: str | Solver = "auto",
    stop: Stop = STOP,
    second: bool = True,
    unrolled_steps: int = 400,
    skip: Iterable[str] = (),
    seed: int = 0,
) -> Report:
    """Raise `ContractError` unless a cell keeps every promise of the protocol.

    The cell itself is left as it is; copies of it in float64 and float32 are checked.

    Args:
        cell: The cell, with random weights: at zero, say, there is little to see.
        x: An input of at least two samples.
        solver: A solver that finds its equilibria.
        stop: When that has found them, in float64.
        second: Whether to check second derivatives by finite differences. A cell with kinks, such
            as ReLU, may fail by bad luck; another seed or input helps.
        unrolled_steps: Plain steps that come to the equilibrium, for comparing gradients.
        skip: Names of checks to leave out.
        seed: Seed of everything that is drawn.
    """
    require_type("check_cell.cell", cell, Cell, "a Cell")
    found = leaves(x)
    if not found or any(leaf.dim() == 0 or leaf.shape[0] < 2 for leaf in found):
        raise SettingError(
            "check_cell.x",
            "hold at least two samples, batch first",
            x,
            got=", ".join(str(tuple(leaf.shape)) for leaf in found) or "no tensor",
        )
    case = CellCase(cell, x, solver, stop, unrolled_steps)
    checks = [*STEP_CHECKS, *DECLARATION_CHECKS, *EQUILIBRIUM_CHECKS]
    slow = () if second else ("second_derivatives_pass_finite_differences",)
    return run_checks("check_cell", case.name, case, checks, skip=[*skip, *slow], seed=seed)
