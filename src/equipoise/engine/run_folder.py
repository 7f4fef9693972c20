"""The folder of a run: its log, its checkpoints, and the weights to use."""

from __future__ import annotations

import json
import shlex
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from equipoise.core import SettingError, SourceError, remove_partials
from equipoise.data import Dataset, fingerprint
from equipoise.engine.checkpoint import (
    CheckpointError,
    Checkpoints,
    CheckpointWarning,
    write_checkpoint,
)
from equipoise.engine.distillation import TEACHER, DistillationLoss
from equipoise.engine.distributed import Group
from equipoise.engine.log import MetricLog
from equipoise.engine.run_lock import RunLock
from equipoise.engine.run_state import RunState
from equipoise.engine.settings import OptimizerConfig, ScheduleConfig, TrainConfig

__all__ = ["RunFolder", "run_identity"]

MISSING = object()
DATA = ("the training samples", "the test samples")


class RunFolder:
    """Where a run is kept; without a path nothing is written. All processes call it alike.

    Args:
        path: The folder.
        state: What the run must remember.
        group: The processes that train together; only the main one writes.
        settings: How often to save.
        identity: As of `run_identity`.
    """

    def __init__(
        self,
        path: Path | None,
        state: RunState,
        group: Group,
        settings: TrainConfig,
        identity: Mapping[str, Any],
    ) -> None:
        self.path, self.state, self.group = path, state, group
        self._settings, self._identity = settings, dict(identity)
        self._checkpoints = (
            Checkpoints(path / "checkpoints", settings.checkpoint_keep) if path else None
        )
        self._saved_at = time.monotonic()
        self._lock: RunLock | None = None
        self._is_held = False
        self._saved = (-1, -1)  # the step and the epoch of the last checkpoint

    @contextmanager
    def hold(self) -> Iterator[RunLock | None]:
        """Let no other process train this run meanwhile; may be nested."""
        if self.path is None or self._is_held:
            yield self._lock
            return
        with ExitStack() as stack:
            self.group.on_main(self.path, lambda: self._take(stack))
            self._is_held = True  # in all processes, of which only the main one has the lock
            try:
                yield self._lock
            finally:
                self._lock, self._is_held = None, False

    def _take(self, stack: ExitStack) -> None:
        assert self.path is not None
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = stack.enter_context(RunLock(self.path))

    def refresh(self) -> None:
        """Show other hosts that the run is alive; costs nothing if called often."""
        if self._lock is not None:
            self._lock.refresh()

    def open_log(self) -> MetricLog:
        """Return the log, cut back to where the state is."""
        if self.path is None or not self.group.is_main:
            return MetricLog(None)
        tensorboard = self.path / "tensorboard" if self._settings.tensorboard else None
        log = MetricLog(self.path / "metrics.jsonl", tensorboard)
        try:
            log.truncate(self.state.position.log, self._is_past)
        except BaseException:
            log.close()
            raise
        return log

    def _is_past(self, line: Mapping[str, Any]) -> bool:
        """Whether a line of metrics was written before the present moment."""
        position, step, epoch = self.state.position, line.get("step"), line.get("epoch")
        if not isinstance(step, int) or not isinstance(epoch, int):
            return False
        over = line.get("kind") != "epoch" or epoch < position.epoch
        return step <= position.step and over

    def write_weights(self, weights: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Write `model.safetensors`, the weights to use.

        Args:
            weights: The state of the model.
            about: What is known of them.
        """
        if self.path is not None and self.group.is_main:
            write_checkpoint(self.path / "model.safetensors", weights, about)

    def keep_weights(self, epoch: int, weights: Mapping[str, Tensor]) -> None:
        """Keep a copy of the weights after an epoch, if one is due (`TrainConfig.weights_every`).

        Args:
            epoch: How many are over.
            weights: The state of the model.
        """
        every = self._settings.weights_every
        if self.path is None or not every or epoch % every or not self.group.is_main:
            return
        folder = self.path / "weights"
        folder.mkdir(parents=True, exist_ok=True)
        state = {"epoch": epoch, "step": self.state.position.step}
        write_checkpoint(folder / f"epoch-{epoch:06d}.safetensors", weights, state)

    def start_clock(self) -> None:
        """Count the time to the next checkpoint from now."""
        self._saved_at = time.monotonic()

    def save_is_due(self) -> bool:
        """Return whether it is time for a checkpoint."""
        if self.path is None:
            return False
        late = time.monotonic() - self._saved_at > 60 * self._settings.checkpoint_minutes
        every = self._settings.checkpoint_steps
        return late or bool(every and self.state.position.step % every == 0)

    def save(self, log: MetricLog, seconds: float) -> None:
        """Write a checkpoint, unless the last one is of this very moment.

        Args:
            log: The log, which is brought to the disk first.
            seconds: Time that the run has taken.
        """
        position = self.state.position
        now = position.step, position.epoch
        if self._checkpoints is None or self._saved == now:
            return
        if self.group.is_main:
            log.sync()
            position.log = log.position
            position.seconds = seconds
        tensors, values = self.state.pack(self.group)
        if self.group.is_main:
            self._checkpoints.save(
                position.step,
                tensors,
                {"position": values, "run": self._identity},
                position.best_steps,
            )
        self._saved = now
        self.start_clock()

    def restore(self, *, resume: bool) -> None:
        """Bring the state back to the last checkpoint, if there is one.

        Args:
            resume: Whether that is wanted; if not, a folder that holds a run is refused.
        """
        if self.path is None or self._checkpoints is None:
            if resume:
                raise SettingError("Trainer.folder", "be given to resume a run", None)
            return
        if not resume:
            if self.group.is_main and any((self.path / "checkpoints").glob("*")):
                raise SourceError(
                    self.path,
                    "already holds a run. Pass resume=True to resume it, or another folder.",
                )
            return
        if self.group.is_main:
            self._checkpoints.clean()
            remove_partials(self.path / "weights")
        stored = self._checkpoints.latest()
        if stored is not None:
            try:
                different = _first_difference(stored.state["run"], self._identity)
                if different in (*DATA, TEACHER):
                    what = "teacher" if different == TEACHER else "data"
                    became = "have changed since" if different in self._identity else "are missing"
                    raise SourceError(
                        self.path,
                        f"must be resumed with the {what} that it was trained on; {different} "
                        f"{became}. Put them back as they were, or train anew with: equipoise "
                        f"train {shlex.quote(str(self.path))} --output NEW",
                    )
                if different:
                    raise ValueError(
                        f"a checkpoint of a run with other settings: {different} differs"
                    )
                self.state.unpack(stored.tensors, stored.state["position"], self.group)
            except SourceError:
                raise
            except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
                raise CheckpointError(stored.path, error) from error
            if self.group.is_main:
                # As the run would have, had it not been killed after it wrote the last one.
                self._checkpoints.prune(stored.step, self.state.position.best_steps)
            self._saved = self.state.position.step, self.state.position.epoch
        elif (self.path / "model.safetensors").exists():
            raise SourceError(
                self.path,
                "must hold checkpoints to be resumed; there are only weights. Train anew with: "
                f"equipoise train {shlex.quote(str(self.path))} --output NEW",
            )
        step = float(self.state.position.step)
        if self.group.any(self.group.max(step) != step):
            raise SourceError(
                self.path,
                "must be a folder that all processes share, to resume; they found different ones.",
            )


def read_trained_on(folder: Path) -> str | None:
    """Return the fingerprint of the samples that a run has learnt from, if it is known.

    Args:
        folder: Where the run is kept.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        try:
            stored = Checkpoints(folder / "checkpoints").latest()
        except CheckpointError:
            return None
    kept = stored.state.get("run") if stored else None
    found = kept.get(DATA[0]) if isinstance(kept, dict) else None
    return found if isinstance(found, str) else None


def run_identity(
    settings: TrainConfig,
    optimizer: OptimizerConfig,
    schedule: ScheduleConfig,
    train: Dataset,
    test: Dataset | None,
    distillation: DistillationLoss | None = None,
) -> dict[str, Any]:
    """Return the settings and the data with which alone a checkpoint can be resumed.

    Args:
        settings: How the run goes; `TrainConfig.free` may change, and so may the epochs if the
            schedule does not depend on them.
        optimizer: Its optimiser.
        schedule: Its schedule.
        train: The samples it learns from.
        test: The samples it scores.
        distillation: What another model teaches it, if one does.
    """
    fixed_length = schedule.depends_on_length or settings.image_sizes
    free = {*TrainConfig.free, *(() if fixed_length else ("epochs",))}
    if train.continuous:
        free -= {"evaluate_batch"}  # in how many pieces a text is read: other scores
    fixed = {name: value for name, value in asdict(settings).items() if name not in free}
    sections = {"train": fixed, "optimizer": asdict(optimizer), "schedule": asdict(schedule)}
    flat = {
        f"{section}.{name}": value
        for section, values in sections.items()
        for name, value in values.items()
    }
    data = {
        name: None if dataset is None else fingerprint(dataset)
        for name, dataset in zip(DATA, (train, test), strict=True)
    }
    taught = {} if distillation is None else distillation.identity()
    # As it is read back: tuples become lists.
    return json.loads(json.dumps({**flat, **data, **taught}))  # type: ignore[no-any-return]


def _first_difference(kept: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """The first setting in which two runs differ; empty if they agree."""
    return next(
        (
            name
            for name in sorted({*kept, *own}, key=lambda name: (name != TEACHER, name))
            if kept.get(name, MISSING) != own.get(name, MISSING)
        ),
        "",
    )
