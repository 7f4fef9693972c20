"""Training that goes on where it was stopped, bit for bit, and never steps on a failed solve."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core import ConvergenceError, SourceError, flush_denormals
from equipoise.data import Dataset, Transform, batch_count, batches
from equipoise.engine.checkpoint import CheckpointError, Checkpoints, write_checkpoint
from equipoise.engine.distributed import Group
from equipoise.engine.evaluate import Evaluation, autocast, evaluate
from equipoise.engine.interrupt import Interrupted, interruptible
from equipoise.engine.log import MetricLog, require_tensorboard
from equipoise.engine.optimizer import Average, make_optimizer
from equipoise.engine.progress import Progress, make_progress, shown_by
from equipoise.engine.run_state import RunState
from equipoise.engine.settings import OptimizerConfig, ScheduleConfig, TrainConfig
from equipoise.engine.solve_monitor import Solves, operator_norms
from equipoise.engine.summary import Summary
from equipoise.engine.tasks import Task
from equipoise.engine.totals import Totals
from equipoise.layers import Cell, project_norms_after
from equipoise.models import count_parameters

__all__ = ["Trainer"]

MISSING = object()
SLOWER = "lower optimizer.learning_rate or set train.clip"


class Trainer:
    """Trains a model on a task.

    A step whose forward or backward solve diverged or met NaN, or whose loss or gradient is not
    finite, is skipped: weights, buffers, averages and the optimiser stay as they were, bit for bit.
    Ten skipped in a row end the run with a `ConvergenceError` that says why.

    With a folder, the run writes `metrics.jsonl`, `checkpoints/` and `model.safetensors` there, and
    `fit(resume=True)` goes on from the last checkpoint as if it had never stopped, in the middle of
    an epoch too.

    Args:
        model: What to train.
        task: What it is trained for.
        train: The samples to learn from.
        test: The samples to score after each epoch.
        held_out: Whether `test` was held out of the training data; early stopping needs that.
        settings: How the run goes.
        optimizer: Which optimiser.
        schedule: How the learning rate changes.
        transform: What is done to each training batch.
        test_transform: What is done to each test batch.
        folder: Where the run is kept, if anywhere.
        group: The processes that train together; by default this one alone, on a CPU.
        progress: Where to show how it goes; by default the terminal.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        train: Dataset,
        test: Dataset | None = None,
        *,
        held_out: bool = False,
        settings: TrainConfig | None = None,
        optimizer: OptimizerConfig | None = None,
        schedule: ScheduleConfig | None = None,
        transform: Transform | None = None,
        test_transform: Transform | None = None,
        folder: Path | None = None,
        group: Group | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.task, self.train, self.test, self.held_out = task, train, test, held_out
        self.settings, self.schedule = settings or TrainConfig(), schedule or ScheduleConfig()
        self.optimizer_settings = optimizer or OptimizerConfig()
        self.transform, self.test_transform = transform, test_transform
        self.group = group or Group()
        self.folder = folder
        self.progress = progress or make_progress(quiet=not self.group.is_main)
        if self.settings.patience and not (test is not None and held_out):
            raise ValueError(
                "train.patience must come with held-out samples to watch; got none. Set "
                "data.holdout."
            )
        if self.settings.batch % self.group.world:
            raise ValueError(
                f"train.batch must be a multiple of the {self.group.world} processes; got "
                f"{self.settings.batch}."
            )
        normed = any(isinstance(part, nn.BatchNorm1d) for part in model.modules())
        if normed and len(train) // self.group.world * self.group.world % self.settings.batch == 1:
            raise ValueError(
                "train.batch must not leave one sample for the last step, which batch "
                "normalisation cannot take; got "
                f"{self.settings.batch} for {len(train)} samples. Choose another, or another "
                "data.subset."
            )
        if self.settings.tensorboard:
            require_tensorboard()
        self.share = self.settings.batch // self.group.world  # samples of this process in each step
        self.steps_per_epoch = batch_count(
            train, self.share, rank=self.group.rank, world=self.group.world
        )
        self.steps = self.steps_per_epoch * self.settings.epochs

        self.model = model.to(self.group.device)
        self.wrapped = self.model
        self.optimizer = make_optimizer(model, self.optimizer_settings)
        if any(isinstance(part, Cell) and part.projects for part in model.modules()):
            project_norms_after(self.optimizer, model)
        self.average = Average(model, self.settings.ema) if self.settings.ema else None
        self.scaler = torch.amp.GradScaler(
            self.group.device.type, enabled=self.settings.precision == "float16"
        )
        self.state = RunState(model, self.optimizer, self.average, self.scaler, task)
        self.place = self.state.place
        self.solves = Solves(model)
        self.checkpoints = Checkpoints(folder / "checkpoints") if folder else None
        self.began = False
        self.reason = ""  # why the last step was skipped, if it was
        self.started = self.saved = 0.0

    def fit(self, *, resume: bool = False) -> Summary:
        """Train until the epochs are over, and return what came out; the model then has the weights that were scored.

        Args:
            resume: Whether to go on from the last checkpoint in the folder, if there is one.
        """
        settings, place, group = self.settings, self.place, self.group
        if self.began:
            raise ValueError(
                "Trainer.fit must be called once; got a second call. Make a new Trainer to go "
                "on, with resume=True."
            )
        self.began = True
        with ExitStack() as stack:
            if settings.flush_denormals and group.device.type == "cpu":
                stack.enter_context(flush_denormals())
            torch.manual_seed(settings.seed + group.rank)
            self._restore(resume=resume)
            # State is in place before anything is wrapped or differentiated: later, copies of it
            # would go their own ways.
            self.wrapped = group.wrap(self.model)
            log = stack.enter_context(self._open_log())
            log.truncate(place.log)
            stack.enter_context(self.progress)
            stack.enter_context(shown_by(self.progress))
            stack.enter_context(self.solves.listening())
            told = stack.enter_context(interruptible())
            self.progress.start(settings.epochs, self.steps, place.step, self._title())
            self.saved = time.monotonic()
            self.started = self.saved - place.seconds
            samples, busy = 0, 0.0
            while place.epoch < settings.epochs and not (
                settings.patience and place.waited >= settings.patience
            ):
                epoch = batches(
                    self.train,
                    self.share,
                    settings.seed,
                    place.epoch,
                    transform=self.transform,
                    rank=group.rank,
                    world=group.world,
                    start=min(
                        place.batch, self.steps_per_epoch
                    ),  # more processes may leave out the last, short batch
                )
                since = time.monotonic()
                for x, y in epoch:
                    line = self._step(x.to(group.device), y.to(group.device))
                    samples += len(x) * group.world
                    busy += time.monotonic() - since
                    place.busy += time.monotonic() - since
                    if line is not None:
                        log.write({**line, "samples_per_second": samples / busy})
                        samples, busy = 0, 0.0
                    if place.skipped_in_a_row >= settings.failures:
                        raise ConvergenceError(
                            f"{place.skipped_in_a_row} steps in a row were skipped, up to "
                            f"step {place.step}: {self.reason}"
                        )
                    # Processes must agree on when to save and when to stop.
                    wish = group.max(
                        2.0 if told.is_set() else float(group.is_main and self._save_is_due())
                    )
                    if wish:
                        self._save(log)
                    if wish == 2:
                        raise self._interrupted()
                    since = time.monotonic()
                self._end_epoch(log)
                self._save(log)
                if group.any(told.is_set()) and place.epoch < settings.epochs:
                    raise self._interrupted()
            self.state.finish()
            return self._summary()

    def _title(self) -> str:
        """What is trained on what, in one line."""
        name = getattr(self.model, "name", type(self.model).__name__)
        weights = sum(weight.numel() for weight in self.model.parameters())
        where = f", kept in {self.folder}" if self.folder else ""
        return (
            f"{name} with {weights:,} parameters on {len(self.train):,} samples of "
            f"{self.train.name}{where}"
        )

    def _interrupted(self) -> Interrupted:
        kept = (
            "a checkpoint was written"
            if self.folder
            else "nothing was kept, since it has no folder"
        )
        return Interrupted(f"the run was interrupted at step {self.place.step}; {kept}")

    def _step(self, x: Tensor, y: Tensor) -> dict[str, Any] | None:
        """Make one step, or skip it if it would not be sound; return its line of metrics if one is due."""
        settings, place, group = self.settings, self.place, self.group
        rate = self._rate(place.step)
        for each in self.optimizer.param_groups:
            each["lr"] = rate
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        self.model.train()
        self.solves.clear()
        self.optimizer.zero_grad()
        with autocast(group.device, settings.precision):
            output = self.wrapped(x)
        self.task.check(output, y)
        loss, weight = self.task.loss(output, y), self.task.weight(y)
        # Gradients are averaged over processes: where their shares differ, each loss counts by its
        # own.
        whole = group.sum(torch.tensor(weight, dtype=torch.float64)).item()
        share = weight * group.world / whole if whole else 1.0
        self.scaler.scale(loss if share == 1 else loss * share).backward()  # type: ignore[no-untyped-call]
        self.scaler.unscale_(self.optimizer)
        length = nn.utils.get_total_norm(
            [each.grad for each in self.model.parameters() if each.grad is not None]
        )

        self.reason, serious = self._unsound(loss, length)
        verdict = group.max(2.0 if serious else float(bool(self.reason)))
        skip = verdict > 0
        if skip:
            self.reason = self.reason or "another process skipped it."
            with torch.no_grad():
                for buffer, before in zip(self.model.buffers(), buffers, strict=True):
                    buffer.copy_(before)
            self.optimizer.zero_grad()
        else:
            if settings.clip:
                nn.utils.clip_grads_with_norm_(self.model.parameters(), settings.clip, length)
            self.scaler.step(self.optimizer)
            if self.average:
                self.average.update()
        if self.scaler.is_enabled():
            self.scaler.update()

        totals, score = Totals(self.task), self.task.score()
        if not skip:
            score.update(output.detach(), y)
        totals.add(loss.item(), 0.0 if skip else weight, self.solves)
        totals.add_score(score)
        totals.load(group.sum(totals.vector))
        self.state.epoch.load(self.state.epoch.vector + totals.vector)
        place.step += 1
        place.batch += 1
        place.skipped += skip
        place.epoch_skipped += skip
        place.skipped_in_a_row = place.skipped_in_a_row + (verdict == 2) if skip else 0
        line = totals.line()
        self.progress.step(
            place.step,
            place.epoch,
            {**line, "skipped": place.skipped, "failed": self.state.epoch.failed},
        )
        if skip and place.skipped_in_a_row <= 1:
            self.progress.note(f"step {place.step} was skipped: {self.reason}")
        if not skip and place.step % settings.log_every and place.step != 1:
            return None
        return {
            "kind": "step",
            "step": place.step,
            "epoch": place.epoch,
            **line,
            "learning_rate": rate,
            "gradient_norm": length.item(),
            "forward_residual": group.max(self.solves.forward.residual)
            if self.solves.layers
            else None,
            "backward_residual": group.max(self.solves.backward.residual)
            if self.solves.layers
            else None,
            "skipped": skip,
        }

    def _rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        return self.optimizer_settings.learning_rate * self.schedule.factor(
            step, self.steps, self.steps_per_epoch
        )

    def _unsound(self, loss: Tensor, length: Tensor) -> tuple[str, bool]:
        """Return why the step must be skipped, nothing if it need not, and whether that is more than a search for a scale."""
        fine = bool(torch.isfinite(loss)) and not self.solves.forward_failed
        if (
            fine
            and not torch.isfinite(length)
            and self.scaler.is_enabled()
            and self.scaler.get_scale() > 1
        ):
            return "the gradient overflowed float16; its scale was halved.", False
        if self.solves.failure:
            return self.solves.failure, True
        if not torch.isfinite(loss):
            return f"the loss was {loss.item()}; {SLOWER}, and look for NaN in the data.", True
        if not torch.isfinite(length):
            lower = (
                "" if self.settings.precision == "float32" else ", or set train.precision=float32"
            )
            return f"the gradient was not finite; {SLOWER}{lower}.", True
        return "", False

    def _end_epoch(self, log: MetricLog) -> None:
        """Score the test samples, keep the weights if they are the ones to keep, and write the epoch's line."""
        settings, place, name = self.settings, self.place, "validation" if self.held_out else "test"
        line = self.state.epoch.line()
        with self.average.applied() if self.average else nullcontext():
            scores = self.evaluate(self.test) if self.test is not None else None
            better = place.judge(
                scores.metrics[self.task.metric.name] if scores else None,
                higher=self.task.metric.higher_is_better,
            )
            if better or not settings.patience or not place.test:
                place.test = scores.to_dict() if scores else {}
                place.confusion = (
                    scores.confusion.tolist() if scores and scores.confusion is not None else None
                )
                if settings.patience:
                    self.state.keep()
                if self.folder and self.group.is_main:
                    state = {
                        "epoch": place.epoch + 1,
                        "step": place.step,
                        name: place.test,
                        "data": self.train.about(),
                    }
                    write_checkpoint(
                        self.folder / "model.safetensors", self.model.state_dict(), state
                    )
            norms = operator_norms(self.model)
        place.train = {key: line[key] for key in ("loss", *self.state.epoch.score.compute())}
        seconds = time.monotonic() - self.started - place.epoch_seconds
        whole = {
            "kind": "epoch",
            "epoch": place.epoch,
            "step": place.step,
            "learning_rate": self._rate(place.step - 1),
            "train": place.train,
            **({name: scores.to_dict()} if scores else {}),
            **{
                key: line[key]
                for key in ("forward_steps", "backward_steps", "forward_status", "backward_status")
            },
            "skipped": place.epoch_skipped,
            "operator_norms": norms,
            "seconds": seconds,
            "samples_per_second": len(self.train)
            // self.group.world
            * self.group.world
            / place.busy,
        }
        log.write(whole)
        self.progress.epoch(place.epoch, whole)
        self.state.past.load(self.state.past.vector + self.state.epoch.vector)
        self.state.epoch.clear()
        place.epoch += 1
        place.batch = place.epoch_skipped = 0
        place.busy = 0.0
        place.epoch_seconds += seconds

    def evaluate(self, dataset: Dataset) -> Evaluation:
        """Score a data set with the present weights, as after each epoch.

        Args:
            dataset: What to score.
        """
        settings, cpu = self.settings, self.group.device.type == "cpu"
        with flush_denormals() if settings.flush_denormals and cpu else nullcontext():
            return evaluate(
                self.model,
                self.task,
                dataset,
                batch=settings.evaluate_batch,
                transform=self.test_transform,
                group=self.group,
                precision=settings.precision,
            )

    def _summary(self) -> Summary:
        place, line = self.place, self.state.past.line()
        return Summary(
            stopped="finished" if place.epoch >= self.settings.epochs else "early",
            epochs=place.epoch,
            steps=place.step,
            seconds=time.monotonic() - self.started,
            parameters=count_parameters(self.model),
            metric=self.task.metric.name,
            train=place.train,
            validation=place.test if self.held_out else {},
            test={} if self.held_out else place.test,
            skipped=place.skipped,
            forward_status=line["forward_status"],
            backward_status=line["backward_status"],
            classes=self.train.classes,
            confusion=place.confusion,
        )

    # What is kept, and how it is found again.

    def _open_log(self) -> MetricLog:
        if self.folder is None or not self.group.is_main:
            return MetricLog(None)
        return MetricLog(
            self.folder / "metrics.jsonl",
            self.folder / "tensorboard" if self.settings.tensorboard else None,
        )

    def _save_is_due(self) -> bool:
        settings = self.settings
        if self.folder is None:
            return False
        late = time.monotonic() - self.saved > 60 * settings.checkpoint_minutes
        return late or bool(
            settings.checkpoint_steps and self.place.step % settings.checkpoint_steps == 0
        )

    def _save(self, log: MetricLog) -> None:
        """Write a checkpoint, if the run has a folder."""
        if self.checkpoints is None:
            return
        if self.group.is_main:
            log.sync()
            self.place.log = log.position
            self.place.seconds = time.monotonic() - self.started
        tensors, place = self.state.pack(self.group)
        if self.group.is_main:
            self.checkpoints.save(
                self.place.step, tensors, {"place": place, "run": self._identity()}
            )
        self.saved = time.monotonic()

    def _restore(self, *, resume: bool) -> None:
        """Go back to the last checkpoint, if there is one; refuse to write over a run that is not to be resumed."""
        if self.folder is None or self.checkpoints is None:
            if resume:
                raise ValueError("Trainer.folder must be given to resume a run; got None.")
            return
        if not resume:
            if self.group.is_main and any((self.folder / "checkpoints").glob("*")):
                raise SourceError(
                    self.folder,
                    "already holds a run. Pass resume=True to resume it, or another folder.",
                )
            return
        if self.group.is_main:
            self.checkpoints.clean()
        stored = self.checkpoints.latest()
        if stored is not None:
            try:
                if odd := _difference(stored.state["run"], self._identity()):
                    raise ValueError(f"a checkpoint of a run with other settings: {odd} differs")
                self.state.unpack(stored.tensors, stored.state["place"], self.group)
            except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
                raise CheckpointError(stored.path, error) from error
            if self.group.is_main:
                self.checkpoints.prune(
                    stored.step
                )  # as the run would have, had it not been killed after it wrote the last one
        if self.group.any(self.group.max(float(self.place.step)) != self.place.step):
            raise SourceError(
                self.folder,
                "must be a folder that all processes share, to resume; they found different ones.",
            )

    def _identity(self) -> dict[str, Any]:
        """What a checkpoint must agree with to be gone on from."""
        train = {
            name: value
            for name, value in asdict(self.settings).items()
            if name not in TrainConfig.free
        }
        parts = {
            "train": train,
            "optimizer": asdict(self.optimizer_settings),
            "schedule": asdict(self.schedule),
        }
        flat = {
            f"{part}.{name}": value
            for part, values in parts.items()
            for name, value in values.items()
        }
        # As it is read back: tuples become lists.
        return json.loads(json.dumps({**flat, "the number of training samples": len(self.train)}))  # type: ignore[no-any-return]


def _difference(kept: dict[str, Any], own: dict[str, Any]) -> str:
    """The first thing in which two identities differ; nothing if they agree."""
    return next(
        (
            name
            for name in sorted({*kept, *own})
            if kept.get(name, MISSING) != own.get(name, MISSING)
        ),
        "",
    )
