"""`equipoise look`."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from typing import TYPE_CHECKING

from equipoise.cli.command import (
    DONE,
    Command,
    add_output,
    add_quiet,
    add_root,
    add_trust,
    print_json,
)
from equipoise.core import Interrupted
from equipoise.core.printable import printable_name

if TYPE_CHECKING:
    from equipoise.runs.look_solves import SolveSettings

__all__ = ["LOOK"]

LANDSCAPE = "Draw the loss over a line or a plane of weights around those of a network."
TRAJECTORY = "Draw the iterates of solves in the plane of their principal components."
SPECTRUM = "Draw the eigenvalues of the step's Jacobian at equilibria."
KERNEL = "Draw the eigenvalues of the tangent kernel of a network."


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `look` takes: a kind of figure, and what belongs to it."""
    kinds = parser.add_subparsers(
        title="figures", metavar="FIGURE", dest="figure", required=True, parser_class=type(parser)
    )
    for name, sentence, example, add in (
        ("landscape", LANDSCAPE, "equipoise look landscape runs/first", _add_landscape),
        ("trajectory", TRAJECTORY, "equipoise look trajectory runs/first --epochs all", _add_solve),
        ("spectrum", SPECTRUM, "equipoise look spectrum runs/first --samples 16", _add_spectrum),
        ("kernel", KERNEL, "equipoise look kernel runs/first --epochs all", _add_kernel),
    ):
        inner = kinds.add_parser(
            name,
            help=sentence,
            description=sentence,
            epilog=f"example:\n  {example}",
            allow_abbrev=False,
            formatter_class=RawDescriptionHelpFormatter,
        )
        inner.add_argument(
            "sources",
            nargs="+",
            metavar="RUN",
            help="folders of runs, in panels beside each other; or a preset or a TOML file, whose "
            "network is not trained, with settings KEY=V1,V2 that make a panel for each value",
        )
        add_output(inner, "RUN/look")
        add_root(inner)
        add_trust(inner)
        add_quiet(inner)
        inner.add_argument("--json", action="store_true", help="print JSON")
        inner.add_argument("--debug", action="store_true", help="show where an error came from")
        add(inner)


def _add_samples(parser: ArgumentParser, count: int, split: str) -> None:
    parser.add_argument(
        "--samples",
        type=int,
        default=count,
        metavar="N",
        help=f"samples, evenly spread over the split (default: {count})",
    )
    parser.add_argument(
        "--split",
        choices=("train", "val", "test"),
        default=split or None,
        help=f"of which split (default: {split or 'the one that the run was tested on'})",
    )


def _add_landscape(parser: ArgumentParser) -> None:
    _add_samples(parser, 256, "train")
    parser.add_argument(
        "--directions",
        choices=("random", "path"),
        default="random",
        help="random ones, scaled like the weights (default), or those of the training path",
    )
    parser.add_argument("--line", action="store_true", help="one direction, not a plane")
    parser.add_argument(
        "--points", type=int, default=51, metavar="N", help="points along an axis (default: 51)"
    )
    parser.add_argument(
        "--range",
        type=float,
        nargs=2,
        metavar=("LOW", "HIGH"),
        help="steps along each axis (default: -1 1, or around the path)",
    )
    parser.add_argument(
        "--normalize",
        choices=("filter", "layer", "none"),
        default="filter",
        help="what of a random direction is as long as its weights (default: each filter)",
    )
    parser.add_argument(
        "--vectors", action="store_true", help="let biases and scales of normalisations change too"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the random directions (default: 0)"
    )
    parser.add_argument(
        "--view", choices=("contour", "surface"), help="how to draw a plane (default: both)"
    )
    parser.add_argument(
        "--level",
        type=float,
        metavar="LOSS",
        help="the loss up to which the basin is measured (default: twice that at the weights)",
    )
    parser.add_argument(
        "--eigenvalues",
        type=int,
        default=0,
        metavar="N",
        help="also find the N largest eigenvalues of the Hessian",
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=_cores(),
        metavar="N",
        help="processes that share the points (default: one for each core)",
    )


def _add_epochs(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--epochs",
        metavar="N,N",
        help="look at the weights after these epochs, such as 0,1,10, or after some of all: all; "
        "a run keeps them if it is trained with train.weights_every=1",
    )


