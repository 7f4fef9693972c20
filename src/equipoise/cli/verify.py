"""`equipoise verify`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.cli.command import DONE, FAILED, Command, add_root, add_trust, count, print_json

if TYPE_CHECKING:
    from equipoise.analysis.check import Check, Inequality, Outcome, Verdict

__all__ = ["VERIFY"]

PLURALS: dict[Outcome, str] = {
    "holds": "hold",
    "does not apply": "do not apply",
    "unknown": "unknown",
    "fails": "failed",
}
MARKS = {True: "holds", False: "false", None: "unknown"}


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `verify` takes."""
    parser.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="a check, or a pattern such as 'opteq-*' (default: all)",
    )
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        metavar="RUN",
        help="the folder of a run whose network and data to check "
        "(default: a random network that each check makes)",
    )
    parser.add_argument("--list", action="store_true", help="list the checks and what they state")
    parser.add_argument("--seed", type=int, default=0, help="of random networks (default: 0)")
    parser.add_argument(
        "--samples", type=int, default=32, help="how many samples of a run to use (default: 32)"
    )
    add_root(parser)
    add_trust(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: Namespace) -> int:
    """Check the papers' statements, and return whether one failed."""
    from equipoise.analysis.check import find_checks, list_checks, verify
    from equipoise.core import require_count
    from equipoise.runs import verify_run

    name, folder = arguments.name, arguments.folder
    if name is not None and folder is None and name not in list_checks() and Path(name).is_dir():
        name, folder = "*", Path(name)  # a run alone
    checks = find_checks("*" if name is None else name)
    if arguments.list:
        return _list(checks, as_json=arguments.json)
    require_count("verify.samples", arguments.samples)
    one = len(checks) == 1
    width = max(len(check.name) for check in checks)

    def show(verdict: Verdict) -> None:
        if not arguments.json:
            print("\n".join(block(verdict)) if one else line(verdict, width), flush=True)

    if folder is None:
        found = []
        for check in checks:
            found.append(verify(check, seed=arguments.seed))
            show(found[-1])
    else:
        found = verify_run(
            folder,
            checks,
            samples=arguments.samples,
            root=arguments.data_root,
            trust=arguments.trust,
            on_check=show,
        )
    if arguments.json:
        print_json({verdict.check.name: describe(verdict) for verdict in found})
    elif not one:
        print(summary(found))
    return FAILED if any(verdict.outcome == "fails" for verdict in found) else DONE


def _list(checks: Sequence[Check], *, as_json: bool) -> int:
    if as_json:
        print_json({check.name: _about(check) for check in checks})
        return DONE
    paper = ""
    for check in checks:
        if check.paper != paper:
            print(f"{'' if not paper else chr(10)}{check.paper}")
            paper = check.paper
        print(f"  {check.name}\n    {check.number}: {check.statement}")
    return DONE


def line(verdict: Verdict, width: int) -> str:
    """Return a verdict in one line: the outcome, and what it rests on."""
    deciding = "" if verdict.deciding is None else f"  {verdict.deciding}"
    return f"{verdict.check.name:{width}}  {verdict.outcome:14}{deciding}".rstrip()


def block(verdict: Verdict) -> Iterator[str]:
    """Return the lines about one check: the statement, the network, and all that was measured."""
    check, finding = verdict.check, verdict.finding
    yield f"{check.name}: {verdict.outcome}"
    yield f"  {check.paper}, {check.number}: {check.statement}"
    yield f"  network: {verdict.case}"
    for title, some in (("hypotheses", finding.hypotheses), ("conclusion", finding.conclusions)):
        if some:
            yield f"  {title}"
        for each in some:
            yield f"    {MARKS[each.holds]:8}{each}"
    if finding.note:
        yield f"  note: {finding.note}"


def summary(found: Sequence[Verdict]) -> str:
    """Return how many checks ended how, in one line."""
    counts = Counter(verdict.outcome for verdict in found)
    parts = [f"{counts[outcome]} {word}" for outcome, word in PLURALS.items() if counts[outcome]]
    return f"{count(len(found), 'check')}: {', '.join(parts)}"


def describe(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as data."""
    finding = verdict.finding
    return {
        **_about(verdict.check),
        "network": verdict.case,
        "outcome": verdict.outcome,
        "hypotheses": [_values(one) for one in finding.hypotheses],
        "conclusions": [_values(one) for one in finding.conclusions],
        "note": finding.note,
    }


def _values(one: Inequality) -> dict[str, Any]:
    return {
        "claim": one.claim,
        "value": one.value,
        "relation": one.relation,
        "bound": one.bound,
        "margin": one.margin,
        "holds": one.holds,
    }


def _about(check: Check) -> dict[str, Any]:
    return {"statement": check.statement, "paper": check.paper, "number": check.number}


VERIFY = Command(
    "Check the papers' theorems on a network: hypotheses, conclusions, margins.",
    "equipoise verify relu-implicit-lemma-2.2",
    add_arguments,
    run,
)
