"""Whole networks: the protocol they meet, image networks, and models by name."""

from equipoise.models.factory import (
    create_model,
    describe_options,
    list_models,
    model_info,
    model_options,
    register_model,
    require_model,
)
from equipoise.models.image_network import ImageNetwork
from equipoise.models.model import Model, count_parameters, find_equilibria

__all__ = [
    "ImageNetwork",
    "Model",
    "count_parameters",
    "create_model",
    "describe_options",
    "find_equilibria",
    "list_models",
    "model_info",
    "model_options",
    "register_model",
    "require_model",
]
