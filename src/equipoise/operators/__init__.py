"""Linear maps with exact adjoints and proven bounds of their norms."""

from equipoise.operators.norms import convolution_bound, dense_norm
from equipoise.operators.operator import (
    Composed,
    Convolution,
    Dense,
    Operator,
    OperatorWeights,
    Padding,
    separable,
)

__all__ = [
    "Composed",
    "Convolution",
    "Dense",
    "Operator",
    "OperatorWeights",
    "Padding",
    "convolution_bound",
    "dense_norm",
    "separable",
]
