"""Bring weights back to where theorems hold, after each step of an optimiser."""

from __future__ import annotations

import torch
from torch import nn

from equipoise.core.validate import SettingError, require_type
from equipoise.layers.cell import Cell
from equipoise.layers.declarations import projects_of
from equipoise.layers.wrappers import Wrapper

__all__ = ["project_norms", "project_norms_after"]


def project_norms(module: nn.Module) -> None:
    """Project the weights of every cell in `module` that asks for it, in place.

    Cells inside of others come first. Call it after each optimiser step, or let
    `project_norms_after` do that.

    Args:
        module: A layer or model with cells that have `projects`, such as OptEq's with
            `norm="project"` or `norm="orthogonal"`.
    """
    require_type("project_norms.module", module, nn.Module, "a module")
    cells = [
        part for part in _innermost_first(module) if isinstance(part, Cell) and projects_of(part)
    ]
    if not cells:
        raise ValueError(
            "project_norms.module must hold a cell that projects its weights, such as OptEq's "
            "with norm='project'; got none."
        )
    for cell in cells:
        if type(cell).project_ is not Wrapper.project_:  # that of the cell inside it, once more
            _project(cell)


@torch.no_grad()
def _project(cell: Cell) -> None:
    before = dict(cell.named_parameters(remove_duplicate=False))
    cell.project_()
    after = dict(cell.named_parameters(remove_duplicate=False))
    for name in before | after:
        if before.get(name) is not after.get(name):
            raise SettingError(
                f"{type(cell).__name__}.project_",
                "change parameters in place, because an optimiser keeps them",
                after.get(name),
                "Use copy_ or mul_.",
                got=f"another parameter for {name}",
            )


def _innermost_first(module: nn.Module) -> list[nn.Module]:
    """All modules inside of `module` and itself, each once and after those inside it."""
    found: dict[nn.Module, None] = {}

    def visit(part: nn.Module) -> None:
        if part not in found:
            for child in part.children():
                visit(child)
            found[part] = None

    visit(module)
    return list(found)


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
