"""Activations as proximal maps: value, derivative, potential, conjugate and slopes; and a check for maps of any kind."""

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
from equipoise.prox.matrix import MatrixActivation
from equipoise.prox.resolve import activation, from_module

__all__ = [
    "ACTIVATIONS",
    "ELU",
    "Activation",
    "HardTanh",
    "Identity",
    "LeakyReLU",
    "MatrixActivation",
    "ProxReport",
    "ReLU",
    "Sigmoid",
    "SoftShrink",
    "Softplus",
    "Tanh",
    "activation",
    "from_module",
    "is_proximal",
]
