"""What a model predicted: the confusion matrix, and a few samples."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from equipoise.report.content import RunReport, ShownSample
from equipoise.report.format import format_count, format_percent, format_plural
from equipoise.report.image import encode, label_colour, paint_heat, paint_mask, shrink, to_bytes
from equipoise.report.markup import escape, make_scrollable, render_swatch, render_table

__all__ = ["render_bad_samples", "render_confusion", "render_samples"]

MAX_NAMED_CLASSES, MAX_SAMPLES, MAX_BAD_SAMPLES, MAX_WEAKEST = 20, 4, 50, 10
SCORES = ("recall", "precision", "F1")


def render_confusion(report: RunReport) -> str:
    """Return counts of truth against prediction, coloured by their fraction of the row."""
    if report.confusion is None or not np.size(report.confusion):
        return ""
    raw = np.asarray(report.confusion, dtype=np.float64)
    counts = np.nan_to_num(raw, posinf=0, neginf=0).clip(0)
    total = counts.sum(axis=1)
    fractions = counts / np.where(total > 0, total, 1)[:, None]
    names = [
        escape(report.classes[k] if k < len(report.classes) else k) for k in range(len(counts))
    ]
    if len(counts) > MAX_NAMED_CLASSES:
        return _render_confusion_image(counts, fractions) + _render_weakest(counts, names)
    scores = _class_scores(counts)
    rows = []
    for k, name in enumerate(names):
        cells = [
            f'<b class="heat-{math.ceil(10 * fraction)}">{format_count(value)}</b>'
            if value
            else "·"
            for value, fraction in zip(counts[k], fractions[k], strict=True)
        ]
        rows.append([name, *cells, *scores[k]])
    long = any(len(str(name)) > 4 for name in report.classes)
    heads = [f'<span class="turned">{name}</span>' if long else name for name in names]
    caption = "Rows are the truth, columns the prediction"
    table = render_table(caption, rows, ["truth", *heads, *SCORES])
    return make_scrollable("matrix", "Confusion matrix", table)


def _class_scores(counts: np.ndarray) -> list[list[str]]:
    """Recall, precision and F1 of each class, in words; a dash where nothing was counted."""
    right, truth, found = counts.diagonal(), counts.sum(axis=1), counts.sum(axis=0)
    pairs = ((right, truth), (right, found), (2 * right, truth + found))
    return [[format_percent(part[k], whole[k]) for part, whole in pairs] for k in range(len(right))]


def _render_weakest(counts: np.ndarray, names: Sequence[str]) -> str:
    """The classes with the smallest F1, of many."""
    right, both = 2 * counts.diagonal(), counts.sum(axis=1) + counts.sum(axis=0)
    f1 = np.where(both > 0, right / np.where(both > 0, both, 1), np.inf)
    scores = _class_scores(counts)
    order = [k for k in np.argsort(f1, kind="stable")[:MAX_WEAKEST] if both[k] > 0]
    rows = [[names[k], format_count(counts[k].sum()), *scores[k]] for k in order]
    caption = f"The {format_count(len(rows))} classes with the smallest F1"
    table = render_table(caption, rows, ["class", "samples", *SCORES])
    return make_scrollable("counts", caption, table)


def _render_confusion_image(counts: np.ndarray, fractions: np.ndarray) -> str:
    correct = format_percent(counts.trace(), counts.sum())
    words = f"Confusion matrix of {len(counts)} classes; {correct} of samples on the diagonal"
    return (
        f"<p>Rows are the truth, columns the prediction, of {len(counts)} classes. "
        "The stronger the colour, the larger the fraction of the row.</p>"
        f'<img class="heat pixels" src="{encode(paint_heat(fractions))}" alt="{words}">'
    )


def render_samples(report: RunReport) -> str:
    """Return samples beside what is true of them and what was predicted, with colours of labels."""
    samples = report.samples[:MAX_SAMPLES]
    if not samples:
        return ""
    rows = "".join(_render_sample(k, sample, report.ignore) for k, sample in enumerate(samples, 1))
    panels = [np.asarray(panel) for sample in samples for panel in sample.panels.values()]
    seen = {int(label) for panel in panels if panel.ndim == 2 for label in np.unique(shrink(panel))}
    known = sorted(label for label in seen if label >= 0 and label != report.ignore)
    legend = ""
    for label in known:
        name = report.classes[label] if label < len(report.classes) else f"class {label}"
        legend += render_swatch(label_colour(label), name)
    if len(known) < len(seen):
        legend += render_swatch("var(--tint)", "does not count")
    return f'<div class="samples">{rows}</div>' + (
        f'<ul class="legend">{legend}</ul>' if legend else ""
    )


def render_bad_samples(report: RunReport) -> str:
    """Return a table of the files that could not be read; empty if all could."""
    if not report.bad_samples:
        return ""
    shown = list(report.bad_samples.items())[:MAX_BAD_SAMPLES]
    more = len(report.bad_samples) - len(shown)
    rest = f", the first {format_count(len(shown))}" if more else ""
    caption = f"{format_plural(len(report.bad_samples), 'sample')} skipped{rest}"
    rows = [[escape(file), escape(reason)] for file, reason in shown]
    table = render_table(caption, rows, ["file", "what is wrong"])
    return make_scrollable("files", caption, table)


def _render_sample(number: int, sample: ShownSample, ignore: int | None) -> str:
    figures = ""
    for caption, panel in sample.panels.items():
        values, name = np.asarray(panel), escape(caption)
        pixels = (
            paint_mask(shrink(values), ignore) if values.ndim == 2 else shrink(to_bytes(values))
        )
        image = f'<img class="pixels" src="{encode(pixels)}" alt="sample {number}, {name}">'
        figures += f"<figure>{image}<figcaption>{name}</figcaption></figure>"
    return f"<div>{figures}</div>"
