"""Training, scoring and predicting, with runs that can be stopped at any moment."""

from equipoise.engine.batchnorm import SyncedBatchNorm, synchronize
from equipoise.engine.checkpoint import (
    CheckpointError,
    Checkpoints,
    CheckpointWarning,
    Stored,
    read_checkpoint,
    write_checkpoint,
)
from equipoise.engine.distributed import Group
from equipoise.engine.evaluate import Evaluation, ScoreWarning, evaluate
from equipoise.engine.log import MetricLog, read_metrics
from equipoise.engine.optimizer import Average, make_optimizer
from equipoise.engine.progress import Progress, make_progress
from equipoise.engine.run_state import load_weights
from equipoise.engine.settings import OptimizerConfig, ScheduleConfig, TrainConfig
from equipoise.engine.solve_monitor import SolveMonitor, operator_norms
from equipoise.engine.summary import Summary
from equipoise.engine.tasks import TASKS, Metric, Task, find_metric, make_task
from equipoise.engine.trainer import Trainer

__all__ = [
    "TASKS",
    "Average",
    "CheckpointError",
    "CheckpointWarning",
    "Checkpoints",
    "Evaluation",
    "Group",
    "Metric",
    "MetricLog",
    "OptimizerConfig",
    "Progress",
    "ScheduleConfig",
    "ScoreWarning",
    "SolveMonitor",
    "Stored",
    "Summary",
    "SyncedBatchNorm",
    "Task",
    "TrainConfig",
    "Trainer",
    "evaluate",
    "find_metric",
    "load_weights",
    "make_optimizer",
    "make_progress",
    "make_task",
    "operator_norms",
    "read_checkpoint",
    "read_metrics",
    "synchronize",
    "write_checkpoint",
]
