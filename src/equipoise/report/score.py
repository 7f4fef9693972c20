"""Which numbers in the metrics of a run are scores."""

from __future__ import annotations

from equipoise.engine.log import NOT_SCORES
from equipoise.report.content import RunReport
from equipoise.report.curve import numeric_keys

__all__ = ["HELD_OUT", "find_scores"]

HELD_OUT = ("test", "validation")


def find_scores(report: RunReport) -> list[str]:
    """Return the names of a run's scores: those of held-out data first."""
    names = [key for split in (*HELD_OUT, "train") for key in numeric_keys(report.epochs, split)]
    names += numeric_keys(report.steps)
    return [name for name in dict.fromkeys(names) if name not in NOT_SCORES]
