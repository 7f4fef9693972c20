"""Networks without an equilibrium, which equilibrium networks are compared with."""

from equipoise.families.explicit import resnet
from equipoise.families.explicit.feedforward import MLP, InputSkip
from equipoise.families.explicit.ode import NeuralODE, OdeOptions

__all__ = ["MLP", "InputSkip", "NeuralODE", "OdeOptions", "resnet"]
