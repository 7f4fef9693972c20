"""Which metrics of a run are scores, and what they are called on its page."""

from __future__ import annotations

from equipoise.report.content import RunReport
from equipoise.report.curve import numeric_keys

__all__ = ["HELD_OUT", "SCORES", "find_scores"]

HELD_OUT = ("test", "validation")
SCORES = {
    "accuracy": ("Accuracy", "%"),
    "miou": ("Mean intersection over union", "%"),
    "macc": ("Mean accuracy of classes", "%"),
    "aacc": ("Accuracy of pixels", "%"),
    "perplexity": ("Perplexity", ""),
    "psnr": ("Peak signal-to-noise ratio", "dB"),
}
NOT_SCORES = {
    "step",
    "epoch",
    "loss",
    "learning_rate",
    "gradient_norm",
    "forward_steps",
    "backward_steps",
    "forward_residual",
    "backward_residual",
    "skipped",
    "samples",
    "samples_per_second",
    "seconds",
    "missed",
}


def find_scores(report: RunReport) -> list[str]:
    """Return the names of a run's scores: those of held-out data first."""
    names = [key for split in (*HELD_OUT, "train") for key in numeric_keys(report.epochs, split)]
    names += numeric_keys(report.steps)
    return [name for name in dict.fromkeys(names) if name not in NOT_SCORES]
