"""Whole networks: their protocol, networks for images, tables and text, and models by name."""

from equipoise.models.factory import (
    MODEL_PLUGINS,
    create_model,
    describe_options,
    find_model_code,
    list_models,
    model_family,
    model_info,
    model_options,
    model_size,
    register_model,
    require_model,
)
from equipoise.models.image_network import ExplicitNetwork, ImageModel, ImageNetwork
from equipoise.models.model import Model, count_parameters, find_equilibria
from equipoise.models.table_network import TableModel, TableNetwork
from equipoise.models.text_network import TextModel

__all__ = [
    "MODEL_PLUGINS",
    "ExplicitNetwork",
    "ImageModel",
    "ImageNetwork",
    "Model",
    "TableModel",
    "TableNetwork",
    "TextModel",
    "count_parameters",
    "create_model",
    "describe_options",
    "find_equilibria",
    "find_model_code",
    "list_models",
    "model_family",
    "model_info",
    "model_options",
    "model_size",
    "register_model",
    "require_model",
]
