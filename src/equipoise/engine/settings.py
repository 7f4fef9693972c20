"""What a training run is told: how long, by which optimiser, on which schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from equipoise.core import choose, require_count, require_fraction, require_positive

__all__ = ["OptimizerConfig", "Precision", "ScheduleConfig", "TrainConfig"]

Precision = Literal["float32", "bfloat16", "float16"]
OptimizerName = Literal["sgd", "adam", "adamw"]
ScheduleName = Literal["constant", "step", "cosine", "one-cycle", "poly"]
THREADS = 1024  # more than any machine has cores for; torch takes what it is told


@dataclass(frozen=True)
class TrainConfig:
    """How a run goes.

    Args:
        epochs: Passes over the training data.
        batch: Samples in each step, over all processes together.
        evaluate_batch: Samples in each batch of an evaluation, in each process.
        seed: Of the weights, the order of the data and all that is random.
        clip: Largest norm of the gradient of all weights together; longer ones are shortened. 0
            leaves them.
        precision: Of what autocast may run lower than float32.
        ema: Decay of the running average of the weights that is evaluated and kept in place of the
            last ones; 0 has none.
        patience: Epochs without a better score on the held-out samples after which the run stops; 0
            never stops early.
        failures: Steps skipped in a row, because a solve diverged or something was not finite,
            after which the run stops.
        checkpoint_minutes: Time between two checkpoints; there is also one after each epoch.
        checkpoint_steps: Steps between two checkpoints; 0 goes by time only.
        log_every: Steps between two lines of metrics.
        device: Where to train; `auto` takes a GPU if there is one.
        threads: Threads of torch on a CPU; 0 leaves them.
        flush_denormals: Whether numbers too small for float32's full precision become zero, which
            CPUs compute much faster.
        tensorboard: Whether to write metrics for TensorBoard as well.

    Attributes:
        free: The settings that a run may be resumed with others of, since they do not change what
            is computed.
    """

    free: ClassVar[tuple[str, ...]] = (
        "evaluate_batch",
        "failures",
        "checkpoint_minutes",
        "checkpoint_steps",
        "log_every",
        "device",
        "threads",
        "tensorboard",
    )

    epochs: int = 10
    batch: int = 128
    evaluate_batch: int = 256
    seed: int = 0
    clip: float = 0.0
    precision: Precision = "float32"
    ema: float = 0.0
    patience: int = 0
    failures: int = 10
    checkpoint_minutes: float = 5.0
    checkpoint_steps: int = 0
    log_every: int = 10
    device: str = "auto"
    threads: int = 0
    flush_denormals: bool = True
    tensorboard: bool = False

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "evaluate_batch", "failures", "log_every"):
            require_count(f"train.{name}", getattr(self, name))
        for name in ("seed", "patience", "checkpoint_steps", "threads"):
            _require_whole(f"train.{name}", getattr(self, name))
        if self.seed >= 2**63:
            raise ValueError(f"train.seed must be less than 2**63; got {self.seed}.")
        if self.threads > THREADS:
            raise ValueError(f"train.threads must be at most {THREADS}; got {self.threads}.")
        require_positive("train.clip", self.clip, or_zero=True)
        require_positive("train.checkpoint_minutes", self.checkpoint_minutes)
        choose("train.precision", self.precision, get_args(Precision))
        if not 0 <= self.ema < 1:
            raise ValueError(f"train.ema must be in [0, 1); got {self.ema}.")


@dataclass(frozen=True)
class OptimizerConfig:
    """Which optimiser, and how far it steps.

    Args:
        name: `sgd`, `adam` (decay joins the gradient) or `adamw` (decay shrinks the weights).
        learning_rate: The largest one of the schedule.
        weight_decay: Strength of the decay of weights.
        decay_all: Whether biases and the scales of normalisations, which have one dimension, decay
            too.
        momentum: Of `sgd`.
        nesterov: Whether the momentum of `sgd` is Nesterov's.
        betas: Decays of the averages of `adam` and `adamw`.
        epsilon: Added to the denominator of `adam` and `adamw`.
    """

    name: OptimizerName = "adamw"
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    decay_all: bool = False
    momentum: float = 0.9
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        choose("optimizer.name", self.name, get_args(OptimizerName))
        require_positive("optimizer.learning_rate", self.learning_rate)
        require_positive("optimizer.epsilon", self.epsilon)
        require_positive("optimizer.weight_decay", self.weight_decay, or_zero=True)
        for name, value in (("momentum", self.momentum), *(("betas", beta) for beta in self.betas)):
            if not 0 <= value < 1:
                raise ValueError(f"optimizer.{name} must be in [0, 1); got {value}.")
        if self.nesterov and not self.momentum:
            raise ValueError("optimizer.nesterov must come with a positive momentum; got 0.")


@dataclass(frozen=True)
class ScheduleConfig:
    """How the learning rate changes: a factor of the optimiser's own that depends on nothing but the number of the step.

    Args:
        name: `constant`; `step` (falls at milestones); `cosine`; `one-cycle` (rises, then falls far
            below its start; Smith, 2018); `poly` (a power of what remains).
        warmup: Epochs, whole or not, in which the factor first rises from zero.
        milestones: Epochs after which `step` falls.
        drop: Factor of each fall of `step`.
        final: Factor at the end of `cosine`, `one-cycle` and `poly`.
        initial: Factor at the start of `one-cycle`.
        rise: Part of the run in which `one-cycle` rises.
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
        if any(not value > 0 for value in self.milestones) or list(self.milestones) != sorted(
            set(self.milestones)
        ):
            raise ValueError(
                f"schedule.milestones must be positive and rise; got {self.milestones}."
            )
        if self.name == "one-cycle" and self.warmup:
            raise ValueError(
                "schedule.warmup must be 0 for 'one-cycle', which rises by itself; got "
                f"{self.warmup}. Set schedule.rise."
            )
        if self.name == "step" and not self.milestones:
            raise ValueError(
                "schedule.milestones must name at least one epoch for 'step'; got none."
            )

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
            done = (step - begin) / max(
                steps - 1 - begin, 1
            )  # as the schedule was published, the last step is at its end
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


def _require_whole(owner: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{owner} must be a whole number of at least 0; got {value!r}.")
