"""The command `equipoise`: what can be written, and how mistakes are told."""

# Nothing that imports torch is imported before a command needs it: `equipoise --help` must not take
# a second.
from __future__ import annotations

import argparse
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from equipoise import __version__
from equipoise.command import (
    BAD_INPUT,
    DEMO,
    DIVERGED,
    DONE,
    KINDS,
    run_config,
    run_demo,
    run_evaluate,
    run_list,
    run_predict,
    run_report,
    run_resume,
    run_sweep,
    run_train,
)

__all__ = ["main"]

BUG, INTERRUPTED, PIPE = 1, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 done, 2 bad input, 3 numerics failed, 130 interrupted, 1 an error of ours.

    Args:
        argv: What stands behind `equipoise` on the command line; by default what the process was
            started with.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            try:
                code = _run(words)
            except SystemExit as end:  # --help and --version end so
                code = end.code if isinstance(end.code, int) else DONE
            sys.stdout.flush()
            return code
        except BrokenPipeError:
            _close_stdout()
            return PIPE
        except (KeyboardInterrupt, Exception) as error:
            if debug:
                traceback.print_exc()
            return _tell(error)


def _run(words: list[str]) -> int:
    parser = _make_parser()
    command = next((word for word in words if not word.startswith("-")), None)
    if command is not None and command not in COMMANDS:
        from equipoise.core import choose

        choose("command", command, COMMANDS)
    arguments, rest = parser.parse_known_args(words)
    if not hasattr(arguments, "run"):
        parser.print_help()
        return BAD_INPUT
    # argparse gives up on a list of words once an option stood between them.
    many = next((name for name in ("settings", "files") if hasattr(arguments, name)), None)
    if any(word.startswith("-") for word in rest) or (rest and many is None):
        raise ValueError(
            f"{command}: there is no such option: {' '.join(rest)}; see equipoise {command} --help"
        )
    if many is not None:
        getattr(arguments, many).extend(rest)
    code: int = arguments.run(arguments)
    return code


def _tell(error: BaseException) -> int:
    """Say in one line on stderr what went wrong, and return the exit code."""
    if isinstance(error, KeyboardInterrupt):
        _say("", str(error) or "interrupted")
        return INTERRUPTED
    if isinstance(error, OSError) and error.strerror and error.filename:
        _say("error: ", f"{error.filename}: {error.strerror}")
        return BAD_INPUT
    if isinstance(error, ValueError | OSError | ImportError):  # an extra that is not installed
        _say("error: ", str(error))
        return BAD_INPUT
    from equipoise.core import ConvergenceError

    if isinstance(error, ConvergenceError):
        _say("error: ", str(error))
        return DIVERGED
    if isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and "memory" in str(error)
    ):
        _say(
            "error: ",
            "there is not enough memory: lower train.batch or train.evaluate_batch "
            f"({str(error).partition(chr(10))[0]})",
        )
        return BAD_INPUT
    if isinstance(error, RuntimeError) and os.environ.get("WORLD_SIZE", "1") != "1":
        reason = str(error).partition("\n")[0]
        _say(
            "error: ",
            "another process was lost, or cannot be reached: torchrun --max-restarts 3 would "
            f"have gone on ({reason})",
        )
        return BUG
    _say(
        "error: ",
        f"{type(error).__name__}: {error}. This is a bug; run again with --debug to see where.",
    )
    return BUG


def _say(kind: str, text: str) -> None:
    line = " ".join(text.split())
    print(
        "equipoise: "
        f"{kind}{''.join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in line)}",
        file=sys.stderr,
    )


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    if category.__module__.startswith("equipoise."):
        _say("warning: ", str(message))
    else:
        (file or sys.stderr).write(
            warnings.formatwarning(message, category, filename, lineno, line)
        )


