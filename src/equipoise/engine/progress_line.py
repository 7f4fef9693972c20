"""Lines about a run in words, short enough for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from textwrap import fill
from typing import Any

from equipoise.engine.log import NOT_SCORES
from equipoise.engine.pace import describe_duration
from equipoise.engine.tasks import find_metric

__all__ = ["describe_epoch", "describe_step", "fit_line", "wrap_line"]

WIDTH = 80  # columns of a line


def fit_line(parts: Iterable[str], short: Iterable[str] = (), indent: int = 0) -> str:
    """Return one line, with narrower spaces or in shorter words if need be, else more lines.

    Args:
        parts: What is to be said; empty ones are left out.
        short: The same in fewer words; by default the same words.
        indent: Columns by which more lines are set back.
    """
    parts = [part for part in parts if part]
    short = [part for part in short if part] or parts
    for space, words in (("   ", parts), ("  ", parts), ("  ", short)):
        line = space.join(words)
        if len(line) <= WIDTH:
            return line
    lines = short[:1]
    for part in short[1:]:
        longer = f"{lines[-1]}  {part}"
        if len(longer) <= WIDTH:
            lines[-1] = longer
        else:
            lines.append(f"{' ' * indent}{part}")
    return "\n".join(lines)


def wrap_line(text: str) -> str:
    """Return a sentence in lines that fit; names and paths without spaces stay whole.

    Args:
        text: The sentence.
    """
    return fill(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def describe_epoch(line: Mapping[str, Any], *, short: bool = False) -> list[str]:
    """Say what came out of an epoch.

    Args:
        line: Its line of metrics.
        short: Whether in few words: only the first score, named once, and the steps of forward and
            backward solves as two numbers.
    """
    trained = line.get("train")
    parts = _scores(trained, loss=True, short=short)
    for split in ("validation", "test"):
        values = line.get(split) or {}
        names, said = _score_names(values), _scores(values, short=short)
        if short and names and names[0] in _score_names(trained)[:1]:
            said = [find_metric(names[0]).format_value(values[names[0]])]
        label = "val" if short and split == "validation" else split
        parts += [f"{label} {score}" for score in said]
    return [
        *parts,
        *_solver(line, short=short),
        *_troubles(line),
        describe_duration(line.get("seconds")),
    ]


def describe_step(values: Mapping[str, Any], *, short: bool = False) -> list[str]:
    """Say what is known of a step.

    Args:
        values: Its loss, scores and steps of solves, and how many were skipped and failed.
        short: Whether in few words.
    """
    troubles = [f"{values[name]:.0f} {name}" for name in ("failed", "skipped") if values.get(name)]
    return [*_scores(values, loss=True, short=short), *troubles, *_solver(values, short=short)]


def _score_names(values: Mapping[str, Any] | None) -> list[str]:
    return [
        name
        for name, value in (values or {}).items()
        if isinstance(value, int | float) and name not in NOT_SCORES
    ]


def _scores(
    values: Mapping[str, Any] | None, *, loss: bool = False, short: bool = False
) -> list[str]:
    """Name the scores, only the first if `short`, and before them the loss if wanted."""
    values = values or {}
    known = loss and isinstance(values.get("loss"), int | float)
    names = [*(["loss"] if known else []), *_score_names(values)[: 1 if short else None]]
    return [find_metric(name).describe(values[name]) for name in names]


def _solver(values: Mapping[str, Any], *, short: bool = False) -> list[str]:
    steps = {
        way: f"{values[f'{way}_steps']:.1f}"
        for way in ("forward", "backward")
        if values.get(f"{way}_steps") is not None
    }
    if short and len(steps) == 2:
        return [f"steps {'+'.join(steps.values())}"]
    said = ", ".join(f"{count} {way}" for way, count in steps.items())
    return [f"steps {said}"] if steps else []


def _troubles(line: Mapping[str, Any]) -> list[str]:
    """Say what went wrong in an epoch."""
    troubles = []
    for way in ("forward", "backward"):
        ends = line.get(f"{way}_status") or {}
        missed = sum(count for name, count in ends.items() if name != "CONVERGED")
        if missed:
            troubles.append(f"{missed} of {sum(ends.values())} {way} not converged")
    return troubles + ([f"{line['skipped']} skipped"] if line.get("skipped") else [])
