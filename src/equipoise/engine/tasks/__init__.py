"""Tasks: what a network learns, how that is scored, and the answers it then gives."""

from equipoise.engine.tasks.answer import (
    Answer,
    FileAnswer,
    ImageAnswer,
    LabelAnswer,
    MaskAnswer,
    NumberAnswer,
    RowAnswer,
    TextAnswer,
)
from equipoise.engine.tasks.cross_entropy import Classification, Segmentation
from equipoise.engine.tasks.language import LanguageModelling
from equipoise.engine.tasks.metric import Metric
from equipoise.engine.tasks.regression import BinaryRegression, Regression
from equipoise.engine.tasks.restoration import Restoration
from equipoise.engine.tasks.score import Agreement, ClassScore, Labels, Mean, Overlap, Score
from equipoise.engine.tasks.task import TASKS, Task, find_metric, finite_samples, make_task

__all__ = [
    "TASKS",
    "Agreement",
    "Answer",
    "BinaryRegression",
    "ClassScore",
    "Classification",
    "FileAnswer",
    "ImageAnswer",
    "LabelAnswer",
    "Labels",
    "LanguageModelling",
    "MaskAnswer",
    "Mean",
    "Metric",
    "NumberAnswer",
    "Overlap",
    "Regression",
    "Restoration",
    "RowAnswer",
    "Score",
    "Segmentation",
    "Task",
    "TextAnswer",
    "find_metric",
    "finite_samples",
    "make_task",
]
