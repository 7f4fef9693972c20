"""A preset of each family that needs no files, and settings that make its run short."""

from equipoise.data import DATASETS
from equipoise.models import list_models
from equipoise.models.factory import model_family
from equipoise.runs import list_presets, load_config

FAMILIES = sorted({model_family(name) for name in list_models(plugins=False)})
SMALL = [
    "data.subset=24",
    "train.epochs=1",
    "train.batch=12",
    "train.device=cpu",
    "schedule.name=constant",
]


def find_preset(family: str) -> str:
    """The first preset of a family on data that are bundled."""
    for name in list_presets():
        config = load_config(name)
        if model_family(config.model.name) == family and DATASETS[config.data.name].bundled:
            return name
    raise AssertionError(f"family {family!r} has no preset on data that need no files")
