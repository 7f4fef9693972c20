"""What the commands do."""

# Nothing that imports torch is imported before a command needs it: `equipoise --help` must not take
# a second.
from __future__ import annotations

import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from equipoise.core import Registry
    from equipoise.engine import Summary

__all__ = [
    "DEMO",
    "DIVERGED",
    "DONE",
    "KINDS",
    "run_config",
    "run_demo",
    "run_evaluate",
    "run_list",
    "run_predict",
    "run_report",
    "run_resume",
    "run_sweep",
    "run_train",
]

DONE, BAD_INPUT, DIVERGED = 0, 2, 3  # exit codes
KINDS = ("models", "data", "solvers", "gradients", "activations", "regularizers", "recipes")
DEMO = "equipoise-demo"


def run_train(arguments: Namespace) -> int:
    """Train as a recipe says."""
    from dataclasses import replace
    from datetime import datetime

    from equipoise.runs import load_config, train_run

    config = load_config(arguments.source, arguments.settings)
    data = replace(config.data, download=config.data.download or arguments.download)
    if arguments.data_root is not None:
        data = replace(
            data, root=os.path.abspath(arguments.data_root)
        )  # the run may be resumed from elsewhere
    folder: Path | None = arguments.output
    if folder is None:
        if "RANK" in os.environ:
            raise ValueError(
                "--output must be given where several processes train together; it is missing."
            )
        folder = Path("runs", f"{Path(arguments.source).stem}-{datetime.now():%Y%m%d-%H%M%S}")
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0")
    resume, quiet = arguments.resume or restarted, arguments.quiet
    config = replace(config, data=data)
    return _finish(
        folder, arguments.source, lambda: train_run(config, folder, resume=resume, quiet=quiet)
    )


def run_resume(arguments: Namespace) -> int:
    """Go on with a run."""
    from equipoise.runs import resume_run

    return _finish(
        arguments.folder,
        arguments.folder / "config.toml",
        lambda: resume_run(arguments.folder, quiet=arguments.quiet),
    )


def run_demo(arguments: Namespace) -> int:
    """Train on the bundled digits."""
    from equipoise.runs import load_config, train_run

    config = load_config("digits", [f"train.seed={arguments.seed}"])
    folder, count = arguments.output or Path(DEMO), 1
    while arguments.output is None and folder.exists():
        count += 1
        folder = Path(f"{DEMO}-{count}")
    return _finish(folder, "digits", lambda: train_run(config, folder))


def _finish(folder: Path, source: str | Path, train: Callable[[], Summary]) -> int:
    """Train, and print what came out."""
    from equipoise.data import DataError
    from equipoise.engine import CheckpointError
    from equipoise.engine.progress import score_text

    try:
        summary = train()
    except ValueError as error:
        # What is wrong with neither the data nor the run's folder is wrong with the config.
        if isinstance(error, DataError | CheckpointError) or str(error).startswith(str(folder)):
            raise
        raise ValueError(f"{source}: {error}") from error
    except KeyboardInterrupt as error:
        kept = any((folder / "checkpoints").glob("*.safetensors"))
        remedy = (
            f"go on with: equipoise resume {shlex.quote(str(folder))}"
            if kept
            else "there is no checkpoint yet"
        )
        raise KeyboardInterrupt(f"interrupted; {remedy}") from error
    if os.environ.get("RANK", "0") != "0":
        return DONE
    early = (
        " early, because the held-out score no longer got better,"
        if summary.stopped == "early"
        else ""
    )
    print(
        f"finished{early} after {_count(summary.epochs, 'epoch')}, "
        f"{_count(summary.steps, 'step')} and {summary.seconds:.1f} s"
    )
    if summary.skipped:
        print(f"{_count(summary.skipped, 'step')} skipped, because a solve diverged or met NaN")
    for split, scores in (("validation", summary.validation), ("test", summary.test)):
        if scores:
            if scores.get("missed"):
                print(
                    f"{scores['missed']:,} of {scores['samples']:,} {split} samples did not "
                    "reach the solver's tolerance"
                )
            print(f"{split} {score_text(summary.metric, scores[summary.metric])}")
    if (folder / "report.html").exists():
        print(f"report: {folder / 'report.html'}")
    return DONE


