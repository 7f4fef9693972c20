"""What another model makes of the training samples, as part of a training loss."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from equipoise.core import SettingError, choose, require_positive, require_type
from equipoise.engine.checkpoint import checksum
from equipoise.engine.loss_term import LossTerm
from equipoise.engine.solve_monitor import SolveMonitor
from equipoise.engine.tasks import Task
from equipoise.models import find_equilibria
from equipoise.solvers.policy import SolveLog

__all__ = ["TEACHER", "Distillation", "DistillationLoss"]

KEY = "task.teacher"
TEACHER = "the weights or settings of the teacher"
TEMPERATURES = (0.01, 1000.0)
"""Outside them, probabilities are those of the largest outputs alone, or all the same."""


@dataclass(frozen=True)
class Distillation:
    """Who teaches a model, and how much its word counts.

    Args:
        run: The folder of the run whose weights teach.
        weight: The weight of `DistillationLoss` beside the loss of the task.
        temperature: What all outputs are divided by before they become probabilities; above 1, the
            teacher's small ones count more. From 0.01 to 1000.
    """

    run: str
    weight: float = 4.0
    temperature: float = 4.0

    def __post_init__(self) -> None:
        require_type(f"{KEY}.run", self.run, str, "the folder of a run")
        if not self.run:
            raise SettingError(f"{KEY}.run", "be the folder of a run", self.run, got="nothing")
        _require_sizes(self.weight, self.temperature)

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Self:
        """Return the settings in a table, as of a config.

        Args:
            table: Such as `{ run = "runs/teacher", weight = 4, temperature = 4 }`.
        """
        known = [each.name for each in fields(cls)]
        odd = [name for name in table if name not in known]
        if odd:
            choose(KEY, odd[0], known, "have only the settings")
        return cls(**{"run": "", **table})


def _require_sizes(weight: float, temperature: float) -> None:
    require_positive(f"{KEY}.weight", weight)
    require_positive(f"{KEY}.temperature", temperature)
    low, high = TEMPERATURES
    if not low <= temperature <= high:
        raise SettingError(f"{KEY}.temperature", f"be from {low:g} to {high:g}", temperature)


class DistillationLoss(LossTerm):
    """`T^2 KL(p || q)`, `p` and `q` the teacher's and the model's probabilities at temperature `T`.

    `p = softmax(teacher(x)/T)` and `q = softmax(model(x)/T)` in the mean over the samples (Hinton,
    Vinyals & Dean, 2015). The factor `T^2` keeps the size of the gradients at every temperature.
    Both are computed in float64, since at a high temperature they differ little.
    The teacher sees the samples as they were varied at random, but at their own size where
    `train.image_sizes` shrinks them for the model.
    What teaches is a copy of its own, in evaluation mode: it learns nothing, and shares nothing
    with the model. A step for which one of its solves diverges, or its outputs are not finite, is
    skipped; solves that miss their tolerance are counted and warned of. The term belongs to one
    trainer, whose passes come one after another.

    Args:
        teacher: The other model, with an output for each class, in the order of the data's.
        task: What the model is trained for.
        weight: The weight in the loss.
        temperature: `T`.
        about: What the teacher was made from, with which alone a run can be resumed.

    Attributes:
        teacher: The copy that teaches.
    """

    name = "distillation_loss"

    def __init__(
        self,
        teacher: nn.Module,
        task: Task,
        weight: float,
        temperature: float,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        _require_sizes(weight, temperature)
        require_type("The teacher", teacher, nn.Module, "a module")
        self.require_task(task, teacher)
        self._about = dict(about or {})
        self.weight, self._temperature = weight, temperature
        self.teacher = copy.deepcopy(teacher).requires_grad_(False).eval()
        for layer in find_equilibria(self.teacher).values():
            layer.solves = SolveLog("warn", "The teacher's equilibrium")
        self._solves = SolveMonitor(self.teacher)
        self._taught: Tensor | None = None

    @staticmethod
    def require_task(task: Task, teacher: object) -> None:
        """Raise unless a task is one that can be taught.

        Args:
            task: What a model is trained for.
            teacher: Who would teach it.
        """
        if not task.takes_mixed_targets:
            rule = f"be left out for the task {task.name!r}, which gives samples no classes"
            raise SettingError(KEY, rule, type(teacher).__name__)

    @contextmanager
    def watching(self, x: Tensor) -> Iterator[None]:
        """Ask the teacher."""
        self._solves.clear()
        with torch.no_grad(), self._solves.listening():
            taught = self.teacher(
                x.clone()
            )  # a teacher that writes to its input leaves the model's
        if not isinstance(taught, Tensor):
            kind = type(taught).__name__
            raise SettingError("The output of the teacher", "be a tensor", taught, got=kind)
        self._taught = taught.double()
        self.missed += int(self._solves.missed(len(x)).sum())
        if self._solves.failure:
            self.failure = f"the teacher's {self._solves.failure}"
        elif not bool(torch.isfinite(self._taught).all()):
            self.failure = (
                "the outputs of the teacher were not finite; look for NaN in the data, or choose "
                "another teacher."
            )
        yield

    def estimate(self, loss: Callable[[Tensor], Tensor], output: Tensor) -> Tensor:
        taught, self._taught = self._taught, None
        if taught is None or taught.shape != output.shape:
            shape = None if taught is None else tuple(taught.shape)
            rule = f"have outputs of shape {tuple(output.shape)}, as the model"
            raise SettingError("The teacher", rule, shape)
        if output.dim() != 2:
            rule = "be one for a model with an output for each class of a sample"
            raise SettingError("The teacher", rule, None, got=f"outputs {tuple(output.shape)}")
        wanted, found = (
            functional.log_softmax(each.double() / self._temperature, 1)
            for each in (taught, output)
        )
        distance = functional.kl_div(found, wanted, log_target=True, reduction="batchmean")
        return self._temperature**2 * distance

    def identity(self) -> dict[str, str | float]:
        """Return what a run that is resumed may not change, with a hash of the teacher."""
        tensors = {
            name: each.cpu().contiguous()
            for name, each in self.teacher.state_dict().items()
            if isinstance(each, Tensor)
        }
        sizes = {"weight": self.weight, "temperature": self._temperature}
        return {
            TEACHER: checksum(tensors, json.dumps(self._about, sort_keys=True, default=str)),
            **{f"{KEY}.{name}": each for name, each in sizes.items()},
        }
