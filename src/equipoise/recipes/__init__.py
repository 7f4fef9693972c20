"""Whole runs from one typed file: configs, presets, training, evaluation, pages about runs, sweeps."""

from equipoise.recipes.config import Config, Data, Model, TaskConfig, dump_config, list_presets, load_config, parse_config
from equipoise.recipes.run import resume_run, train_run
from equipoise.recipes.show import report_run
from equipoise.recipes.stored import Run, evaluate_run, open_run

__all__ = [
    "Config",
    "Data",
    "Model",
    "Run",
    "TaskConfig",
    "dump_config",
    "evaluate_run",
    "list_presets",
    "load_config",
    "open_run",
    "parse_config",
    "report_run",
    "resume_run",
    "train_run",
]