def _close_stdout() -> None:
    """Let nothing more be written to a pipe that nobody reads, not even when Python ends."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        return


class _Parser(argparse.ArgumentParser):
    """A parser that raises, so that all mistakes are told in one way."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], int], str, str]] = {
    "demo": (
        run_demo,
        "Train a small network on bundled digits and show what came out, in half a minute.",
        "equipoise demo",
    ),
    "train": (
        run_train,
        "Train as a recipe says and keep the run in a folder.",
        "equipoise train cifar10 train.epochs=20 model.options.solver=anderson --output "
        "runs/first --download",
    ),
    "resume": (run_resume, "Go on with a run that was stopped.", "equipoise resume runs/first"),
    "evaluate": (
        run_evaluate,
        "Score the weights that a run kept.",
        "equipoise evaluate runs/first --split test",
    ),
    "predict": (
        run_predict,
        "Predict for files with the weights that a run kept.",
        "equipoise predict runs/first cat.png dog.png",
    ),
    "report": (
        run_report,
        "Write a page about a run, and print where it is.",
        "equipoise report runs/first",
    ),
    "sweep": (
        run_sweep,
        "Train with all combinations of some settings, and compare.",
        "equipoise sweep digits optimizer.learning_rate=1e-3,1e-2 train.seed=0,1,2 --output "
        "sweeps/rate --jobs 2",
    ),
    "config": (
        run_config,
        "Print all settings of a recipe, as TOML to start from.",
        "equipoise config mnist > mine.toml",
    ),
    "list": (run_list, "List what can be chosen by name.", "equipoise list models 'opteq-*'"),
}


def _make_parser() -> argparse.ArgumentParser:
    common = _Parser(add_help=False, allow_abbrev=False)
    common.add_argument(
        "--version",
        action="version",
        version=f"equipoise {__version__}",
        help="print the version and exit",
    )
    common.add_argument("--debug", action="store_true", help="show where an error came from")
    parser = _Parser(
        prog="equipoise",
        description="Equilibrium networks: layers whose output is the solution of z = f(z, x).",
        epilog="Begin with: equipoise demo",
        parents=[common],
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=_Parser)
    for name, (run, sentence, example) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=sentence,
            description=sentence,
            epilog=f"example:\n  {example}",
            parents=[common],
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run)
        _add_arguments(name, command.add_argument)
    return parser


def _add_arguments(name: str, add: Callable[..., Any]) -> None:
    """Give a command its arguments."""
    if name in ("train", "config", "sweep"):
        add(
            "source",
            metavar="RECIPE",
            help="a name (see: equipoise list recipes), a TOML file or a run's folder",
        )
        form, what = (
            ("KEY=V1,V2", "a setting with the values to try")
            if name == "sweep"
            else ("KEY=VALUE", "a setting to change")
        )
        add(
            "settings",
            nargs="*",
            metavar=form,
            help=f"{what}, such as train.epochs={'3,10' if name == 'sweep' else 3}",
        )
    if name in ("resume", "evaluate", "predict", "report"):
        add("folder", type=Path, metavar="DIR", help="the folder of the run")
    if name in ("demo", "train", "sweep"):
        default = {"demo": DEMO, "train": "runs/NAME-DATE-TIME"}.get(name)
        also = f" (default: {default})" if default else ""
        add(
            "--output",
            type=Path,
            metavar="DIR",
            required=name == "sweep",
            help=f"the folder to keep it in{also}",
        )
    if name in ("train", "evaluate"):
        add("--data-root", metavar="DIR", help="the folder with the data")
    if name == "train":
        add("--download", action="store_true", help="fetch data that are not there")
        add("--resume", action="store_true", help="go on if the folder holds this run already")
    if name in ("train", "resume"):
        add("--quiet", action="store_true", help="show no progress")
    if name == "demo":
        add("--seed", type=int, default=0, metavar="N", help="of all that is random (default: 0)")
    if name == "evaluate":
        add(
            "--split",
            choices=("train", "val", "test"),
            help="which part of the data (default: what the run was tested on)",
        )
    if name == "predict":
        add("files", nargs="+", type=Path, metavar="FILE", help="what to predict for")
        add("--out", type=Path, metavar="PATH", help="where to write the predictions")
    if name == "list":
        add("kind", metavar="KIND", help=", ".join(KINDS))
        add(
            "pattern",
            nargs="?",
            metavar="PATTERN",
            help="a part of the name, or a pattern such as 'opteq-*'",
        )
    if name in ("evaluate", "list"):
        add("--json", action="store_true", help="print JSON")
    if name == "report":
        add("--open", action="store_true", help="open it in a browser")
    if name == "sweep":
        add("--jobs", type=int, default=1, metavar="N", help="runs at a time (default: 1)")
        add("--ray", action="store_true", help="run them on a Ray cluster")
