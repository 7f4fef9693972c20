"""Linear maps with exact adjoints and proven bounds of their norms."""

from equipoise.operators.composed import Composed, separable
from equipoise.operators.convolution import Convolution, Padding
from equipoise.operators.convolution_norm import convolution_bound
from equipoise.operators.degradation import DEGRADATIONS, Blur, Degradation, Identity, Mask
from equipoise.operators.dense import Dense
from equipoise.operators.norms import dense_norm
from equipoise.operators.operator import Operator, OperatorWeights
from equipoise.operators.pooled import Pooled

__all__ = [
    "DEGRADATIONS",
    "Blur",
    "Composed",
    "Convolution",
    "Degradation",
    "Dense",
    "Identity",
    "Mask",
    "Operator",
    "OperatorWeights",
    "Padding",
    "Pooled",
    "convolution_bound",
    "dense_norm",
    "separable",
]
