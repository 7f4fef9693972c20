"""Whether weights that a run takes from elsewhere know the samples that it holds out."""

from __future__ import annotations

from pathlib import Path

from equipoise.core import SourceError
from equipoise.data import Dataset, fingerprint
from equipoise.engine.run_folder import read_trained_on
from equipoise.runs.config import Config
from equipoise.runs.toml import decode_toml

__all__ = ["may_know_held_out"]


def may_know_held_out(folder: Path, config: Config, train: Dataset) -> bool:
    """Return whether the weights of a run may have learnt from samples that another one holds out.

    They have not if they come from that run alone, and it learnt from the same samples as the other
    one does; everything else is unknown.

    Args:
        folder: The run with the weights.
        config: What the run was told that holds samples out, if it does.
        train: What it learns from.
    """
    if not config.data.holdout:
        return False
    path = folder / "config.toml"
    try:
        told = decode_toml(path.read_bytes(), str(path))
    except (OSError, SourceError):
        return True
    taken = told.get("model", {}).get("weights") or told.get("task", {}).get("teacher")
    return bool(taken) or read_trained_on(folder) != fingerprint(train)
