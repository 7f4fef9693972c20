"""What all figures share: their size, their colours, and how they are saved."""

from __future__ import annotations

import io
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.core import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "DASHES", "MARKERS", "grid_of", "make_figure", "save_figure", "tidy"]

# Paul Tol's muted scheme: distinct to any colour vision. Greys are told apart by the markers.
COLOURS = (
    "#332288",
    "#cc6677",
    "#117733",
    "#88ccee",
    "#ddaa33",
    "#882255",
    "#44aa99",
    "#999933",
    "#aa4499",
    "#555555",
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
DASHES = ("-", "--", ":", "-.", (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)))

LETTERS = 15  # of a caption in an inch
MAX_COLUMNS = 3  # panels beside each other


def make_figure(width: float, height: float) -> Figure:
    """Return an empty figure; matplotlib takes a second to import, so only when one is drawn."""
    from matplotlib.figure import Figure

    # without pyplot: no global state, no window
    return Figure(figsize=(width, height), dpi=130, layout="constrained")


def grid_of(count: int) -> tuple[int, int]:
    """Return rows and columns for so many panels; four are two by two."""
    columns = 2 if count == 4 else min(count, MAX_COLUMNS)
    return -(-count // columns), columns


def tidy(axes: Any) -> None:
    """Take away what says nothing, and add a faint grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, which="major", alpha=0.3, linewidth=0.6)


def save_figure(figure: Figure, path: Path, caption: str) -> list[Path]:
    """Write a figure as PNG and as SVG, with its caption below it, and return where they are.

    The caption is also kept as `Description` in both files, so that a page can show it as text.

    Args:
        figure: The figure.
        path: Where, without a suffix.
        caption: What it shows: of which samples, and what is missing.
    """
    from matplotlib import rc_context

    columns = int(LETTERS * figure.get_figwidth())
    figure.supxlabel("\n".join(textwrap.wrap(caption, columns)), fontsize=8, color="#444444")
    written = []
    for kind, metadata in (
        ("png", {"Description": caption}),
        ("svg", {"Description": caption, "Date": None}),
    ):
        content = io.BytesIO()
        with rc_context({"svg.hashsalt": "equipoise"}):  # the same figure is the same file
            figure.savefig(content, format=kind, metadata=metadata)
        target = path.with_name(f"{path.name}.{kind}")
        write_atomically(target, content.getvalue())
        written.append(target)
    return written
