"""Bring weights back to where theorems hold, after each step of an optimiser."""

from __future__ import annotations

import torch
from torch import nn

from equipoise.core.validate import require_type
from equipoise.layers.cell import Cell

__all__ = ["project_norms", "project_norms_after"]


def project_norms(module: nn.Module) -> None:
    """Project the weights of every cell in `module` that asks for it, in place.

    Call it after each optimiser step, or let `project_norms_after` do that.

    Args:
        module: A layer or model with cells that have `projects`, such as OptEq's with
            `norm="project"`.
    """
    require_type("project_norms.module", module, nn.Module, "a module")
    cells = [part for part in module.modules() if isinstance(part, Cell) and part.projects]
    if not cells:
        raise ValueError(
            "project_norms.module must hold a cell that projects its weights, such as OptEq's "
            "with norm='project'; got none."
        )
    # A wrapper projects the cell inside it.
    inner = {id(part) for cell in cells for part in cell.modules() if part is not cell}
    for cell in cells:
        if id(cell) not in inner:
            cell.project_()


def project_norms_after(
    optimizer: torch.optim.Optimizer, module: nn.Module
) -> torch.utils.hooks.RemovableHandle:
    """Call `project_norms(module)` now and after each step of `optimizer`.

    Args:
        optimizer: The optimiser.
        module: As for `project_norms`.

    Returns:
        A handle whose `remove()` ends that.
    """
    project_norms(module)
    return optimizer.register_step_post_hook(lambda *_: project_norms(module))
