"""What every figure of `equipoise look` is made with, and where it goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from equipoise.core import SettingError, SourceError
from equipoise.runs.network import Source

__all__ = ["Look", "OnProgress", "find_folder", "require_panels"]

MAX_PANELS = 12
OnProgress = Callable[[int, int, str], None]
"""Called with how much is done, how much there is, and of what."""


@dataclass(frozen=True)
class Look:
    """What a look gave.

    Attributes:
        files: The figures, PNG and SVG.
        lines: What was found, in words.
        values: The same as data.
    """

    files: list[Path]
    lines: list[str]
    values: dict[str, Any] = field(default_factory=dict)


def find_folder(sources: Sequence[Source], output: Path | None) -> Path:
    """Return where figures go: into the folder of the one run that they show, or where it is said.

    Args:
        sources: What they show.
        output: Where it is said.
    """
    if output is not None:
        if output.exists() and not output.is_dir():
            raise SourceError(output, "must be a folder; it is a file.")
        return output
    if len(sources) == 1 and sources[0].folder is not None:
        return sources[0].folder / "look"
    raise ValueError("look: --output DIR must say where to write, but for a figure of one run.")


def require_panels(count: int) -> None:
    """Raise if a figure would have more panels than can be read."""
    if count > MAX_PANELS:
        raise SettingError("look.panels", f"be at most {MAX_PANELS} in one figure", count)
