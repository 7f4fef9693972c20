"""Writes docs/results/theory.md: every check on random and on trained networks, with margins.

Run: python benchmarks/theory.py ['relu-implicit-*'] [--date YYYY-MM-DD] [--seconds 60]

Small networks are trained on data bundled with scikit-learn in a temporary folder. No check may
take more processor time than `--seconds`: one that would is ended, and the page says so. The page
is written anew after each check, so that nothing is lost if this is ended; with a name or a
pattern, rows of other checks stay as they were. What follows the tables is kept.
"""

from __future__ import annotations

import argparse
import datetime
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from equipoise.analysis import find_checks, verify
from equipoise.cli import main as command
from equipoise.core import SettingError
from equipoise.runs import verify_run

PAGE = Path(__file__).parent.parent / "docs" / "results" / "theory.md"
SAMPLES = 4
TRAINED = {
    "digits": [],
    "breast-cancer": ["model.options.hidden=[16, 16]", "model.options.width=16"],
    "monotone-digits": [],
    "relu-implicit-digits": [],
}
"""Presets, and what is changed: two layers, because Corollary 1 speaks of two."""
HEAD = """# The papers' theorems on networks

What `equipoise verify` finds, in float64, on random networks and on trained ones; what the
outcomes mean is explained in [theorems as checks](../explain/verify.md). Written on {date} by

```sh
python benchmarks/theory.py --seconds {seconds:g}
```

`random` is the network that a check makes for itself (seed 0). The others are trained by these
commands and checked with {samples} samples that they learnt from, as networks with their first
output alone:

```sh
{commands}
```

A check whose hypotheses are false on a network "does not apply": trained networks are far from
where the convergence theorems speak. The inequality is the one that the outcome rests on: the
tightest conclusion, or the hypothesis that is false; a negative margin says by how much. No check
had more than {seconds:g} s of processor time.

"""
OTHER = object()
"""In place of a verdict: the check is about another kind of network."""
OUTCOMES = ("holds", "does not apply", "fails", "unknown", "took too long")
LONG = " \\\n    "
"""Between two lines of a command."""
NOTES = "## Notes"
"""The heading below which text is written by hand, and kept."""


class OutOfTimeError(BaseException):
    """No error of a check, so that nothing but `limited` stops it."""


def row_of(name, network, verdict, seconds):
    """Return a line of a table; there is no verdict if the check was ended."""
    one = None if verdict is None else verdict.deciding
    cells = ["", "", ""]
    if one is not None:
        sides = f"{one.value:.4g} {one.relation} {one.bound:.4g}"
        cells = [one.claim.replace("|", "\\|"), sides, f"{one.margin:.2g}"]
    outcome = "took too long" if verdict is None else verdict.outcome
    return "| " + " | ".join([f"`{name}`", network, outcome, *cells, f"{seconds:.1f}"]) + " |"


def read_rows(page):
    """Return the lines of a page's tables by the name of their check."""
    rows = {}
    for line in page.partition(NOTES)[0].splitlines():
        if line.startswith("| `"):
            rows.setdefault(line.split("`")[1], []).append(line)
    return rows


def limited(seconds, function, *arguments):
    """Return what a function returns and its processor time, or None after so many seconds."""

    def stop(_signal, _frame):
        raise OutOfTimeError

    signal.signal(signal.SIGPROF, stop)
    begin = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        found = function(*arguments)
    except OutOfTimeError:
        found = None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return found, time.process_time() - begin


def words(preset):
    return [preset, *TRAINED[preset]]


def on_trained(run, check):
    try:
        return verify_run(run, [check], samples=SAMPLES)[0]
    except SettingError as error:
        if str(error).startswith("verify.run must be of "):
            return OTHER
        raise


def speaks_of(run, check):
    """Whether a check is about the family of a run; the names of checks begin with it."""
    family = {"digits": "opteq", "breast-cancer": "opteq"}.get(run.name, run.name)
    return check.name.startswith(family.removesuffix("-digits") + "-")


def write(arguments, rows, notes):
    """Write the page with what is known so far."""
    lines = []
    for preset in TRAINED:
        line = f"equipoise train {' '.join(map(quoted, words(preset)))}"
        lines.append(f"{line}{' ' if line.endswith(preset) else LONG}--output runs/{preset}")
    text = HEAD.format(
        date=arguments.date,
        samples=SAMPLES,
        commands="\n".join(lines),
        seconds=arguments.seconds,
    )
    text += f"| network | {' | '.join(OUTCOMES)} |\n|---|{'---:|' * len(OUTCOMES)}\n"
    cells = [line.split(" | ") for lines in rows.values() for line in lines]
    for network in ("random", *TRAINED):
        count = Counter(outcome for _, own, outcome, *_ in cells if own == network)
        text += f"| {network} | {' | '.join(str(count[one]) for one in OUTCOMES)} |\n"
    paper = ""
    for check in find_checks():
        if check.paper != paper:
            paper = check.paper
            text += f"\n## {paper}\n\n"
            text += "| check | network | outcome | inequality | measured | margin | seconds |\n"
            text += "|---|---|---|---|---|---:|---:|\n"
        text += "".join(f"{row}\n" for row in rows.get(check.name, ()))
    PAGE.write_text(f"{text}\n{notes}")


def quoted(word):
    return f"'{word}'" if " " in word or "[" in word else word


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("name", nargs="?", default="*")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    checks = find_checks(arguments.name)
    old = PAGE.read_text() if PAGE.exists() else ""
    notes = old[old.index(NOTES) :] if NOTES in old else f"{NOTES}\n"
    rows = read_rows(old)
    with tempfile.TemporaryDirectory() as folder:
        runs = [Path(folder) / preset for preset in TRAINED]
        runs = [run for run in runs if any(speaks_of(run, check) for check in checks)]
        for run in runs:
            command(["train", *words(run.name), "--quiet", "--output", str(run)])
        for check in checks:
            found = [("random", *limited(arguments.seconds, verify, check))]
            for run in runs:
                if speaks_of(run, check):
                    found.append((run.name, *limited(arguments.seconds, on_trained, run, check)))
            rows[check.name] = [row_of(check.name, *one) for one in found if one[1] is not OTHER]
            print("\n".join(rows[check.name]), flush=True)
            write(arguments, rows, notes)


if __name__ == "__main__":
    main()
