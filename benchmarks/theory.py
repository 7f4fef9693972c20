"""Writes docs/results/theory.md: every check on random and on trained networks, with margins.

Run: python benchmarks/theory.py [--date YYYY-MM-DD] [--seconds 60]

Small networks are trained on data bundled with scikit-learn in a temporary folder. No check may
take more processor time than `--seconds`: one that would is ended, and the page says so. The page
is written anew after each check, so that nothing is lost if this is ended.
"""

from __future__ import annotations

import argparse
import datetime
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from equipoise.analysis import find_checks, verify
from equipoise.analysis.check import Verdict
from equipoise.cli import main as command
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
python benchmarks/theory.py
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
KERNEL = "\n## The tangent kernel by closed forms"
"""Where the numbers of benchmarks/kernel.py begin, which are kept."""


class OutOfTimeError(BaseException):
    """No error of a check, so that nothing but `limited` stops it."""


@dataclass(frozen=True)
class Row:
    """What a check found on a network; no verdict if it was ended."""

    network: str
    verdict: Verdict | None
    seconds: float

    @property
    def outcome(self):
        return "took too long" if self.verdict is None else self.verdict.outcome

    def text(self, name):
        one = None if self.verdict is None else self.verdict.deciding
        cells = ["", "", ""]
        if one is not None:
            sides = f"{one.value:.4g} {one.relation} {one.bound:.4g}"
            cells = [one.claim.replace("|", "\\|"), sides, f"{one.margin:.2g}"]
        cells = [f"`{name}`", self.network, self.outcome, *cells, f"{self.seconds:.1f}"]
        return "| " + " | ".join(cells) + " |"


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
    except ValueError:
        return OTHER


def speaks_of(run, check):
    """Whether a check is about the family of a run; the names of checks begin with it."""
    family = {"digits": "opteq", "breast-cancer": "opteq"}.get(run.name, run.name)
    return check.name.startswith(family.removesuffix("-digits") + "-")


def write(arguments, rows, rest):
    """Write the page with what is known so far."""
    lines = [f"equipoise train {' '.join(map(quoted, words(one)))}" for one in TRAINED]
    text = HEAD.format(
        date=arguments.date,
        samples=SAMPLES,
        commands="\n".join(f"{line} \\\n    --output runs/{line.split()[2]}" for line in lines),
        seconds=arguments.seconds,
    )
    outcomes = ("holds", "does not apply", "fails", "unknown", "took too long")
    text += f"| network | {' | '.join(outcomes)} |\n|---|{'---:|' * len(outcomes)}\n"
    everything = [row for some in rows.values() for row in some]
    for network in ("random", *TRAINED):
        count = Counter(row.outcome for row in everything if row.network == network)
        text += f"| {network} | {' | '.join(str(count[one]) for one in outcomes)} |\n"
    paper = ""
    for check in find_checks():
        if check.paper != paper:
            paper = check.paper
            text += f"\n## {paper}\n\n"
            text += "| check | network | outcome | inequality | measured | margin | seconds |\n"
            text += "|---|---|---|---|---|---:|---:|\n"
        text += "".join(f"{row.text(check.name)}\n" for row in rows.get(check.name, ()))
    PAGE.write_text(text + rest)


def quoted(word):
    return f"'{word}'" if " " in word or "[" in word else word


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    old = PAGE.read_text() if PAGE.exists() else ""
    rest = old[old.index(KERNEL) :] if KERNEL in old else ""
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        runs = [Path(folder) / preset for preset in TRAINED]
        for run in runs:
            command(["train", *words(run.name), "--quiet", "--output", str(run)])
        for check in find_checks():
            found = [Row("random", *limited(arguments.seconds, verify, check))]
            found += [
                Row(run.name, *limited(arguments.seconds, on_trained, run, check))
                for run in runs
                if speaks_of(run, check)
            ]
            rows[check.name] = found = [row for row in found if row.verdict is not OTHER]
            for row in found:
                print(f"{check.name} {row.network}: {row.outcome}, {row.seconds:.1f} s", flush=True)
            write(arguments, rows, rest)


if __name__ == "__main__":
    main()
