"""Errors, checks, registries, trees and module tensors, atomic files, signals, percentages."""

from typing import TYPE_CHECKING

from equipoise.core.atomic_file import remove_partials, write_atomically
from equipoise.core.errors import ConvergenceError, ConvergenceWarning, SourceError
from equipoise.core.interrupt import (
    Interrupted,
    interruptible,
    interruption,
    stop_if_requested,
    stop_requested,
    uninterrupted,
)
from equipoise.core.lazy import lazy_names
from equipoise.core.percent import to_percent
from equipoise.core.registry import Registry, choose
from equipoise.core.repeated_note import RepeatedNotes
from equipoise.core.validate import (
    SettingError,
    require_between,
    require_count,
    require_finite,
    require_flag,
    require_fraction,
    require_positive,
    require_size,
    require_type,
    require_whole,
)

if TYPE_CHECKING:
    from equipoise.core.denormal import flush_denormals
    from equipoise.core.module_tensors import ModuleTensors, find_untracked_tensor
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

__all__ = [
    "ConvergenceError",
    "ConvergenceWarning",
    "Interrupted",
    "Layout",
    "ModuleTensors",
    "Registry",
    "RepeatedNotes",
    "SettingError",
    "Shared",
    "SourceError",
    "Structure",
    "Tree",
    "choose",
    "find_untracked_tensor",
    "flush_denormals",
    "full_precision",
    "interruptible",
    "interruption",
    "is_wrapped",
    "lazy_names",
    "outside_graphs",
    "remove_partials",
    "require_between",
    "require_count",
    "require_finite",
    "require_flag",
    "require_fraction",
    "require_positive",
    "require_size",
    "require_type",
    "require_whole",
    "row_dot",
    "row_norm",
    "shares_memory",
    "stop_if_requested",
    "stop_requested",
    "to_numpy",
    "to_percent",
    "uninterrupted",
    "write_atomically",
]

# What imports torch comes when it is asked for, so that the command line can check names and say
# what is wrong with them without waiting for it.
if not TYPE_CHECKING:
    __getattr__ = lazy_names(
        __name__, __all__, ("denormal", "module_tensors", "transforms", "tree")
    )
