"""Errors, registries, trees of tensors and the explicit tensors of a module."""

from equipoise.core.denormal import flush_denormals
from equipoise.core.eager import full_precision, is_wrapped, outside_graphs
from equipoise.core.errors import ConvergenceError, ConvergenceWarning
from equipoise.core.file import remove_partials, write_atomically
from equipoise.core.linalg import convolution_bound, dense_norm
from equipoise.core.registry import Registry, choose
from equipoise.core.require import require_count, require_fraction, require_positive
from equipoise.core.tree import Layout, Shared, Structure, Tree, row_dot, row_norm, shares_memory, to_numpy
from equipoise.core.weights import Weights, stranger

__all__ = [
    "ConvergenceError",
    "ConvergenceWarning",
    "Layout",
    "Registry",
    "Shared",
    "Structure",
    "Tree",
    "Weights",
    "choose",
    "convolution_bound",
    "dense_norm",
    "flush_denormals",
    "full_precision",
    "is_wrapped",
    "outside_graphs",
    "remove_partials",
    "require_count",
    "require_fraction",
    "require_positive",
    "row_dot",
    "row_norm",
    "shares_memory",
    "stranger",
    "to_numpy",
    "write_atomically",
]
