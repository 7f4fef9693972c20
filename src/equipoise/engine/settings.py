"""Settings of a training run: its length, its optimiser, its schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

from equipoise.core import (
    SettingError,
    choose,
    require_between,
    require_count,
    require_fraction,
    require_positive,
    require_whole,
)

__all__ = ["OptimizerConfig", "Precision", "ScheduleConfig", "TrainConfig"]

Precision = Literal["float32", "bfloat16", "float16"]
OptimizerName = Literal["sgd", "adam", "adamw", "muon"]
ScheduleName = Literal["constant", "step", "cosine", "one-cycle", "poly"]
MAX_SEED = 2**63 - 1  # what torch.manual_seed takes
MAX_THREADS = 1024  # more than any machine has cores for; torch would try


@dataclass(frozen=True)
class TrainConfig:
    """How a run is trained.

    Args:
        epochs: Passes over the training data.
        steps: Steps of the run in place of its epochs, the last of which may then be shorter; 0
            goes by epochs.
        batch: Samples in each step, over all processes together.
        accumulate: Parts in which each process computes the gradient of a step, one after another,
            for batches that do not fit in memory. The result is that of the whole batch up to
            rounding, except that batch normalisation sees each part by itself.
        evaluate_every: Epochs between two evaluations; the weights that are kept are scored in the
            end in any case.
        evaluate_samples: How many samples are scored after an epoch, drawn once, or the first of a
            text; all are scored in the end. 0 scores all each time.
        evaluate_batch: Samples in each batch of an evaluation, in each process. A model with a
            memory reads a text in so many pieces, at the beginning of which it remembers nothing.
        seed: The seed of everything random: the initial weights, the order of the data, and so on.
        clip: Largest norm of the gradient of all weights together; longer ones are scaled down. 0
            does not clip.
        precision: What autocast may compute in; solves do so in bfloat16, if their tolerance is at
            least 0.016.
        ema: Decay of the running average of the weights, which is evaluated and kept in place of
            the last weights; 0 keeps no average.
        patience: Evaluations without a better score on the held-out samples after which the run
            stops; 0 never stops early.
        failures: Steps skipped in a row, because a solve diverged or something was not finite,
            after which the run stops.
        checkpoint_minutes: Time between two checkpoints; there is also one after each epoch.
        checkpoint_steps: Steps between two checkpoints; 0 goes by time only.
        checkpoint_keep: How many checkpoints are kept, the newest.
        checkpoint_best: How many are kept beside them, those with the best scores.
        weights_every: Epochs between two copies of the weights that are kept in `weights/`, from
            the first ones on, to look at the way of training later; 0 keeps none.
        log_every: Steps between two lines of metrics.
        device: Where to train; `auto` uses a GPU if there is one.
        threads: Threads of torch on a CPU; 0 keeps torch's own number.
        image_sizes: Sides of the training images in equal parts of the run, such as `[16, 24, 32]`,
            of which the last is their own; none keeps it. See `ImageSizes`.
        warm_start: Whether the solves of a training sample start where those of the same sample
            ended in the epoch before. For samples that do not change at random; see `WarmStart`.
        warm_start_memory: MiB that each process may keep for that.
        flush_denormals: Whether numbers too small for float32's full precision become zero, which
            is much faster on CPUs.
        tensorboard: Whether to write metrics for TensorBoard as well.

    Attributes:
        free: The settings that may change when a run is resumed, because they do not change what is
            computed; `evaluate_batch` may not for a text, whose scores depend on it.
    """

    free: ClassVar[tuple[str, ...]] = (
        "evaluate_batch",
        "failures",
        "checkpoint_minutes",
        "checkpoint_steps",
        "checkpoint_keep",
        "checkpoint_best",
        "weights_every",
        "log_every",
        "device",
        "threads",
        "warm_start_memory",
        "tensorboard",
    )

    epochs: int = 10
    steps: int = 0
    batch: int = 128
    accumulate: int = 1
    evaluate_every: int = 1
    evaluate_samples: int = 0
    evaluate_batch: int = 256
    seed: int = 0
    clip: float = 0.0
    precision: Precision = "float32"
    ema: float = 0.0
    patience: int = 0
    failures: int = 10
    checkpoint_minutes: float = 5.0
    checkpoint_steps: int = 0
    checkpoint_keep: int = 2
    checkpoint_best: int = 0
    weights_every: int = 0
    log_every: int = 10
    device: str = "auto"
    threads: int = 0
    image_sizes: tuple[int, ...] = ()
    warm_start: bool = False
    warm_start_memory: int = 1024
    flush_denormals: bool = True
    tensorboard: bool = False

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "accumulate", "evaluate_every", "evaluate_batch"):
            require_count(f"train.{name}", getattr(self, name))
        for name in ("failures", "log_every", "checkpoint_keep"):
            require_count(f"train.{name}", getattr(self, name))
        for name in (
            "steps",
            "evaluate_samples",
            "patience",
            "checkpoint_steps",
            "checkpoint_best",
            "warm_start_memory",
            "weights_every",
        ):
            require_whole(f"train.{name}", getattr(self, name))
        for side in self.image_sizes:
            require_count("train.image_sizes", side)
        require_whole("train.seed", self.seed, MAX_SEED)
        require_whole("train.threads", self.threads, MAX_THREADS)
        require_positive("train.clip", self.clip, or_zero=True)
        require_positive("train.checkpoint_minutes", self.checkpoint_minutes)
        choose("train.precision", self.precision, get_args(Precision))
        require_between("train.ema", self.ema, 0, 1, "[)")
        if self.image_sizes and self.warm_start:
            raise SettingError(
                "train.warm_start",
                "be false with train.image_sizes, since states change their size with the images",
                True,
            )


@dataclass(frozen=True)
class OptimizerConfig:
    """Which optimiser, and how large its steps are.

    Args:
        name: `sgd`, `adam` (decay is added to the gradient), `adamw` (decay shrinks the weights) or
            `muon` (orthogonalised momentum for matrices and kernels, `adamw` for the rest).
        learning_rate: The largest learning rate of the schedule.
        weight_decay: Strength of the weight decay.
        decay_all: Whether biases, the scales of normalisations, and whatever else has one dimension
            or the shape `(channels, 1, 1)`, decay too.
        momentum: The momentum of `sgd` and `muon`.
        nesterov: Whether `sgd` uses Nesterov's momentum; `muon` always does.
        betas: Decays of the averages of `adam`, `adamw` and `muon`.
        epsilon: Added to the denominator of `adam`, `adamw` and `muon`.
        rates: Factors of the learning rate for some parameters, by pattern: a pattern matches the
            names that have its words, between dots, in this order, such as
            `"equilibrium.operators" = 0.25`; 0 keeps parameters as they are.
    """

    name: OptimizerName = "adamw"
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    decay_all: bool = False
    momentum: float = 0.9
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    rates: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        choose("optimizer.name", self.name, get_args(OptimizerName))
        require_positive("optimizer.learning_rate", self.learning_rate)
        for pattern, rate in self.rates.items():
            require_positive(f'optimizer.rates."{pattern}"', rate, or_zero=True)
        require_positive("optimizer.epsilon", self.epsilon)
        require_positive("optimizer.weight_decay", self.weight_decay, or_zero=True)
        for name, value in (("momentum", self.momentum), *(("betas", beta) for beta in self.betas)):
            require_between(f"optimizer.{name}", value, 0, 1, "[)")
        if self.nesterov and not self.momentum:
            raise SettingError(
                "optimizer.nesterov",
                "be false without momentum",
                self.nesterov,
                "Set optimizer.momentum.",
            )


@dataclass(frozen=True)
class ScheduleConfig:
    """How the learning rate changes: by a factor that depends only on the number of the step.

    Args:
        name: `constant`; `step` (drops at milestones); `cosine`; `one-cycle` (rises, then falls far
            below its start; Smith, 2018); `poly` (a power of the fraction of the run that is left).
        warmup: Epochs, whole or not, in which the factor first rises from zero.
        milestones: Epochs after which `step` drops.
        drop: What `step` multiplies the factor by at each milestone.
        final: Factor at the end of `cosine`, `one-cycle` and `poly`.
        initial: Factor at the start of `one-cycle`.
        rise: Fraction of the run in which `one-cycle` rises.
        power: Exponent of `poly`.
    """

    name: ScheduleName = "cosine"
    warmup: float = 0.0
    milestones: tuple[float, ...] = ()
    drop: float = 0.1
    final: float = 0.0
    initial: float = 0.04
    rise: float = 0.3
    power: float = 0.9

    def __post_init__(self) -> None:
        choose("schedule.name", self.name, get_args(ScheduleName))
        for name in ("warmup", "final", "initial", "power"):
            require_positive(f"schedule.{name}", getattr(self, name), or_zero=True)
        require_fraction("schedule.rise", self.rise)
        require_positive("schedule.drop", self.drop)
        for value in self.milestones:
            require_positive("schedule.milestones", value)
        if list(self.milestones) != sorted(set(self.milestones)):
            raise SettingError("schedule.milestones", "increase", self.milestones)
        if self.name == "one-cycle" and self.warmup:
            raise SettingError(
                "schedule.warmup",
                "be 0 for 'one-cycle', which has a rise of its own",
                self.warmup,
                "Set schedule.rise.",
            )
        if self.name == "step" and not self.milestones:
            raise SettingError(
                "schedule.milestones",
                "name at least one epoch for 'step'",
                self.milestones,
                got="none",
            )

    @property
    def depends_on_length(self) -> bool:
        """Whether the factor of a step depends on how many steps the whole run has."""
        return self.name not in ("constant", "step")

    def factor(self, step: int, steps: int, steps_per_epoch: int) -> float:
        """Return the factor of the learning rate at one step of a run.

        Args:
            step: The number of the step, from 0.
            steps: Steps of the whole run.
            steps_per_epoch: Steps of one epoch.
        """
        ramp = self.warmup * steps_per_epoch
        if step < ramp:
            return (step + 1) / (math.ceil(ramp) + 1)
        if self.name == "step":
            return math.prod(
                self.drop for epoch in self.milestones if step >= epoch * steps_per_epoch
            )
        begin = math.ceil(ramp)
        done = (step - begin) / max(steps - begin, 1)
        if self.name == "cosine":
            return _cosine(1, self.final, done)
        if self.name == "poly":
            return self.final + (1 - self.final) * math.pow(max(1 - done, 0.0), self.power)
        if self.name == "one-cycle":
            # As the schedule was published: it ends at the last step.
            done = (step - begin) / max(steps - 1 - begin, 1)
            return (
                _cosine(self.initial, 1, done / self.rise)
                if done < self.rise
                else _cosine(1, self.final, _after(done, self.rise))
            )
        return 1.0


def _cosine(start: float, end: float, done: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * min(done, 1.0))) / 2


def _after(done: float, rise: float) -> float:
    return (done - rise) / (1 - rise) if rise < 1 else 1.0
