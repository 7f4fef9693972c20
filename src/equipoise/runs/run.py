"""Whole runs in folders: training and resuming."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from equipoise.core import (
    ConvergenceError,
    SettingError,
    SourceError,
    interruptible,
    remove_partials,
    uninterrupted,
    write_atomically,
)
from equipoise.core.allocator import keep_freed_memory
from equipoise.core.json_values import to_json_values
from equipoise.core.printable import printable_name
from equipoise.data import BadSamples, read_bad_samples
from equipoise.engine import (
    Group,
    Progress,
    Summary,
    Trainer,
    make_progress,
)
from equipoise.engine.run_lock import LOCK_FILE
from equipoise.runs.build import make_model, make_transforms, resolve, try_out
from equipoise.runs.change import require_resumable
from equipoise.runs.config import Config, dump_config, load_config, same_run
from equipoise.runs.environment import describe_environment
from equipoise.runs.held_out import may_know_held_out
from equipoise.runs.initial_weights import load_initial_weights
from equipoise.runs.own_code import (
    describe_change,
    find_changed_code,
    keep_sources,
    remember_named_code,
    with_absolute_paths,
)
from equipoise.runs.run_report import BAD_SAMPLES, read_json, report_run
from equipoise.runs.samples import Samples, load_samples
from equipoise.runs.sections import DataConfig
from equipoise.runs.teacher import load_teacher

__all__ = ["check_folder", "open_group", "prepare", "resume_run", "set_up_process", "train_run"]


class ReportWarning(UserWarning):
    """A run is over, and there is no page about it."""


def train_run(
    config: Config,
    folder: Path,
    *,
    resume: bool = False,
    changed: bool = False,
    trust: bool = False,
    quiet: bool = False,
) -> Summary:
    """Train as a config says, keep the run in a folder, and return what came out.

    Nothing is written before the data were read, the model took a sample and all settings were
    found to fit.

    Args:
        config: What to do.
        folder: Where to keep the run; new or empty, unless `resume`.
        resume: Whether to resume from the last checkpoint, if the folder holds one of the same
            config.
        changed: Whether the config of the run that is resumed is replaced by this one, as far as
            it may change.
        trust: Whether to resume a run whose code has changed, with the code as it is now.
        quiet: Whether to show nothing meanwhile.
    """
    config = with_absolute_paths(config)
    remember_named_code(config)
    set_up_process(config)
    with interruptible(), open_group(config) as group:
        resume = group.any(resume)  # torchrun tells only some of the machines that it starts again
        progress = make_progress(quiet=quiet or not group.is_main)
        # Before the data are read, which may take long.
        group.on_main(folder, lambda: check_folder(folder, resume=resume))
        group.on_main(folder, lambda: _check_code(folder, config, progress, trust=trust))
        trainer, samples, config = prepare(config, folder, group, progress, trust=trust)
        with trainer.store.hold() as lock:
            if resume and (folder / "config.toml").exists() and not _has_checkpoints(folder):
                trainer.progress.note(
                    f"{printable_name(folder)} holds no checkpoint yet: training starts from the "
                    "beginning"
                )
            if lock is not None and lock.left_by is not None:
                trainer.progress.note(
                    f"{printable_name(folder)} was left by {lock.left_by}, which is gone"
                )
            group.on_main(
                folder,
                lambda: _write_beginning(
                    folder, config, resume=resume, changed=changed, world=group.world
                ),
            )
            if samples.bad is not None:
                _list_bad_samples(samples.bad, folder, group)
            return _train(trainer, samples, folder, resume=resume)


def set_up_process(config: Config) -> None:
    """Give this process the threads that a config asks for, and memory that stays with it.

    Args:
        config: What it will do.
    """
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    keep_freed_memory()


def prepare(
    config: Config,
    folder: Path | None,
    group: Group,
    progress: Progress,
    *,
    trust: bool = False,
) -> tuple[Trainer, Samples, Config]:
    """Build all that a config asks for, and write nothing.

    Args:
        config: What to do.
        folder: Where the run will be kept, if anywhere.
        group: The processes that train together.
        progress: Where to show how it goes.
        trust: As of `open_run`, for the run that teaches.

    Returns:
        The run, its samples, and the config with what it left to the data.
    """
    samples = _load(group, config.data)
    config = resolve(config, samples.train)
    model = make_model(config)
    task = config.task.make(samples.train)
    transform, plain = make_transforms(config.data, samples.train)
    try_out(model, task, samples.watched, plain)
    if config.model.weights and not (folder and _has_checkpoints(folder)):
        source = Path(config.model.weights)
        told = load_initial_weights(model, source, config, task, samples.train)
        if may_know_held_out(source, config, samples.train):
            told += ", which may have learnt from samples that are held out here"
        progress.note(f"starting from the weights of {told}")
    distillation = load_teacher(
        config, task, samples.train, plain, group.device, progress, trust=trust
    )
    trainer = Trainer(
        model,
        task,
        samples.train,
        samples.watched,
        held_out=samples.watched is not samples.test,
        settings=config.train,
        optimizer=config.optimizer,
        schedule=config.schedule,
        transform=transform,
        test_transform=plain,
        loading=config.data.make_loading(),
        folder=folder,
        group=group,
        progress=progress,
        jacobian_penalty=config.task.jacobian_penalty,
        correction=config.task.make_correction(),
        distillation=distillation,
    )
    return trainer, samples, config


def _list_bad_samples(bad: BadSamples, folder: Path, group: Group) -> None:
    """Keep a list of bad samples in the folder of a run, to which all processes add."""
    path = folder / BAD_SAMPLES
    group.on_main(folder, lambda: bad.keep_in(path))
    if not group.is_main:
        bad.keep_in(path, is_main=False)


def _train(trainer: Trainer, samples: Samples, folder: Path, *, resume: bool) -> Summary:
    """Train, score the test samples if others were watched, and write what came out."""
    try:
        with uninterrupted():  # since processes that train together stop together
            summary = trainer.fit(resume=resume)
            if trainer.held_out and samples.test is not None:
                scores = trainer.evaluate(samples.test)
                matrix = None if scores.confusion is None else scores.confusion.tolist()
                summary = replace(summary, test=scores.to_dict(), confusion=matrix)
    except ConvergenceError:
        if trainer.group.is_main:
            _show(folder)  # what led to it is there to be seen
        raise
    if samples.bad is not None:
        trainer.group.barrier()  # all processes have listed theirs
        summary = replace(summary, bad_samples=len(read_bad_samples(folder / BAD_SAMPLES)))
    if trainer.group.is_main:
        write_json(folder / "summary.json", summary.to_dict())
        _show(folder)
    return summary


def resume_run(
    folder: Path,
    settings: Sequence[str] = (),
    *,
    root: str | None = None,
    trust: bool = False,
    quiet: bool = False,
) -> Summary:
    """Resume a run that was stopped, as if it had never been.

    Args:
        folder: Where it is kept.
        settings: What to change from now on, such as `train.epochs=40`; see `require_resumable`.
        root: The folder with the data, if it is another one than before.
        trust: Whether to run the code that it names, whoever made it and though it has changed.
        quiet: Whether to show nothing meanwhile.
    """
    config = load_config(folder, settings, trust=trust)
    if root is not None:
        config = replace(config, data=replace(config.data, root=root))
    require_resumable(folder, config)
    changed = bool(settings) or root is not None
    return train_run(config, folder, resume=True, changed=changed, trust=trust, quiet=quiet)


def _load(group: Group, data: DataConfig) -> Samples:
    """Load the data sets; the main process fetches files before the others look for them."""
    if data.download and not group.is_main:
        group.barrier()
    samples = load_samples(data)
    if data.download and group.is_main:
        group.barrier()
    return samples


def _show(folder: Path) -> None:
    """Write the page about the run."""
    try_report(folder, lambda: report_run(folder))


def try_report(folder: Path, make: Callable[[], object]) -> None:
    """Write a page; that it cannot be made fails no run that is over.

    Args:
        folder: What it is about.
        make: Writes it.
    """
    try:
        make()
    except OSError:  # a full disk, say, which is not the page's fault
        raise
    except Exception as error:  # a model's own certificate or problem may raise anything
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        warnings.warn(
            f"the report could not be made ({reason}); try again with: equipoise report {folder}",
            ReportWarning,
            stacklevel=4,
        )


@contextmanager
def open_group(config: Config) -> Iterator[Group]:
    """Start the processes that train together, and close them in the end.

    Args:
        config: What they train.
    """
    wanted = config.train.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wanted)
        torch.zeros(1, device=device).tolist()  # some devices hold no numbers
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise SettingError(
            "train.device",
            "be a device that torch can use here",
            wanted,
            got=f"{wanted!r} ({reason})",
        ) from error
    group = Group.from_environment(device)
    try:
        yield group
    finally:
        group.close()


def check_folder(folder: Path, *, resume: bool) -> None:
    """Raise unless a folder holds this run or nothing; a lock or a partial file is nothing.

    Args:
        folder: The folder.
        resume: Whether it may hold a run.
    """
    if folder.exists() and not folder.is_dir():
        raise SourceError(folder, "must be a folder; it is a file.")
    if (folder / "config.toml").exists():
        if not resume:
            raise SourceError(
                folder, f"already holds a run. Resume it with: equipoise resume {folder}"
            )
    elif folder.exists() and any(
        path.name != LOCK_FILE and not path.name.endswith(".partial") for path in folder.iterdir()
    ):
        raise SourceError(folder, "must be new or empty; it holds other files.")


def _check_code(folder: Path, config: Config, progress: Progress, *, trust: bool) -> None:
    """Raise if a run is to be resumed with other code than it was begun with, unless trusted."""
    files = find_changed_code(folder, config)
    if not files:
        return
    change = f"{describe_change(files)} since this run began"
    if not trust:
        raise SourceError(
            folder,
            f"{change}, so that it would not go on as it was. Resume it with the code as it is now "
            "by --trust (from Python: trust=True), or begin another run.",
        )
    progress.note(f"{change}: it goes on with the code as it is now")


def _has_checkpoints(folder: Path) -> bool:
    return any((folder / "checkpoints").glob("*.safetensors"))


def _write_beginning(
    folder: Path, config: Config, *, resume: bool, changed: bool, world: int
) -> None:
    check_folder(folder, resume=resume)  # again, since nobody else writes here any more
    here = (folder / "config.toml").exists()
    if here and changed:
        require_resumable(folder, config)
        longer = config.train.epochs != load_config(folder).train.epochs
        write_atomically(folder / "config.toml", dump_config(config))
        if longer:  # what came out is not known any more
            (folder / "summary.json").unlink(missing_ok=True)
    elif here and not same_run(load_config(folder), config):
        raise SourceError(
            folder,
            "holds a run with another config. Choose another folder, or resume that run with: "
            f"equipoise resume {folder}",
        )
    remove_partials(folder)
    if not here:
        # First of all, since a folder that holds it is a run's: a run that is killed any later can
        # be resumed.
        write_atomically(folder / "config.toml", dump_config(config))
    keep_sources(folder, config)
    if read_json(folder / "environment.json") is None:
        write_json(folder / "environment.json", describe_environment(world))


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write plain values as JSON, whole or not at all.

    Args:
        path: Where.
        values: What; numbers that are not finite become null.
    """
    write_atomically(path, json.dumps(to_json_values(values), indent=1, allow_nan=False) + "\n")
