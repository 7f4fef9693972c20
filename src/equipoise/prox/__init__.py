"""Activations as proximal maps, feature regularisers, and a check whether a map is proximal."""

from equipoise.prox.activation import (
    ACTIVATIONS,
    ELU,
    Activation,
    HardTanh,
    Identity,
    LeakyReLU,
    ReLU,
    Sigmoid,
    Softplus,
    SoftShrink,
    Tanh,
)
from equipoise.prox.check import ProxReport, is_proximal
from equipoise.prox.independence import HSIC, Decorrelation
from equipoise.prox.matrix import MatrixActivation
from equipoise.prox.nuclear import NuclearNorm
from equipoise.prox.regularizer import (
    REGULARIZERS,
    AbsoluteSum,
    Custom,
    Incay,
    Regularizer,
    SquaredNorm,
    TotalVariation,
    as_regularizer,
)
from equipoise.prox.resolve import as_activation, from_module

__all__ = [
    "ACTIVATIONS",
    "ELU",
    "HSIC",
    "REGULARIZERS",
    "AbsoluteSum",
    "Activation",
    "Custom",
    "Decorrelation",
    "HardTanh",
    "Identity",
    "Incay",
    "LeakyReLU",
    "MatrixActivation",
    "NuclearNorm",
    "ProxReport",
    "ReLU",
    "Regularizer",
    "Sigmoid",
    "SoftShrink",
    "Softplus",
    "SquaredNorm",
    "Tanh",
    "TotalVariation",
    "as_activation",
    "as_regularizer",
    "from_module",
    "is_proximal",
]
