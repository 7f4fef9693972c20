"""`equipoise certify`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.cli.command import (
    DONE,
    FAILED,
    Command,
    add_download,
    add_root,
    add_trust,
    count,
    print_json,
)
from equipoise.core import to_percent

if TYPE_CHECKING:
    from equipoise.layers import Certificate, Statement
    from equipoise.runs import CertifiedRun

__all__ = ["CERTIFY"]

WORDS = {"holds": "proved", "fails": "refuted", "unknown": "not proved"}


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `certify` takes."""
    parser.add_argument(
        "source", metavar="RUN|MODEL", help="the folder of a run, a preset, or a model's name"
    )
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="KEY=VALUE",
        help="a setting of a preset to change, such as model.options.margin=20",
    )
    add_root(parser)
    add_download(parser)
    parser.add_argument(
        "--radii",
        type=float,
        nargs="+",
        default=[],
        metavar="R",
        help="lengths at which to state how many samples are certified, in the units of images in "
        "[0, 1] or of a table's columns",
    )
    parser.add_argument(
        "--samples", type=int, metavar="N", help="certify the first N samples (default: all)"
    )
    parser.add_argument(
        "--split",
        choices=("train", "val", "test"),
        help="which split of the data (default: the one that the run was tested on)",
    )
    parser.add_argument(
        "--attack", type=int, default=0, metavar="N", help="try to break N of the certificates"
    )
    parser.add_argument(
        "--attack-steps", type=int, default=100, metavar="K", help="steps of each (default: 100)"
    )
    parser.add_argument(
        "--attack-restarts", type=int, default=5, metavar="K", help="starts of each (default: 5)"
    )
    add_trust(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: Namespace) -> int:
    """Print what is proved of a network; that nothing is proved is an answer too."""
    from equipoise.analysis import AttackSettings
    from equipoise.core import require_whole
    from equipoise.engine import make_progress
    from equipoise.runs import certify_run
    from equipoise.runs.run_report import write_certificate

    require_whole("--attack", arguments.attack)
    folder = Path(arguments.source)
    with make_progress() as progress:
        found = certify_run(
            arguments.source,
            arguments.settings,
            radii=arguments.radii,
            attack=arguments.attack,
            attack_settings=AttackSettings(arguments.attack_steps, arguments.attack_restarts),
            samples=arguments.samples,
            split=arguments.split,
            root=arguments.data_root,
            download=arguments.download,
            trust=arguments.trust,
            on_batch=progress.evaluate,
        )
    kept = write_certificate(folder, found)
    if arguments.json:
        print_json(found.to_dict())
    else:
        print("\n".join(page(found)))
        if kept and (arguments.radii or arguments.attack):
            print(f"the page of the run shows this after: equipoise report {folder}")
    return FAILED if found.attack is not None and found.attack.broken else DONE


def page(found: CertifiedRun) -> Iterator[str]:
    """Return all lines about a network."""
    from equipoise.layers.certificate import significant

    for name, certificate in found.equilibria.items():
        yield name
        yield from block(certificate)
    yield "network"
    bound = found.bound
    if bound.unknown:
        yield "  Lipschitz constant: unknown"
    else:
        yield f"  Lipschitz constant: at most {significant(bound.value, 6, up=True)}"
    width = max((len(part.name) for part in bound.parts), default=0)
    for part in bound.parts:
        known = part not in bound.unknown
        value = significant(part.value, 6, up=True) if known else "unknown"
        yield f"    {part.name:{width}}  {value:>10}  {part.theorem}".rstrip()
    if bound.pairs is not None:
        differences = bound.pairs[bound.pairs > 0]
        low, high = (
            significant(float(one), 6, up=True) for one in (differences.min(), differences.max())
        )
        yield f"  differences of two outputs: between {low} and {high}"
    yield from accuracy_lines(found)
    yield from attack_lines(found)


def block(certificate: Certificate) -> Iterator[str]:
    """Return the lines about one equilibrium: each statement, what it rests on, what would help."""
    yield from statement_lines(certificate.statements)
    proved = sum(statement.holds is True for statement in certificate.statements)
    if not proved:
        yield "  nothing is proved of this equilibrium at these weights"
    elif not certificate.holds:
        yield f"  {proved} of {count(len(certificate.statements), 'statement')} proved"
    if certificate.remedy and not certificate.holds:
        yield f"  remedy: {certificate.remedy}"


def statement_lines(statements: Sequence[Statement]) -> Iterator[str]:
    """Return the lines of some statements."""
    from equipoise.layers.certificate import significant

    for statement in statements:
        yield f"  {WORDS[statement.verdict]}: {statement.claim}"
        if statement.number is not None:
            margin = "" if statement.margin is None else f", margin {statement.margin:.3g}"
            yield f"    number: {significant(statement.number, 6)}{margin}"
        if statement.theorem:
            yield f"    by: {statement.theorem}"


def accuracy_lines(found: CertifiedRun) -> Iterator[str]:
    """Return the lines about certified radii."""
    from equipoise.layers.certificate import significant
    from equipoise.runs.certificate import write_length

    radii = found.radii
    if radii is None:
        return
    yield f"certified radii of {count(radii.samples, f'{radii.split} sample')}"
    yield f"  accuracy with exact equilibria {to_percent(radii.accuracy, 2)} %"
    median = significant(radii.median, 4, down=True)
    error = significant(radii.error, 2, up=True)
    yield f"  median radius {median}; {radii.unproved:,} have none"
    yield f"  margins are lowered by at most {error} for inexact solves and rounding"
    if radii.certified:
        yield "  radius  certified accuracy  by the 2L rule alone"
    for length, part in radii.certified.items():
        alone = to_percent(radii.by_norm[length], 2)
        yield f"  {write_length(length):<6}  {to_percent(part, 2):>16} %  {alone:>18} %"


def attack_lines(found: CertifiedRun) -> Iterator[str]:
    """Return the lines about an attack."""
    attack = found.attack
    if attack is None:
        return
    yield (
        f"attack on {count(attack.samples, 'certified radius').replace('radiuss', 'radii')}: "
        f"{attack.settings.steps} steps from {attack.settings.restarts} starts"
    )
    yield f"  {attack.broken:,} certificates broken" + (
        ": A PROOF IS WRONG, please report it" if attack.broken else ""
    )
    for factor, part in attack.changed.items():
        if factor > 1:
            yield f"  within {factor:g} times the radius {to_percent(part, 1)} % change"
    if attack.half is None:
        yield f"  not half of them change within {max(attack.changed):g} times the radius"
    else:
        yield f"  half of them change within {attack.half:g} times the radius"


CERTIFY = Command(
    "Say what is proved of a run's or a model's equilibria, outputs and classes.",
    "equipoise certify runs/first --radii 0.1 0.2 --attack 100",
    add_arguments,
    run,
    many="settings",
)
