"""What a cell declares, checked where it is asked, so that a mistake is told in one sentence."""

from __future__ import annotations

import math
from numbers import Real
from typing import TYPE_CHECKING

from torch import Tensor

from equipoise.core.transforms import is_wrapped
from equipoise.core.tree import Tree
from equipoise.core.validate import SettingError, require_between, require_type
from equipoise.layers.problem import Problem

if TYPE_CHECKING:
    from equipoise.layers.cell import Cell

__all__ = [
    "contributions_of",
    "lipschitz_number",
    "norm_limit_of",
    "norms_of",
    "part_weights_of",
    "problem_of",
    "projects_of",
]


def lipschitz_number(owner: object, bound: object) -> float | None:
    """Return a declared Lipschitz constant as a number, or None if none is known.

    None is known where it is infinite, and under `torch.func`, where tensors have no value.

    Args:
        owner: What declares it: a cell or a regulariser.
        bound: What its `lipschitz` is.
    """
    if bound is None or (isinstance(bound, Tensor) and is_wrapped(bound)):
        return None
    key, number = f"{type(owner).__name__}.lipschitz", _as_float(bound)
    if number is None:
        raise SettingError(key, "be one number, or None", bound, got=_describe(bound))
    require_between(key, number, 0, math.inf)
    return number if number < math.inf else None


def problem_of(cell: Cell, x: Tree) -> Problem:
    """Return the problem that a cell's equilibria solve at the input `x`."""
    found = cell.problem(x)
    if not callable(getattr(found, "describe", None)):
        raise SettingError(
            f"{type(cell).__name__}.problem",
            "be a Problem, which can describe itself",
            found,
            got=type(found).__name__,
        )
    return found


def norms_of(cell: Cell) -> dict[str, float]:
    """Return what a cell says of its operators' norms."""
    return _numbers_by_name(f"{type(cell).__name__}.norms", cell.norms())


def norm_limit_of(cell: Cell) -> float | None:
    """Return what a cell says its operators' norms must stay below."""
    limit: object = cell.norm_limit
    number = _as_float(limit)
    if number is None and limit is not None:
        remedy = "Make it a property." if callable(limit) else ""
        key = f"{type(cell).__name__}.norm_limit"
        raise SettingError(key, "be a number, or None", limit, remedy, got=_describe(limit))
    return number


def contributions_of(cell: Cell, z: Tree, context: Tree) -> dict[str, float]:
    """Return what a cell says of what its parts give to the step at `z`."""
    key = f"{type(cell).__name__}.contributions"
    return _numbers_by_name(key, cell.contributions(z, context))


def part_weights_of(cell: Cell) -> dict[str, list[Tensor]]:
    """Return the weights of a cell's parts by name."""
    key, found = f"{type(cell).__name__}.part_weights", cell.part_weights()
    require_type(key, found, dict, "a dict of lists of weights by name")
    for name, weights in found.items():
        named = isinstance(name, str) and isinstance(weights, list | tuple)
        if not (named and all(isinstance(weight, Tensor) for weight in weights)):
            got = f"{_describe(weights)} for {name!r}"
            raise SettingError(key, "be a dict of lists of weights by name", found, got=got)
    return {name: list(weights) for name, weights in found.items()}


def _numbers_by_name(key: str, found: object) -> dict[str, float]:
    rule = "be a dict of numbers by name"
    if not isinstance(found, dict):
        raise SettingError(key, rule, found, got=type(found).__name__)
    numbers = {}
    for name, value in found.items():
        number = _as_float(value)
        if number is None or not isinstance(name, str):
            raise SettingError(key, rule, found, got=f"{_describe(value)} for {name!r}")
        numbers[name] = number
    return numbers


def projects_of(cell: Cell) -> bool:
    """Return whether a cell's weights are to be projected."""
    projects: object = cell.projects
    if not isinstance(projects, bool):
        remedy = "Make it a property." if callable(projects) else ""
        key = f"{type(cell).__name__}.projects"
        raise SettingError(key, "be True or False", projects, remedy, got=_describe(projects))
    return projects


def _as_float(value: object) -> float | None:
    """A number, or a tensor of one, as a float; None for anything else."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value.detach())
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:  # a whole number beyond all floats
        return math.inf if value == abs(value) else -math.inf


def _describe(value: object) -> str:
    """A value on one line."""
    if callable(value):
        return "a method"
    shape = getattr(value, "shape", None)
    text = repr(value) if shape is None else f"{type(value).__name__} of shape {tuple(shape)}"
    return text if len(text) <= 60 and "\n" not in text else type(value).__name__
