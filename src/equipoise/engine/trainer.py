"""Training that resumes where it was stopped, bit for bit, and never steps on a failed solve."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, nullcontext
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core import (
    ConvergenceError,
    Interrupted,
    RepeatedNotes,
    flush_denormals,
    interruptible,
    interruption,
    stop_requested,
    uninterrupted,
)
from equipoise.core.printable import printable_name
from equipoise.data import Dataset, Loading, Transform
from equipoise.engine.check_settings import check_settings
from equipoise.engine.correction import Correction, CorrectionLoss
from equipoise.engine.course import Course
from equipoise.engine.distillation import DistillationLoss
from equipoise.engine.distributed import Group
from equipoise.engine.evaluate import Evaluation, evaluate
from equipoise.engine.jacobian_penalty import JacobianPenalty
from equipoise.engine.log import MetricLog
from equipoise.engine.loss_term import LossTerm
from equipoise.engine.optimizer import Average, make_optimizer
from equipoise.engine.precision import describe_emulation
from equipoise.engine.probe import Probe
from equipoise.engine.progress import Progress, make_progress, shown_by
from equipoise.engine.progress_line import wrap_line
from equipoise.engine.run_folder import RunFolder, run_identity
from equipoise.engine.run_state import RunState
from equipoise.engine.scorer import Scorer
from equipoise.engine.settings import OptimizerConfig, ScheduleConfig, TrainConfig
from equipoise.engine.solve_monitor import SolveMonitor, norm_limit, operator_norms
from equipoise.engine.step import Stepper, part_size
from equipoise.engine.step_recorder import StepRecorder
from equipoise.engine.summary import Summary
from equipoise.engine.tasks import Task
from equipoise.layers import Cell, project_norms_after
from equipoise.layers.declarations import projects_of
from equipoise.models import count_parameters

__all__ = ["Trainer"]


class Wish(IntEnum):
    """What is to be done between two steps; the processes of a group agree on the largest."""

    CONTINUE = 0
    SAVE = 1
    STOP = 2  # after saving


class Trainer:
    """Trains a model on a task.

    A step whose forward or backward solve diverged or met NaN, or whose loss or gradient is not
    finite, is skipped: weights, buffers, averages and the optimiser stay as they were, bit for bit.
    Ten skipped in a row end the run with a `ConvergenceError` that says why.

    With a folder, the run writes `metrics.jsonl`, `checkpoints/` and `model.safetensors` there, and
    `fit(resume=True)` resumes from the last checkpoint as if it had never stopped, in the middle of
    an epoch too.

    Args:
        model: What to train.
        task: What it is trained for.
        train: The samples to learn from.
        test: The samples to score after epochs.
        held_out: Whether `test` was held out of the training data; early stopping needs that.
        settings: How the run goes.
        optimizer: Which optimiser.
        schedule: How the learning rate changes.
        transform: What is done to each training batch.
        test_transform: What is done to each test batch.
        loading: How samples are loaded; by default they are read when they are needed.
        folder: Where the run is kept, if anywhere.
        group: The processes that train together; by default this one alone, on a CPU.
        progress: Where to show how it goes; by default the terminal.
        jacobian_penalty: Weight of `JacobianPenalty` in the loss; 0 adds nothing.
        correction: At which iterates of a solve the loss is taken too, if at any.
        distillation: What another model teaches, if one does.
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
        loading: Loading | None = None,
        folder: Path | None = None,
        group: Group | None = None,
        progress: Progress | None = None,
        jacobian_penalty: float = 0.0,
        correction: Correction | None = None,
        distillation: DistillationLoss | None = None,
    ) -> None:
        self.task, self.train, self.test, self.held_out = task, train, test, held_out
        self.settings, self.schedule = settings or TrainConfig(), schedule or ScheduleConfig()
        self.optimizer_settings = optimizer or OptimizerConfig()
        self.transform, self.test_transform = transform, test_transform
        self.loading = loading or Loading()
        self.group = group or Group()
        self.folder = folder
        self.progress = progress or make_progress(quiet=not self.group.is_main)
        check_settings(
            self.settings,
            model,
            samples=len(train),
            world=self.group.world,
            held_out=test is not None and held_out,
            transform=transform,
        )
        self.course = Course(
            train,
            self.settings,
            self.group,
            transform=transform,
            loading=self.loading,
            continuous=getattr(model, "memory_length", 0) > 0,
        )
        self.model = model.to(self.group.device)
        shown = transform if test is None else test_transform
        self.probe = Probe(model, task, train, shown, self.group.device)
        self.probe.check_model()
        self.optimizer = make_optimizer(model, self.optimizer_settings)
        if any(isinstance(part, Cell) and projects_of(part) for part in model.modules()):
            project_norms_after(self.optimizer, model)
        self.average = Average(model, self.settings.ema) if self.settings.ema else None
        scaler = torch.amp.GradScaler(
            self.group.device.type, enabled=self.settings.precision == "float16"
        )
        self.warm = self.probe.make_warm_start(self.settings)
        self.image_sizes = self.probe.make_image_sizes(self.settings)
        self.state = RunState(model, self.optimizer, self.average, scaler, task, self.warm)
        self.position = self.state.position
        self.solves = SolveMonitor(model)
        terms: list[LossTerm] = []
        if correction is not None:  # the first, so that no other term watches what it computes
            terms.append(CorrectionLoss(model, correction))
        if jacobian_penalty:
            terms.append(JacobianPenalty(model, jacobian_penalty))
        if distillation is not None:
            distillation.require_task(task, distillation.teacher)
            terms.append(distillation)
        self.stepper = Stepper(self.state, task, self.settings, self.group, self.solves, terms)
        identity = run_identity(
            self.settings,
            self.optimizer_settings,
            self.schedule,
            self.train,
            self.test,
            distillation,
        )
        self.store = RunFolder(folder, self.state, self.group, self.settings, identity)
        self.scorer = Scorer(
            self.store,
            self.settings,
            task.metric,
            test,
            "validation" if held_out else "test",
            train.about(),
        )
        self.notes = RepeatedNotes(self.progress.note)
        self.recorder = StepRecorder(self.stepper, self.progress, self.notes)
        self.began = False
        self.started = 0.0

    def fit(self, *, resume: bool = False) -> Summary:
        """Train to the end; the model then has the weights that were scored.

        Args:
            resume: Whether to resume from the last checkpoint in the folder, if there is one.
        """
        settings, position, group = self.settings, self.position, self.group
        if self.began:
            raise ValueError(
                "Trainer.fit must be called once; got a second call. Make a new Trainer, and call "
                "its fit with resume=True."
            )
        self.began = True
        with ExitStack() as stack:
            if settings.flush_denormals and group.device.type == "cpu":
                stack.enter_context(flush_denormals())
            torch.manual_seed(settings.seed + group.rank)
            stack.enter_context(self.store.hold())
            self.store.restore(resume=resume)
            # State is in place before anything is wrapped or differentiated: later, copies of it
            # would go their own ways.
            self.stepper.wrapped = group.wrap(self.model)
            log = stack.enter_context(self.store.open_log())
            stack.enter_context(self.progress)
            stack.enter_context(self.notes)
            stack.enter_context(shown_by(self.progress, self.notes))
            stack.enter_context(self.solves.listening())
            stack.enter_context(interruptible())
            stack.enter_context(uninterrupted())
            self.progress.start(
                self.course.epochs,
                self.course.steps,
                position.step,
                self.title(),
                scored=self.scorer.samples_left(self.course.epochs),
                batch=settings.batch,
            )
            for remark in self.remarks():
                self.progress.note(remark)
            if not position.step:
                self.store.keep_weights(0, self.model.state_dict())
            self.store.start_clock()
            self.started = time.monotonic() - position.seconds
            while not self.course.is_over(self.position) and not (
                settings.patience and position.waited >= settings.patience
            ):
                self._train_epoch(log)
                # An evaluation may take long; a run that is stopped there makes it when resumed.
                self.store.save(log, self._elapsed())
                self._end_epoch(log)
                self.store.save(log, self._elapsed())
                if not self.course.is_over(self.position) and group.any(stop_requested()):
                    raise self._interrupted()
            with self.average.applied() if self.average else nullcontext():
                self.scorer.score_last(self._evaluate)
            self.state.finish()
            self.probe.check_model()
            self.scorer.finish(self._evaluate)
            return self._summary()

    def _train_epoch(self, log: MetricLog) -> None:
        """Make the steps of the present epoch that are not made yet."""
        settings, position, group = self.settings, self.position, self.group
        samples, busy, waited = 0, 0.0, 0.0  # since the last line of metrics
        with closing(self.course.batches(position)) as found:
            batch_start = time.monotonic()
            for (x, y), rows in zip(found, self.course.rows(position), strict=True):
                loaded = time.monotonic() - batch_start
                line = self._step(x.to(group.device), y.to(group.device), rows)
                seconds = time.monotonic() - batch_start
                samples += len(x) * group.world
                busy += seconds
                waited += loaded
                position.busy += seconds
                position.loading += loaded
                if line is not None:
                    speed = {
                        "samples_per_second": samples / busy,
                        "loading_fraction": waited / busy,
                    }
                    log.write({**line, **speed})
                    samples, busy, waited = 0, 0.0, 0.0
                if position.skipped_in_a_row >= settings.failures:
                    raise ConvergenceError(
                        f"{position.skipped_in_a_row} steps in a row were skipped, up to step "
                        f"{position.step}: {self.stepper.skip_reason}"
                    )
                wish = self._wish()
                if wish is not Wish.CONTINUE:
                    self.store.save(log, self._elapsed())
                    if wish is Wish.STOP or group.any(stop_requested()):
                        raise self._interrupted()
                batch_start = time.monotonic()

    def _wish(self) -> Wish:
        """Return what all processes do after this step: they must agree."""
        own = Wish.CONTINUE
        self.store.refresh()
        if stop_requested():
            own = Wish.STOP
        elif self.group.is_main and self.store.save_is_due():
            own = Wish.SAVE
        return Wish(int(self.group.max(float(own))))

    def remarks(self) -> Iterator[str]:
        """Return what a user should know of how the run is computed, a sentence each."""
        if self.warm is not None:
            yield self.warm.describe()
        if slow := describe_emulation(self.group.device, self.settings.precision):
            yield slow

    def title(self) -> str:
        """Return what is trained on what, in a line or two."""
        name = getattr(self.model, "name", type(self.model).__name__)
        parameters = count_parameters(self.model)["total"]
        where = f", kept in {printable_name(self.folder)}" if self.folder else ""
        return wrap_line(
            f"{name} with {parameters:,} parameters on {len(self.train):,} samples of "
            f"{self.train.name}{where}"
        )

    def _elapsed(self) -> float:
        """Time that the run has taken, before it was resumed too."""
        return time.monotonic() - self.started

    def _interrupted(self) -> Interrupted:
        kept = (
            "a checkpoint was written"
            if self.folder
            else "nothing was kept, since it has no folder"
        )
        return interruption(f"the run was interrupted at step {self.position.step}; {kept}")

    def _step(self, x: Tensor, y: Tensor, rows: Tensor) -> dict[str, Any] | None:
        """Make one step or skip it, and return its line of metrics if one is due."""
        number = self.position.step
        seen = self.image_sizes(x, number, self.course.steps)
        step = self.stepper.compute(seen, y, self.learning_rate(number), rows, whole=x)
        verdict = self.stepper.verdict(step)
        self.stepper.apply(step, verdict)
        return self.recorder.record(step, verdict)

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step.

        Args:
            step: Its number, from 0.
        """
        return self.optimizer_settings.learning_rate * self.schedule.factor(
            step, self.course.steps, self.course.steps_per_epoch
        )

    # The end of an epoch and of the run.

    def _end_epoch(self, log: MetricLog) -> None:
        """Score the weights, keep them if they are to be kept, and write the line of the epoch."""
        position, line = self.position, self.state.epoch.line()
        if self.warm is not None:
            self.warm.share(self.group)
        with self.average.applied() if self.average else nullcontext():
            scores = self.scorer.end_epoch(self._evaluate)
            self.store.keep_weights(position.epoch + 1, self.model.state_dict())
            norms = operator_norms(self.model)
            activity = self._measure_parts()
        position.train = {key: line[key] for key in ("loss", *self.state.epoch.score.compute())}
        seconds = self._elapsed() - position.epoch_seconds
        world = self.group.world
        samples = min(position.batch * self.settings.batch, len(self.train) // world * world)
        solves = ("forward_steps", "backward_steps", "forward_status", "backward_status")
        whole = {
            "kind": "epoch",
            "epoch": position.epoch,
            "step": position.step,
            "learning_rate": self.learning_rate(position.step - 1),
            "train": position.train,
            **scores,
            **{key: line[key] for key in solves},
            "skipped": position.epoch_skipped,
            "operator_norms": norms,
            "norm_limit": norm_limit(self.model),
            **activity,
            "seconds": seconds,
            "samples_per_second": samples / position.busy,
            "loading_fraction": position.loading / position.busy,
        }
        log.write(whole)
        self.progress.epoch(position.epoch, whole)
        self.state.past.load(self.state.past.vector + self.state.epoch.vector)
        self.state.epoch.clear()
        self.state.memory.forget()
        position.count_epoch(seconds)

    def _measure_parts(self) -> dict[str, dict[str, float]]:
        """What the parts of cells get and give, for the log; a note tells of those that are idle.

        It is measured on the first training samples, at most as many as a step computes at once.
        """
        if not self.group.is_main:
            return {}
        count = part_size(self.course.local_batch, self.settings.accumulate)
        found = self.probe.measure_parts(count)
        if found is None:
            return {}
        if found.idle:
            self.notes.note(found.describe_idle())
        return {"part_gradients": found.gradients, "part_contributions": found.contributions}

    def evaluate(self, dataset: Dataset) -> Evaluation:
        """Score a data set with the present weights, as after each epoch.

        Args:
            dataset: What to score.
        """
        with self.progress:
            return self._evaluate(dataset)

    def _evaluate(self, dataset: Dataset) -> Evaluation:
        self.probe.check_model()

        def on_batch(done: int, total: int) -> None:
            self.store.refresh()
            self.progress.evaluate(done, total, self.position.epoch)

        settings, cpu = self.settings, self.group.device.type == "cpu"
        with flush_denormals() if settings.flush_denormals and cpu else nullcontext():
            try:
                return evaluate(
                    self.model,
                    self.task,
                    dataset,
                    batch=settings.evaluate_batch,
                    transform=self.test_transform,
                    group=self.group,
                    precision=settings.precision,
                    on_batch=on_batch,
                    loading=self.loading,
                )
            except Interrupted as error:
                raise self._interrupted() from error

    def _summary(self) -> Summary:
        position, line = self.position, self.state.past.line()
        return Summary(
            stopped="finished" if self.course.is_over(self.position) else "early",
            epochs=position.epoch,
            kept_epoch=position.kept_epoch,
            steps=position.step,
            seconds=self._elapsed(),
            parameters=count_parameters(self.model),
            metric=self.task.metric.name,
            train=position.train,
            validation=position.test if self.held_out else {},
            test={} if self.held_out else position.test,
            skipped=position.skipped,
            forward_status=line["forward_status"],
            backward_status=line["backward_status"],
            classes=self.train.classes,
            confusion=position.confusion,
        )
