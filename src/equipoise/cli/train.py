"""`equipoise train`."""

from __future__ import annotations

import os
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.cli.command import (
    DONE,
    Command,
    add_config,
    add_download,
    add_output,
    add_quiet,
    add_root,
    add_trust,
    count,
)
from equipoise.core import Interrupted, SourceError
from equipoise.core.printable import printable_name

if TYPE_CHECKING:
    from equipoise.engine import Summary

__all__ = ["TRAIN", "train_and_tell"]


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `train` takes."""
    add_config(parser)
    add_output(parser, "runs/NAME-DATE-TIME")
    add_root(parser)
    add_download(parser)
    parser.add_argument(
        "--resume", action="store_true", help="continue if the folder already holds this run"
    )
    parser.add_argument(
        "--from-weights",
        action="store_true",
        help="start from the weights of CONFIG, the folder of a run; a head for other classes is "
        "new",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="build everything, make one step, say what it costs, and write nothing",
    )
    add_trust(parser)
    add_quiet(parser)


def run(arguments: Namespace) -> int:
    """Train as a config says."""
    from dataclasses import replace
    from datetime import datetime

    from equipoise.runs import load_config, train_run

    config = load_config(arguments.source, arguments.settings, trust=arguments.trust)
    data = replace(config.data, download=config.data.download or arguments.download)
    if arguments.data_root is not None:
        data = replace(data, root=arguments.data_root)
    folder: Path | None = arguments.output
    if folder is None:
        if "RANK" in os.environ:
            raise ValueError("--output must be given when several processes train together.")
        folder = Path("runs", f"{Path(arguments.source).stem}-{datetime.now():%Y%m%d-%H%M%S}")
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0")
    resume, quiet = arguments.resume or restarted, arguments.quiet
    config = replace(config, data=data)
    if arguments.from_weights:
        from equipoise.runs.initial_weights import start_from

        given = tuple(
            setting.partition("=")[0].removeprefix("model.options.")
            for setting in arguments.settings
        )
        config = start_from(config, Path(arguments.source), given)
    if arguments.dry_run:
        from equipoise.runs.dry_run import dry_run

        try:
            cost = dry_run(config, arguments.output, trust=arguments.trust)
        except SourceError:
            raise  # it says itself which file or folder is wrong
        except ValueError as error:
            raise SourceError(arguments.source, error) from error
        if os.environ.get("RANK", "0") == "0":
            print(cost)
        return DONE
    return train_and_tell(
        folder,
        arguments.source,
        lambda: train_run(config, folder, resume=resume, trust=arguments.trust, quiet=quiet),
    )


def train_and_tell(folder: Path, source: str | Path, train: Callable[[], Summary]) -> int:
    """Train, print the results and return the exit code.

    Args:
        folder: The folder of the run.
        source: Where its config comes from.
        train: Trains and returns a summary.
    """
    from equipoise.data import BadSampleError
    from equipoise.engine import find_metric

    try:
        summary = train()
    except BadSampleError as error:
        skip = "data.on_bad_sample=skip"
        remedy = (
            f"Resume without such samples: equipoise resume {shlex.quote(str(folder))} {skip}"
            if (folder / "config.toml").exists()
            else f"Train without such samples by {skip}"
        )
        raise SourceError(error.source, f"{error.reason}. {remedy}") from error
    except SourceError:
        raise  # it says itself which file or folder is wrong
    except ValueError as error:
        raise SourceError(source, error) from error
    except KeyboardInterrupt as error:
        kept = any((folder / "checkpoints").glob("*.safetensors"))
        remedy = (
            f"resume with: equipoise resume {shlex.quote(str(folder))}"
            if kept
            else "there is no checkpoint yet"
        )
        raise Interrupted.after(error, f"interrupted; {remedy}") from error
    if os.environ.get("RANK", "0") != "0":
        return DONE
    early = (
        " early, because the held-out score stopped improving,"
        if summary.stopped == "early"
        else ""
    )
    print(
        f"finished{early} after {count(summary.epochs, 'epoch')}, "
        f"{count(summary.steps, 'step')} and {summary.seconds:.1f} s"
    )
    if summary.kept_epoch != summary.epochs:
        print(
            f"the weights of epoch {summary.kept_epoch} were kept, the best on held-out samples; "
            "scores are theirs"
        )
    if summary.skipped:
        print(
            f"{count(summary.skipped, 'step')} skipped, because a solve failed or something was "
            "not finite"
        )
    if summary.bad_samples:
        who = "it" if summary.bad_samples == 1 else "they"
        print(
            f"{count(summary.bad_samples, 'sample')} skipped, because {who} could not be read: "
            f"{printable_name(folder / 'bad_samples.jsonl')}"
        )
    for split, scores in (("validation", summary.validation), ("test", summary.test)):
        if scores:
            if scores.get("missed"):
                print(
                    f"{scores['missed']:,} of {scores['samples']:,} {split} samples did not "
                    "reach the solver's tolerance"
                )
            score = find_metric(summary.metric).describe(scores[summary.metric])
            print(f"{split} {score}")
    if (folder / "report.html").exists():
        print(f"report: {printable_name(folder / 'report.html')}")
    return DONE


TRAIN = Command(
    "Train a model as a config says, and keep the run in a folder.",
    "equipoise train cifar10 train.epochs=20 model.options.solver=anderson --output "
    "runs/first --download",
    add_arguments,
    run,
    many="settings",
)
