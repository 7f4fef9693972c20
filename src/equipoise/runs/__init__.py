"""Whole runs from one typed file: configs, presets, training, evaluation, reports, sweeps."""

from typing import TYPE_CHECKING

from equipoise.core.lazy import lazy_names
from equipoise.runs.presets import list_presets

if TYPE_CHECKING:
    from equipoise.runs.certificate import CertifiedRun
    from equipoise.runs.certified_run import certify_run
    from equipoise.runs.config import Config, dump_config, load_config, parse_config
    from equipoise.runs.run import resume_run, train_run
    from equipoise.runs.run_report import report_run
    from equipoise.runs.saved_run import Run, evaluate_run, open_run
    from equipoise.runs.sections import DataConfig, ModelConfig, TaskConfig
    from equipoise.runs.trainer_report import report_trainer
    from equipoise.runs.verified_run import verify_run

__all__ = [
    "CertifiedRun",
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
    "verify_run",
]

# Names are imported when they are first used, because torch takes seconds, and `equipoise list
# presets` does without it.
if not TYPE_CHECKING:
    __getattr__ = lazy_names(
        __name__,
        __all__,
        (
            "sections",
            "config",
            "saved_run",
            "run",
            "run_report",
            "trainer_report",
            "certificate",
            "certified_run",
            "verified_run",
        ),
    )

    def __dir__() -> list[str]:
        return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
