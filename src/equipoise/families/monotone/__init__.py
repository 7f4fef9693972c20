"""Monotone operator networks (MON): one equilibrium for every input, whatever the weights are."""

from equipoise.families.monotone.cell import (
    ForwardBackwardCell,
    MonotoneCell,
    ReflectionCell,
    Splitting,
)
from equipoise.families.monotone.convolution import MonotoneConvolution
from equipoise.families.monotone.dense import MonotoneMatrix
from equipoise.families.monotone.layer import (
    MonotoneConv2d,
    MonotoneDense,
    MonotoneLayer,
    MonotoneMultiTier,
)
from equipoise.families.monotone.models import MonotoneOptions
from equipoise.families.monotone.operator import MonotoneOperator
from equipoise.families.monotone.released import from_released
from equipoise.families.monotone.theory import Inclusion
from equipoise.families.monotone.tiers import MonotoneTiers

__all__ = [
    "ForwardBackwardCell",
    "Inclusion",
    "MonotoneCell",
    "MonotoneConv2d",
    "MonotoneConvolution",
    "MonotoneDense",
    "MonotoneLayer",
    "MonotoneMatrix",
    "MonotoneMultiTier",
    "MonotoneOperator",
    "MonotoneOptions",
    "MonotoneTiers",
    "ReflectionCell",
    "Splitting",
    "from_released",
]