def run_evaluate(arguments: Namespace) -> int:
    """Score a run."""
    from equipoise.engine.progress import score_text
    from equipoise.runs import evaluate_run

    found = evaluate_run(arguments.folder, split=arguments.split, root=arguments.data_root)
    if arguments.json:
        _print_json(found.to_dict())
        return DONE
    for name, value in found.metrics.items():
        print(score_text(name, value))
    print(f"{found.missed:,} of {found.samples:,} samples did not reach the solver's tolerance")
    broken = found.status.get("NONFINITE", 0)
    if broken:
        print(
            f"equipoise: warning: {_count(broken, 'solve')} met NaN or infinity; such samples "
            "count as wrong",
            file=sys.stderr,
        )
    return DIVERGED if broken and broken == sum(found.status.values()) else DONE


def run_predict(arguments: Namespace) -> int:
    """Predict for files."""
    from equipoise.engine.inputs import read_inputs
    from equipoise.engine.predict import predict, write_predictions
    from equipoise.runs import open_run

    run = open_run(arguments.folder)
    name, size = run.task.name, run.config.data.size or run.about.shape[1:]
    if name in ("segmentation", "restoration") and arguments.out is None:
        raise ValueError(f"--out must name a folder for the results of a {name}; it is missing.")
    inputs = read_inputs(
        arguments.files,
        shape=(*run.about.shape[:1], *size),
        multiple=run.model.multiple
        if name == "segmentation"
        else None,  # whole pictures; others at the size of the training
        vocabulary=run.classes if name == "language" else None,
    )
    found = predict(run.model, run.task, inputs, classes=run.classes, transform=run.transform)
    missed = write_predictions(found, arguments.out, sys.stdout)
    if arguments.out is not None:
        print(f"predictions: {arguments.out}", file=sys.stderr)
    if missed:
        print(
            f"equipoise: warning: {_count(missed, 'prediction')} did not reach the solver's "
            "tolerance",
            file=sys.stderr,
        )
    return DONE


def run_list(arguments: Namespace) -> int:
    """List what can be chosen by name."""
    from fnmatch import fnmatchcase

    from equipoise.core import choose

    found = _things(choose("list.kind", arguments.kind, KINDS))
    wanted = arguments.pattern
    if wanted is not None:
        pattern = wanted if any(sign in wanted for sign in "*?[") else f"*{wanted}*"
        found = {name: text for name, text in found.items() if fnmatchcase(name, pattern)}
    if arguments.json:
        _print_json(found)
        return DONE
    if not found:
        raise ValueError(f"list.pattern must match one of the {arguments.kind}; got {wanted!r}.")
    width = max(map(len, found))
    for name, text in found.items():
        print(f"{name:{width}}  {text}")
    return DONE


def _things(kind: str) -> dict[str, str]:
    """What can be chosen by name, each with one line about it."""
    from equipoise import data, gradients, models, prox, runs, solvers

    if kind == "recipes":
        return runs.list_presets()
    if kind == "models":
        return {name: models.model_info(name) for name in models.list_models()}
    if kind == "data":
        return data.list_data()
    registry: Registry[Any] = getattr(
        {"solvers": solvers, "gradients": gradients}.get(kind, prox), kind.upper()
    )
    return {name: (registry[name].__doc__ or "").partition("\n")[0] for name in registry}


def run_config(arguments: Namespace) -> int:
    """Print a whole config."""
    from equipoise.runs import dump_config, load_config

    print(dump_config(load_config(arguments.source, arguments.settings)), end="")
    return DONE


def run_report(arguments: Namespace) -> int:
    """Write the page about a run."""
    from equipoise.runs import report_run

    path = report_run(arguments.folder)
    print(path)
    if arguments.open:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())
    return DONE


def run_sweep(arguments: Namespace) -> int:
    """Train with all combinations of settings."""
    from equipoise.runs.sweep import format_table, split_values, sweep

    fixed: list[str] = []
    grid: dict[str, list[str]] = {}
    for setting in arguments.settings:
        key, _, text = setting.partition("=")
        values = split_values(text)
        if len(values) > 1:
            grid[key] = values
        else:
            fixed.append(setting)
    pool: Literal["local", "ray"] = "ray" if arguments.ray else "local"
    try:
        rows = sweep(
            arguments.source, fixed, grid, arguments.output, jobs=arguments.jobs, pool=pool
        )
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt("interrupted; go on with the same command") from error
    print(format_table(rows))
    ends = {row["status"] for row in rows}
    return DIVERGED if "diverged" in ends else BAD_INPUT if "failed" in ends else DONE


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _print_json(values: Mapping[str, Any]) -> None:
    import json

    from equipoise.engine.log import finite

    print(json.dumps(finite(values), indent=1, allow_nan=False))
