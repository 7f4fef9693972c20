"""Whole runs from one typed file: configs, presets, training, evaluation, reports, sweeps."""

from equipoise.runs.config import (
    Config,
    dump_config,
    list_presets,
    load_config,
    parse_config,
)
from equipoise.runs.run import resume_run, train_run
from equipoise.runs.run_report import report_run
from equipoise.runs.saved_run import Run, certify_run, evaluate_run, open_run
from equipoise.runs.sections import DataConfig, ModelConfig, TaskConfig
from equipoise.runs.trainer_report import report_trainer

__all__ = [
    "Config",
    "DataConfig",
    "ModelConfig",
    "Run",
    "TaskConfig",
    "certify_run",
    "dump_config",
    "evaluate_run",
    "list_presets",
    "load_config",
    "open_run",
    "parse_config",
    "report_run",
    "report_trainer",
    "resume_run",
    "train_run",
]
