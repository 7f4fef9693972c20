"""Figures of loss landscapes, and what they say of a minimum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from equipoise.analysis import Basin, find_basin
from equipoise.core import require_finite, require_whole
from equipoise.plots import plot_landscape, save_figure
from equipoise.plots.landscape import View
from equipoise.runs.curvature import find_curvature
from equipoise.runs.landscape import FoundLandscape, LandscapeSettings, find_landscape
from equipoise.runs.look import Look, OnProgress, require_panels
from equipoise.runs.network import Source, open_network

__all__ = ["look_landscape"]


def look_landscape(
    sources: Sequence[Source],
    settings: LandscapeSettings,
    folder: Path,
    *,
    view: View | None = None,
    level: float | None = None,
    eigenvalues: int = 0,
    processes: int = 1,
    on_progress: OnProgress | None = None,
) -> Look:
    """Draw the loss landscapes of networks beside each other, and say how wide their basins are.

    Args:
        sources: The networks.
        settings: Which landscape.
        folder: Where to write.
        view: `contour` or `surface`; by default both are written.
        level: The loss up to which a basin is measured; by default twice that at the centre.
        eigenvalues: How many of the largest eigenvalues of the Hessian to find.
        processes: As of `find_landscape`.
        on_progress: Called with how much is done, how much there is, and of what.
    """
    if settings.directions == "path" and len(sources) > 1:
        raise ValueError("look landscape: --directions path must be asked of one run at a time.")
    require_panels(len(sources))
    require_whole("look.eigenvalues", eigenvalues)
    if level is not None:
        require_finite("look.level", level)
    found: dict[str, FoundLandscape] = {}
    lines: list[str] = []
    values: dict[str, Any] = {}
    for source in sources:

        def tell(done: int, total: int, title: str = source.title) -> None:
            if on_progress is not None:
                on_progress(done, total, f"points of {title}")

        # beside its run, so that another figure of it finds it
        kept = folder if source.folder is None else source.folder / "look"
        one = find_landscape(source, settings, kept, processes=processes, on_points=tell)
        found[source.title] = one
        centre = float(one.landscape.loss[one.landscape.centre])
        basin = None
        if math.isfinite(centre):
            wanted = 2 * centre if level is None else level
            basin = find_basin(one.landscape, wanted) if wanted >= centre else None
        about = _describe_landscape(source.title, one, centre, basin, level)
        values[source.title] = about[1]
        lines.append(about[0])
        if eigenvalues:
            sentence, numbers = _describe_curvature(source, settings, eigenvalues, on_progress)
            lines.append(f"{source.title}: {sentence}")
            values[source.title]["hessian"] = numbers
    landscapes = {title: one.landscape for title, one in found.items()}
    first = next(iter(found.values()))
    views: Sequence[View] = ("contour", "surface") if view is None else (view,)
    files = []
    folder.mkdir(parents=True, exist_ok=True)
    for each in views[: settings.dimensions]:
        names, caption = _caption(settings, found, marked=each == "contour")
        figure = plot_landscape(landscapes, view=each, path=first.path, axis_names=names)
        name = "landscape-line" if settings.dimensions == 1 else f"landscape-{each}"
        name += "-path" if settings.directions == "path" else ""
        files += save_figure(figure, folder / name, caption)
    return Look(files, lines, values)


def _describe_landscape(
    title: str, one: FoundLandscape, centre: float, basin: Basin | None, level: float | None
) -> tuple[str, dict[str, Any]]:
    land = one.landscape
    row, column = land.centre
    exact = land.x[column] == 0 and land.y[row] == 0
    where = "at the weights" if exact else "at the point of the grid nearest to the weights"
    text = f"{title}: loss {centre:.4g} {where}"
    values: dict[str, Any] = {
        "file": str(one.file),
        "loss": centre,
        "points": land.loss.size,
        "unsolved_points": land.unsolved,
        "undefined_points": land.undefined,
        "samples": land.samples,
    }
    if basin is not None:
        size = f"width {basin.width:.3g}" + (
            f", height {basin.height:.3g}, area {basin.area:.3g}" if len(land.y) > 1 else ""
        )
        least = "at least " if basin.open else ""
        text += f"; its basin below {basin.level:.4g} has {least}{size}"
        values["basin"] = vars(basin)
    elif level is not None:
        text += f", above the level {level:.4g}, so that it has no basin there"
    for number, what in (
        (land.unsolved, "a sample whose equilibrium was not reached"),
        (land.undefined, "no finite loss"),
    ):
        if number:
            text += f"; {number:,} of {land.loss.size:,} points have {what}"
    return f"{text}.", values


def _describe_curvature(
    source: Source, settings: LandscapeSettings, count: int, on_progress: OnProgress | None
) -> tuple[str, dict[str, Any]]:
    network = open_network(source)
    dataset = network.samples(settings.split, settings.samples)

    def tell(done: int, total: int) -> None:
        if on_progress is not None:
            on_progress(done, total, f"products with the Hessian of {source.title}")

    found = find_curvature(network, dataset, count, on_product=tell)
    numbers = ", ".join(f"{value:.4g}" for value in found.largest)
    return (
        f"largest eigenvalues of the Hessian {numbers}; smallest {found.smallest:.4g} "
        f"(each within {found.error.max():.1g}, {found.products} products).",
        {
            "largest": found.largest.tolist(),
            "smallest": found.smallest,
            "error": found.error.tolist(),
            "products": found.products,
        },
    )


def _caption(
    settings: LandscapeSettings, found: dict[str, FoundLandscape], *, marked: bool
) -> tuple[tuple[str, str], str]:
    """The names of the axes, and what a figure says below itself; surfaces have no marks."""
    first = next(iter(found.values()))
    samples = sorted({one.landscape.samples for one in found.values()})
    counts = " or ".join(f"{count:,}" for count in samples)
    if first.explained is not None:
        names = tuple(
            f"principal direction {place} of the path ({fraction:.0%})"
            for place, fraction in enumerate(first.explained, 1)
        )
        text = "The plane of the training path's two principal directions"
    else:
        scale = {
            "filter": "as long as the weights, filter by filter",
            "layer": "as long as the weights, layer by layer",
            "none": "not scaled",
        }[settings.normalize]
        names = ("first random direction", "second random direction")
        text = f"Random directions, {scale} (seed {settings.seed})"
        if not settings.vectors:
            text += "; biases and scales of normalisations fixed"
    text += f". Mean loss over {counts} samples of {first.split!r} at {first.landscape.loss.size:,}"
    plane = settings.dimensions == 2
    text += " points; the cross marks the weights." if plane and marked else " points."
    unsolved = sum(one.landscape.unsolved for one in found.values())
    undefined = sum(one.landscape.undefined for one in found.values())
    if unsolved:
        text += f" {'Red dots: ' * marked}{unsolved:,} points where an equilibrium was not reached."
    if undefined:
        text += f" {'Black crosses: ' * marked}{undefined:,} points without a finite loss."
    return (names[0], names[1]), text
