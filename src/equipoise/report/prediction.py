"""What a model predicted: the confusion matrix, and masks beside the true ones."""

from __future__ import annotations

import math

import numpy as np

from equipoise.report.content import MaskSample, RunReport
from equipoise.report.format import format_count, format_percent
from equipoise.report.image import encode, label_colour, paint_heat, paint_mask, shrink, to_bytes
from equipoise.report.markup import escape, make_scrollable, render_swatch, render_table

__all__ = ["render_confusion", "render_masks"]

MAX_NAMED_CLASSES, MAX_MASKS = 20, 4


def render_confusion(report: RunReport) -> str:
    """Return counts of truth against prediction, coloured by their fraction of the row."""
    if report.confusion is None or not np.size(report.confusion):
        return ""
    raw = np.asarray(report.confusion, dtype=np.float64)
    counts = np.nan_to_num(raw, posinf=0, neginf=0).clip(0)
    total = counts.sum(axis=1)
    fractions = counts / np.where(total > 0, total, 1)[:, None]
    if len(counts) > MAX_NAMED_CLASSES:
        return _render_confusion_image(counts, fractions)
    names = [
        escape(report.classes[k] if k < len(report.classes) else k) for k in range(len(counts))
    ]
    rows = []
    for k, name in enumerate(names):
        cells = [
            f'<b class="heat-{math.ceil(10 * fraction)}">{format_count(value)}</b>'
            if value
            else "·"
            for value, fraction in zip(counts[k], fractions[k], strict=True)
        ]
        rows.append([name, *cells, format_percent(counts[k, k], total[k])])
    long = any(len(str(name)) > 4 for name in report.classes)
    heads = [f'<span class="turned">{name}</span>' if long else name for name in names]
    caption = "Rows are the truth, columns the prediction"
    table = render_table(caption, rows, ["truth", *heads, "recall"])
    return make_scrollable("matrix", "Confusion matrix", table)


def _render_confusion_image(counts: np.ndarray, fractions: np.ndarray) -> str:
    correct = format_percent(counts.trace(), counts.sum())
    words = f"Confusion matrix of {len(counts)} classes; {correct} of samples on the diagonal"
    return (
        f"<p>Rows are the truth, columns the prediction, of {len(counts)} classes. "
        "The stronger the colour, the larger the fraction of the row.</p>"
        f'<img class="heat pixels" src="{encode(paint_heat(fractions))}" alt="{words}">'
    )


def render_masks(report: RunReport) -> str:
    """Return images beside their true and their predicted masks."""
    samples = report.masks[:MAX_MASKS]
    if not samples:
        return ""
    rows = "".join(_render_mask(k, sample, report.ignore) for k, sample in enumerate(samples, 1))
    masks = [mask for sample in samples for mask in (sample.truth, sample.prediction)]
    seen = {int(label) for mask in masks for label in np.unique(shrink(np.asarray(mask)))}
    known = sorted(label for label in seen if label >= 0 and label != report.ignore)
    legend = ""
    for label in known:
        name = report.classes[label] if label < len(report.classes) else f"class {label}"
        legend += render_swatch(label_colour(label), name)
    if len(known) < len(seen):
        legend += render_swatch("var(--tint)", "does not count")
    return f'<div class="masks">{rows}</div><ul class="legend">{legend}</ul>'


def _render_mask(number: int, sample: MaskSample, ignore: int | None) -> str:
    figures = ""
    for name, pixels in (
        ("image", shrink(to_bytes(sample.image))),
        ("truth", paint_mask(shrink(np.asarray(sample.truth)), ignore)),
        ("prediction", paint_mask(shrink(np.asarray(sample.prediction)), ignore)),
    ):
        image = f'<img class="pixels" src="{encode(pixels)}" alt="sample {number}, {name}">'
        figures += f"<figure>{image}<figcaption>{name}</figcaption></figure>"
    return f"<div>{figures}</div>"
