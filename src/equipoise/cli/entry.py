"""From the words behind `equipoise` to the command they name, and its exit code."""

# Nothing that imports torch is imported before a command runs: `equipoise --help` must not take a
# second.
from __future__ import annotations

import argparse
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import NoReturn, TextIO, cast

from equipoise import __version__
from equipoise.cli.certify import CERTIFY
from equipoise.cli.command import BAD_INPUT, DONE, Command
from equipoise.cli.config import CONFIG
from equipoise.cli.demo import DEMO
from equipoise.cli.evaluate import EVALUATE
from equipoise.cli.failure import say_warning, show_warnings_by, tell
from equipoise.cli.list import LIST
from equipoise.cli.look import LOOK
from equipoise.cli.predict import PREDICT
from equipoise.cli.report import REPORT
from equipoise.cli.resume import RESUME
from equipoise.cli.sweep import SWEEP
from equipoise.cli.train import TRAIN
from equipoise.cli.verify import VERIFY
from equipoise.core import RepeatedNotes, choose, interruptible
from equipoise.core.printable import PrintableStream

__all__ = ["COMMANDS", "main", "make_parser"]

PIPE = 141  # the exit code when nobody reads what is printed

COMMANDS: dict[str, Command] = {
    "demo": DEMO,
    "train": TRAIN,
    "resume": RESUME,
    "evaluate": EVALUATE,
    "predict": PREDICT,
    "certify": CERTIFY,
    "verify": VERIFY,
    "look": LOOK,
    "report": REPORT,
    "sweep": SWEEP,
    "config": CONFIG,
    "list": LIST,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    The codes are 0 for success, 2 for bad input, 3 for numerics that failed, 4 for a statement that
    failed its check, 130 and 143 for an interruption by SIGINT (Ctrl-C) and by SIGTERM, 141 for a
    closed pipe and 1 for an error of ours.

    Args:
        argv: The words behind `equipoise` on the command line; by default those of this process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    with warnings.catch_warnings(), RepeatedNotes(say_warning) as notes:
        warnings.showwarning = show_warnings_by(notes)
        try:
            try:
                with interruptible(), redirect_stdout(_printable_stdout(words)):
                    code = _run(words)
            except SystemExit as end:  # --help and --version end so
                code = end.code if isinstance(end.code, int) else DONE
            sys.stdout.flush()
            return code
        except BrokenPipeError:
            _close_stdout()
            return PIPE
        except (KeyboardInterrupt, Exception) as error:
            if "--debug" in words:
                traceback.print_exc()
            return tell(error)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
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
        epilog="Start with: equipoise demo",
        parents=[common],
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", dest="command", parser_class=_Parser
    )
    for name, command in COMMANDS.items():
        inner = commands.add_parser(
            name,
            help=command.sentence,
            description=command.sentence,
            epilog=f"example:\n  {command.example}",
            parents=[common],
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(inner)
    return parser


def _run(words: list[str]) -> int:
    parser = make_parser()
    name = next((word for word in words if not word.startswith("-")), None)
    if name is not None:
        choose("command", name, COMMANDS)
    arguments, rest = parser.parse_known_args(words)
    if name is None:
        parser.print_help()
        return BAD_INPUT
    command = COMMANDS[name]
    # argparse stops collecting words into a list once an option stood between them.
    if any(word.startswith("-") for word in rest) or (rest and not command.many):
        raise ValueError(
            f"{name}: there is no such option: {' '.join(rest)}; see equipoise {name} --help"
        )
    if rest:
        getattr(arguments, command.many).extend(rest)
    return command.run(arguments)


def _printable_stdout(words: Sequence[str]) -> TextIO:
    """Stdout without control characters; predictions in a file or a pipe stay as they are."""
    if "predict" in words[:2] and not sys.stdout.isatty():
        return sys.stdout
    return cast(TextIO, PrintableStream(sys.stdout))


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