def _add_panels(parser: ArgumentParser, samples: int) -> None:
    _add_samples(parser, samples, "")
    _add_epochs(parser)
    parser.add_argument(
        "--steps", type=int, metavar="N", help="steps at most (default: as in the run)"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="T",
        help="relative residual at which a solve ends (default: as in the run)",
    )
    parser.add_argument(
        "--layer", metavar="NAME", help="which equilibrium of the model (default: the first)"
    )
    parser.add_argument(
        "--solvers",
        metavar="NAME,NAME",
        help="solvers to compare, such as fixed_point,anderson (default: the run's own)",
    )


def _add_solve(parser: ArgumentParser) -> None:
    _add_panels(parser, 64)
    parser.add_argument(
        "--components",
        choices=("iterates", "ends"),
        default="iterates",
        help="whose principal components: of all iterates (default), or of where solves end",
    )


def _add_spectrum(parser: ArgumentParser) -> None:
    _add_panels(parser, 8)
    parser.add_argument(
        "--products",
        type=int,
        default=60,
        metavar="N",
        help="products with the Jacobian of states of more than 512 numbers (default: 60)",
    )


def _add_kernel(parser: ArgumentParser) -> None:
    _add_samples(parser, 32, "train")
    _add_epochs(parser)


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(arguments: Namespace) -> int:
    """Draw a figure, and print where it is and what was found."""
    from equipoise.engine import make_progress
    from equipoise.runs.look import find_folder
    from equipoise.runs.network import Source

    sources = Source.parse(arguments.sources, root=arguments.data_root, trust=arguments.trust)
    folder = find_folder(sources, arguments.output)
    if arguments.figure == "landscape":
        from equipoise.runs.landscape import LandscapeSettings
        from equipoise.runs.look_landscape import look_landscape

        settings = LandscapeSettings(
            directions=arguments.directions,
            dimensions=1 if arguments.line else 2,
            points=arguments.points,
            reach=tuple(arguments.range) if arguments.range else None,
            samples=arguments.samples,
            split=arguments.split,
            normalize=arguments.normalize,
            vectors=arguments.vectors,
            seed=arguments.seed,
        )
        try:
            with make_progress(quiet=arguments.quiet) as progress:
                found = look_landscape(
                    sources,
                    settings,
                    folder,
                    view=arguments.view,
                    level=arguments.level,
                    eigenvalues=arguments.eigenvalues,
                    processes=arguments.processes,
                    on_progress=progress.count,
                )
        except KeyboardInterrupt as error:
            reason = "interrupted; the points that are done are kept: repeat the command"
            raise Interrupted.after(error, reason) from error
    elif arguments.figure == "trajectory":
        from equipoise.runs.look_solves import look_trajectory

        found = look_trajectory(sources, _solve_settings(arguments), folder)
    elif arguments.figure == "kernel":
        from equipoise.runs.look_kernel import look_kernel
        from equipoise.runs.look_solves import SolveSettings

        asked = SolveSettings(
            samples=arguments.samples,
            split=arguments.split,
            epochs=_parse_epochs(arguments.epochs),
        )
        found = look_kernel(sources, asked, folder)
    else:
        from equipoise.runs.look_solves import look_spectrum

        products = arguments.products
        found = look_spectrum(sources, _solve_settings(arguments), folder, products=products)
    if arguments.json:
        print_json({"figures": [str(path) for path in found.files], **found.values})
        return DONE
    for line in [*found.lines, *(printable_name(path) for path in found.files)]:
        print(line)
    return DONE


def _solve_settings(arguments: Namespace) -> SolveSettings:
    from equipoise.runs.look_solves import SolveSettings

    return SolveSettings(
        samples=arguments.samples,
        split=arguments.split,
        epochs=_parse_epochs(arguments.epochs),
        solvers=tuple(arguments.solvers.split(",")) if arguments.solvers else (),
        steps=arguments.steps,
        tolerance=arguments.tolerance,
        layer=arguments.layer,
        components=getattr(arguments, "components", "iterates"),
    )


def _parse_epochs(text: str | None) -> list[int] | None:
    if text is None:
        return None
    words = [] if text == "all" else text.split(",")
    if not all(word.isdecimal() for word in words):
        raise ValueError(f"--epochs must be 'all' or whole numbers such as 0,1,10; got {text!r}.")
    return [int(word) for word in words]


LOOK = Command(
    "Draw a figure of a network: its loss landscape, its solves, its spectra.",
    "equipoise look landscape runs/first",
    add_arguments,
    run,
    many="sources",
)
