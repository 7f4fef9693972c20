"""`equipoise certify`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from equipoise.cli.command import DONE, Command, add_run, count, print_json

if TYPE_CHECKING:
    from equipoise.layers import Certificate

__all__ = ["CERTIFY"]


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `certify` takes."""
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: Namespace) -> int:
    """Print what is proved of a run's equilibria; that nothing is proved is an answer too."""
    from equipoise.runs import certify_run

    found = certify_run(arguments.folder, trust=arguments.trust)
    if arguments.json:
        print_json({name: describe(certificate) for name, certificate in found.items()})
        return DONE
    for name, certificate in found.items():
        print("\n".join([name, *block(certificate)]))
    if not found:
        print("the model has no equilibria, so there is nothing to prove")
    return DONE


def block(certificate: Certificate) -> Iterator[str]:
    """Return the lines about one equilibrium: each statement, what it rests on, what would help."""
    from equipoise.layers.certificate import significant

    for statement in certificate.statements:
        verdict = {True: "proved", False: "refuted", None: "not proved"}[statement.holds]
        yield f"  {verdict}: {statement.claim}"
        if statement.number is not None:
            margin = "" if statement.margin is None else f", margin {statement.margin:.3g}"
            yield f"    number: {significant(statement.number, 6)}{margin}"
        if statement.theorem:
            yield f"    by: {statement.theorem}"
    proved = sum(statement.holds is True for statement in certificate.statements)
    if not proved:
        yield "  nothing is proved of this equilibrium at these weights"
    elif not certificate.holds:
        yield f"  {proved} of {count(len(certificate.statements), 'statement')} proved"
    if certificate.remedy and not certificate.holds:
        yield f"  remedy: {certificate.remedy}"


def describe(certificate: Certificate) -> dict[str, Any]:
    """Return the same as data."""
    from dataclasses import asdict

    return {
        "holds": certificate.holds,
        "lipschitz": certificate.lipschitz,
        "statements": [asdict(statement) for statement in certificate.statements],
        "factors": [factor._asdict() for factor in certificate.factors],
        "remedy": certificate.remedy,
    }


CERTIFY = Command(
    "Say what is proved of a run's equilibria, at the weights that it kept.",
    "equipoise certify runs/first",
    add_arguments,
    run,
)
