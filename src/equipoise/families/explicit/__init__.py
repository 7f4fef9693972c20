"""Networks without an equilibrium, which equilibrium networks are compared with."""

from equipoise.families.explicit import resnet
from equipoise.families.explicit.feedforward import MLP, InputSkip
from equipoise.families.explicit.ode import NeuralODE, OdeOptions
from equipoise.families.explicit.transformer import ExplicitTransformer, TransformerBlock
from equipoise.families.explicit.weight_tied import (
    BlockMatrices,
    FeedForwardCell,
    to_weight_tied,
)

__all__ = [
    "MLP",
    "BlockMatrices",
    "ExplicitTransformer",
    "FeedForwardCell",
    "InputSkip",
    "NeuralODE",
    "OdeOptions",
    "TransformerBlock",
    "resnet",
    "to_weight_tied",
]
