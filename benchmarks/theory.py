"""Writes docs/results/theory.md: every check on a random and on a trained network, with margins.

Run: python benchmarks/theory.py [--date YYYY-MM-DD] [--models monotone-digits ...]

Trains one small network of each family on scikit-learn's digits in a temporary folder.
"""

from __future__ import annotations

import argparse
import datetime
import tempfile
from pathlib import Path

from equipoise.analysis import find_checks, verify
from equipoise.cli import main as command
from equipoise.runs import verify_run

PAGE = Path(__file__).parent.parent / "docs" / "results" / "theory.md"
TRAINED = {
    "relu-implicit": ["model.options.width=200"],
    "monotone-digits": [],
    "opteq-digits": [],
}
HEAD = """# The papers' theorems on networks

What `equipoise verify` found on {date}, in float64, written by `python benchmarks/theory.py`.
The random network is the one that each check makes for itself (seed 0); those trained for three
epochs on scikit-learn's digits are {models}, checked with 4
samples that they learnt from and their first output. A field is empty where none was trained.
The number behind an outcome is the tightest conclusion, or the hypothesis that is false.
What the outcomes mean: [theorems as checks](../explain/verify.md).

"""


def cell(verdict):
    """Outcome and what it rests on, fit for a table."""
    if verdict is None:
        return ""
    one = verdict.deciding
    if one is None:
        return verdict.outcome
    text = f"{one.claim}: {one.value:.3g} {one.relation} {one.bound:.3g}, margin {one.margin:.2g}"
    return f"{verdict.outcome}; {text}".replace("|", "\\|")


def trained(models):
    """Verdicts by the name of the check, on networks that were trained."""
    found = {}
    checks = find_checks()
    with tempfile.TemporaryDirectory() as folder:
        for model in models:
            words = TRAINED[model]
            run = Path(folder) / model
            words = ["digits", f"model.name={model}", "train.epochs=3", *words, "--quiet"]
            command(["train", *words, "--output", str(run)])
            try:
                verdicts = verify_run(run, checks, samples=4)
            except ValueError:  # no check speaks of it
                continue
            found.update({one.check.name: one for one in verdicts})
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--models", nargs="*", default=list(TRAINED), choices=TRAINED)
    arguments = parser.parse_args()
    date = arguments.date
    after = trained(arguments.models)
    lines, paper = (
        [HEAD.format(date=date, models=", ".join(f"`{one}`" for one in arguments.models))],
        "",
    )
    for check in find_checks():
        if check.paper != paper:
            paper = check.paper
            lines.append(f"\n## {paper}\n\n| check | random network | trained network |")
            lines.append("|---|---|---|")
        row = f"| `{check.name}` | {cell(verify(check))} | {cell(after.get(check.name))} |"
        lines.append(row)
    text = "\n".join(lines).replace("\n\n\n", "\n\n")
    PAGE.write_text(text + "\n")


if __name__ == "__main__":
    main()
