"""The sections of the page of a run, each of which is empty where the run has nothing to say."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from equipoise.core import to_percent
from equipoise.report.chart import Chart, Line, Rule
from equipoise.report.content import RunReport, SolvePath
from equipoise.report.curve import MIN_VALUE, average, column, inner, keys, number
from equipoise.report.image import encode, label_colour, paint_heat, paint_mask, shrink, to_bytes
from equipoise.report.markup import NONE, clock, count, escape, figure, plural, table

__all__ = [
    "confusion_matrix",
    "curves",
    "describe_solve",
    "masks",
    "rates",
    "solve_charts",
    "solve_title",
    "solver",
    "statuses",
    "tiles",
]

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
    *(
        "step",
        "epoch",
        "loss",
        "learning_rate",
        "gradient_norm",
        "forward_steps",
        "backward_steps",
        "forward_residual",
    ),
    *("backward_residual", "skipped", "samples", "samples_per_second", "seconds", "missed"),
}
STATUSES = ("CONVERGED", "MAX_STEPS", "STALLED", "DIVERGED", "NONFINITE")
MAX_SCORES, MAX_NAMED_CLASSES, MAX_MASKS = 6, 20, 4


def tiles(report: RunReport) -> str:
    """What a run came to, in a few large numbers."""
    summary, last = report.summary, report.epochs[-1] if report.epochs else None
    found: list[tuple[str, str, str]] = []
    metric = (
        str(summary["metric"])
        if summary and "metric" in summary
        else next(iter(_scores(report)), "loss")
    )
    for part in (*HELD_OUT, "train"):
        values = inner(summary, part) or inner(last, part)
        if math.isfinite(value := number(values.get(metric))):
            name, unit = SCORES.get(metric, (metric.replace("_", " "), ""))
            samples = number(values.get("samples"))
            more = plural(samples, "sample") if math.isfinite(samples) else ""
            shown = (
                f"{to_percent(value, 2 if samples >= 5000 else 1)}\u202f%"
                if unit == "%"
                else f"{figure(value)} {unit}".strip()
            )
            found.append(
                (f"{part} {name if name.isupper() else name[:1].lower() + name[1:]}", shown, more)
            )
            break
    for part in HELD_OUT:
        values = inner(summary, part) or inner(last, part)
        if math.isfinite(missed := number(values.get("missed"))):
            samples = number(values.get("samples"))
            of = (
                f"of {count(samples)} in the {part} set"
                if math.isfinite(samples)
                else f"in the {part} set"
            )
            found.append(("samples that missed the tolerance", count(missed), of))
            break
    if summary is not None:
        found.append(("time", clock(number(summary.get("seconds"))), _length(summary)))
        parameters = inner(summary, "parameters")
        parts = ", ".join(
            f"{count(number(value))} {key}" for key, value in parameters.items() if key != "total"
        )
        found.append(("parameters", count(number(parameters.get("total"))), parts))
        skipped = number(summary.get("skipped"))
    else:
        seconds = [
            value for line in report.epochs if math.isfinite(value := number(line.get("seconds")))
        ]
        done = number((report.steps or report.epochs or [{}])[-1].get("step"))
        found.append(
            (
                "not finished",
                f"step {count(done)}" if math.isfinite(done) else NONE,
                f"{plural(len(report.epochs), 'epoch')} done",
            )
        )
        found.append(("time of these epochs", clock(math.fsum(seconds)) if seconds else NONE, ""))
        lost = [
            value for line in report.epochs if math.isfinite(value := number(line.get("skipped")))
        ]
        skipped = math.fsum(lost) if lost else math.nan
    found.append(("skipped steps", count(skipped), ""))
    return "".join(
        f'<div><dt>{escape(name)}</dt><dd class="value">{escape(value)}</dd><dd '
        f'class="more">{escape(more)}</dd></div>\n'
        for name, value, more in found
        if value != NONE
    )


def curves(report: RunReport) -> Iterator[Chart]:
    """Loss and scores: each logged step faintly, their means, and what each epoch ended with."""
    for key in ("loss", *_scores(report)[:MAX_SCORES]):
        name, unit = SCORES.get(key, (key.replace("_", " ").capitalize(), ""))
        factor = 100.0 if unit == "%" else 1.0
        lines = _trace("training", *column(report.steps, key), 0)
        if not lines:
            x, y = column(report.epochs, key, "train")
            lines = [Line("training", x, y, 0, "points")]
        for colour, part in enumerate(HELD_OUT, 1):
            x, y = column(report.epochs, key, part)
            lines.append(Line(part, x, y, colour, "points"))
        lines = [Line(line.name, line.x, factor * line.y, line.colour, line.kind) for line in lines]
        wide = unit != "%" and _is_wide(np.concatenate([line.y for line in lines]))
        yield Chart(name, lines, unit or (key if key in ("loss", *SCORES) else "value"), log=wide)


def rates(report: RunReport) -> Iterator[Chart]:
    """Learning rate and the length of gradients."""
    yield Chart(
        "Learning rate", [Line("learning rate", *column(report.steps, "learning_rate"))], "rate"
    )
    x, y = column(report.steps, "gradient_norm")
    yield Chart("Norm of the gradient", _trace("mean", x, y, 0), "norm", log=_is_wide(y))


def solver(report: RunReport) -> Iterator[Chart]:
    """Steps and residuals of solves, and norms of operators."""
    for kind, name, unit in (
        ("steps", "Steps of the solver", "steps for each solve"),
        ("residual", "Residuals", "relative residual"),
    ):
        lines = [
            line
            for colour, way in enumerate(("forward", "backward"))
            for line in _trace(way, *column(report.steps, f"{way}_{kind}"), colour)
        ]
        yield Chart(
            name,
            lines,
            unit,
            log=kind == "residual",
            rule=_tolerance(report) if kind == "residual" else None,
        )
    norms = [
        {**inner(line, "operator_norms"), "step": number(line.get("epoch")) + 1}
        for line in report.epochs
    ]
    layers = [key for key in keys(norms) if key != "step"]
    lines = [
        Line(layer, *column(norms, layer), colour, "points") for colour, layer in enumerate(layers)
    ]
    yield Chart("Norms of operators", lines, "norm", x="epoch", rule=Rule("norm 1", 1.0))


def statuses(report: RunReport) -> str:
    """How many solves ended in which way, as bars and a table."""
    summary = report.summary
    rows: list[tuple[str, Counter[str]]] = []
    for way in ("forward", "backward"):
        key = f"{way}_status"
        whole = _counts([inner(summary, key)]) or _counts(
            [inner(line, key) for line in report.epochs]
        )
        logged = whole or _counts([inner(line, key) for line in report.steps])
        rows.append((f"training, {way}" if whole else f"training, {way}, logged steps", logged))
    rows += [(part, _counts([inner(inner(summary, part), "status")])) for part in HELD_OUT]
    rows = [(name, counts) for name, counts in rows if counts]
    if not rows:
        return ""
    seen = {status for _, counts in rows for status in counts}
    names = [status for status in STATUSES if status in seen] + sorted(seen.difference(STATUSES))
    colour = {
        status: (0, 1, 5, 3, 4)[STATUSES.index(status)] + 1 if status in STATUSES else 3
        for status in names
    }
    bars = ""
    for name, counts in rows:
        words = ", ".join(
            f"{count(counts[status])} {_plain(status)}" for status in names if counts[status]
        )
        at, pieces = 0.0, ""
        for status in names:
            width = 100 * counts[status] / counts.total()
            pieces += (
                f'<rect x="{at:.3f}" width="{width:.3f}" height="1" '
                f'fill="var(--line-{colour[status]})"/>'
            )
            at += width
        bars += (
            f'<h3>{escape(name.capitalize())}</h3><svg class="bar" viewBox="0 0 100 1" '
            'preserveAspectRatio="none" role="img"'
        )
        bars += f' aria-label="{escape(name)}: {escape(words)}">{pieces}</svg>\n'
    legend = "".join(_swatch(f"var(--line-{colour[status]})", _plain(status)) for status in names)
    cells = [
        [
            escape(name),
            *(count(counts[status]) for status in names),
            f"{_ratio(counts['CONVERGED'], counts.total())}",
        ]
        for name, counts in rows
    ]
    head = ["solves", *(escape(_plain(status)) for status in names), "share"]
    listed = table("Solves of single samples", cells, head)
    return (
        f"{bars}<ul "
        f'class="legend">{legend}</ul>{_scroll("counts", "Solves of single samples", listed)}'
    )


def confusion_matrix(report: RunReport) -> str:
    """Counts of truth against prediction, coloured by their share of the truth."""
    if report.confusion is None or not np.size(report.confusion):
        return ""
    counts = np.nan_to_num(np.asarray(report.confusion, dtype=np.float64), posinf=0, neginf=0).clip(
        0
    )
    total = counts.sum(axis=1)
    shares = counts / np.where(total > 0, total, 1)[:, None]
    if len(counts) > MAX_NAMED_CLASSES:
        label = (
            f"Confusion matrix of {len(counts)} classes; "
            f"{_ratio(counts.trace(), counts.sum())} of samples on the diagonal"
        )
        return (
            f"<p>Rows are the truth, columns the prediction, of {len(counts)} classes. "
            "The stronger the colour, the larger the share of the row.</p>"
            f'<img class="heat pixels" src="{encode(paint_heat(shares))}" alt="{label}">'
        )
    names = [
        escape(report.classes[k] if k < len(report.classes) else k) for k in range(len(counts))
    ]
    rows = []
    for k, name in enumerate(names):
        cells = [
            f'<b class="heat-{math.ceil(10 * share)}">{count(value)}</b>' if value else "·"
            for value, share in zip(counts[k], shares[k], strict=True)
        ]
        rows.append([name, *cells, _ratio(counts[k, k], total[k])])
    long = any(len(str(name)) > 4 for name in report.classes)
    heads = [f'<span class="turned">{name}</span>' if long else name for name in names]
    listed = table("Rows are the truth, columns the prediction", rows, ["truth", *heads, "recall"])
    return _scroll("matrix", "Confusion matrix", listed)


def masks(report: RunReport) -> str:
    """Pictures beside their true and their predicted masks."""
    rows, seen = "", set()
    for k, sample in enumerate(report.masks[:MAX_MASKS], 1):
        truth, prediction = shrink(np.asarray(sample.truth)), shrink(np.asarray(sample.prediction))
        seen |= {int(label) for label in (*np.unique(truth), *np.unique(prediction))}
        rows += "<div>"
        for name, pixels in (
            ("image", shrink(to_bytes(sample.image))),
            ("truth", paint_mask(truth, report.ignore)),
            ("prediction", paint_mask(prediction, report.ignore)),
        ):
            picture = f'<img class="pixels" src="{encode(pixels)}" alt="sample {k}, {name}">'
            rows += f"<figure>{picture}<figcaption>{name}</figcaption></figure>"
        rows += "</div>"
    if not rows:
        return ""
    known = sorted(label for label in seen if label >= 0 and label != report.ignore)
    legend = "".join(
        _swatch(
            label_colour(label),
            report.classes[label] if label < len(report.classes) else f"class {label}",
        )
        for label in known
    )
    clear = _swatch("var(--tint)", "does not count") if len(known) < len(seen) else ""
    return f'<div class="masks">{rows}</div><ul class="legend">{legend}{clear}</ul>'


def solve_title(solve: SolvePath) -> str:
    """The heading of a solve."""
    return f"The equilibrium of one sample{': ' if solve.name else ''}{escape(solve.name)}"


def describe_solve(solve: SolvePath) -> str:
    """What the solve of one sample solves, and what is proven about it."""
    text = "".join(
        f'<p class="prose">{escape(text)}</p>'
        for text in (solve.description, solve.certificate)
        if text
    )
    if solve.image is None:
        return text
    source = encode(shrink(to_bytes(solve.image)))
    return f'<img class="sample pixels" src="{source}" alt="the sample">{text}'


def solve_charts(solve: SolvePath, report: RunReport) -> Iterator[Chart]:
    """How residual and objective fell."""
    residual = _path("residual", solve.residual, 0)
    objective = _path("objective", () if solve.objective is None else solve.objective, 2)
    x, rule = "step of the solver", _tolerance(report)
    yield Chart("Residual", [residual], "relative residual", x=x, log=True, rule=rule)
    yield Chart("Objective", [objective], "value above the minimum", x=x, log=True)


def _path(name: str, values: Sequence[float], colour: int) -> Line:
    y = np.array([number(value) for value in values])
    return Line(name, np.arange(len(y), dtype=np.float64), y, colour, "points")


def _is_wide(y: np.ndarray) -> bool:
    """Whether values are positive and the largest is more than a hundred times the least, so that a linear axis would hide most."""
    known = y[np.isfinite(y)]
    return bool(len(known) and known.min() > 0 and known.max() > 100 * known.min())


def _tolerance(report: RunReport) -> Rule | None:
    value = number(inner(inner(report.config, "model"), "options").get("tolerance"))
    return Rule(f"tolerance {figure(value)}", value) if value >= MIN_VALUE else None


def _trace(name: str, x: np.ndarray, y: np.ndarray, colour: int) -> list[Line]:
    if not np.isfinite(y).any():
        return []
    mean_x, mean_y = average(x, y)
    if not len(mean_x):
        return [Line(name, x, y, colour)]
    return [Line(name, x, y, colour, "faint"), Line(name, mean_x, mean_y, colour)]


def _scores(report: RunReport) -> list[str]:
    found = [key for part in (*HELD_OUT, "train") for key in keys(report.epochs, part)] + keys(
        report.steps
    )
    return [key for key in dict.fromkeys(found) if key not in NOT_SCORES]


def _counts(lines: Sequence[Mapping[str, Any]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for line in lines:
        for key, value in line.items():
            if number(value) > 0:
                found[str(key)] += round(number(value))
    return found


def _length(summary: Mapping[str, Any]) -> str:
    values = [(noun, number(summary.get(f"{noun}s"))) for noun in ("epoch", "step")]
    parts = [plural(value, noun) for noun, value in values if math.isfinite(value)]
    return ", ".join([*parts, *(["stopped early"] if summary.get("stopped") == "early" else [])])


def _plain(status: str) -> str:
    return status.lower().replace("_", " ")


def _ratio(count: float, total: float) -> str:
    return f"{to_percent(count / total)}\u202f%" if total else NONE


def _scroll(kind: str, name: str, content: str) -> str:
    """What may be wider than a phone, to be moved by finger or keyboard."""
    return (
        f'<div class="scroll {kind}" role="region" aria-label="{name}" tabindex="0">{content}</div>'
    )


def _swatch(colour: str, name: object) -> str:
    key = (
        '<svg class="swatch" viewBox="0 0 13 13" aria-hidden="true"><rect width="13" '
        f'height="13" fill="{colour}"/></svg>'
    )
    return f"<li>{key}{escape(name)}</li>"
