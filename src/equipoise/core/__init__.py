"""Errors, checks, registries, trees and module tensors, atomic files, percentages."""

from equipoise.core.atomic_file import remove_partials, write_atomically
from equipoise.core.denormal import flush_denormals
from equipoise.core.errors import ConvergenceError, ConvergenceWarning
from equipoise.core.module_tensors import ModuleTensors, find_untracked_tensor
from equipoise.core.percent import to_percent
from equipoise.core.registry import Registry, choose
from equipoise.core.transforms import full_precision, is_wrapped, outside_graphs
from equipoise.core.tree import (
    Layout,
    Shared,
    Structure,
    Tree,
    row_dot,
    row_norm,
    shares_memory,
    to_numpy,
)
from equipoise.core.validate import (
    SettingError,
    require_between,
    require_count,
    require_flag,
    require_fraction,
    require_positive,
    require_type,
    require_whole,
)

__all__ = [
    "ConvergenceError",
    "ConvergenceWarning",
    "Layout",
    "ModuleTensors",
    "Registry",
    "SettingError",
    "Shared",
    "Structure",
    "Tree",
    "choose",
    "find_untracked_tensor",
    "flush_denormals",
    "full_precision",
    "is_wrapped",
    "outside_graphs",
    "remove_partials",
    "require_between",
    "require_count",
    "require_flag",
    "require_fraction",
    "require_positive",
    "require_type",
    "require_whole",
    "row_dot",
    "row_norm",
    "shares_memory",
    "to_numpy",
    "to_percent",
    "write_atomically",
]
