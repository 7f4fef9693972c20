"""Monotone operator networks (MON): one equilibrium for every input, whatever the weights are."""

from equipoise.families.monotone.cell import (
    ForwardBackwardCell,
    MonotoneCell,
    ReflectionCell,
    Splitting,
)
from equipoise.families.monotone.dense import MonotoneMatrix
from equipoise.families.monotone.layer import MonotoneDense, MonotoneLayer
from equipoise.families.monotone.models import MonotoneOptions
from equipoise.families.monotone.operator import MonotoneOperator
from equipoise.families.monotone.theory import Inclusion

__all__ = [
    "ForwardBackwardCell",
    "Inclusion",
    "MonotoneCell",
    "MonotoneDense",
    "MonotoneLayer",
    "MonotoneMatrix",
    "MonotoneOperator",
    "MonotoneOptions",
    "ReflectionCell",
    "Splitting",
]
