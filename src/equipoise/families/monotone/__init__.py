"""Monotone operator networks (MON): one equilibrium for every input, whatever the weights are."""

from equipoise.families.monotone import equilibrium_checks, training_checks
from equipoise.families.monotone.cell import (
    ForwardBackwardCell,
    MonotoneCell,
    ReflectionCell,
    Splitting,
)
from equipoise.families.monotone.convolution import MonotoneConvolution
from equipoise.families.monotone.dense import MonotoneMatrix
from equipoise.families.monotone.kernel import (
    MonotoneForms,
    MonotoneRegression,
    monotone_forms,
)
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
    "MonotoneForms",
    "MonotoneLayer",
    "MonotoneMatrix",
    "MonotoneMultiTier",
    "MonotoneOperator",
    "MonotoneOptions",
    "MonotoneRegression",
    "MonotoneTiers",
    "ReflectionCell",
    "Splitting",
    "equilibrium_checks",
    "from_released",
    "monotone_forms",
    "training_checks",
]
