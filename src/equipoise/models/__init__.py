"""Whole networks by name: an extractor, an equilibrium layer and a head."""

from equipoise.models.factory import (
    create_model,
    list_models,
    model_info,
    model_options,
    register_model,
)
from equipoise.models.network import Network

__all__ = [
    "Network",
    "create_model",
    "list_models",
    "model_info",
    "model_options",
    "register_model",
]
