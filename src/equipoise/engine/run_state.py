"""All that a run must remember to resume as if it had never stopped."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core import require_type, require_whole
from equipoise.engine.distributed import Group
from equipoise.engine.optimizer import Average
from equipoise.engine.segment_memory import SegmentMemory
from equipoise.engine.tasks import Task
from equipoise.engine.totals import Totals
from equipoise.engine.warm_start import WarmStart

__all__ = ["RunProgress", "RunState", "load_weights"]


@dataclass
class RunProgress:
    """How far a run is, in plain values.

    Attributes:
        step: Steps made, skipped ones among them.
        epoch: Epochs that are over.
        batch: Batches of the present epoch that are over.
        skipped: Steps skipped.
        epoch_skipped: Steps skipped in the present epoch.
        skipped_in_a_row: Steps skipped in a row.
        first_loss: The loss of the first step that was made.
        best: The best score so far.
        waited: Evaluations since then.
        kept_epoch: Epochs that were over when the weights that are kept were there.
        kept_step: Their step.
        ranking: The best scores and the steps of their checkpoints, the best first.
        seconds: Time that the run has taken.
        epoch_seconds: Time that it had taken when the present epoch began.
        busy: Time that the steps of the present epoch have taken.
        loading: What of it they have waited for samples.
        log: Bytes of the log.
        updates: Updates of the average.
        scale: Of gradients in float16.
        train: Means over the last epoch.
        test: Scores of the weights that are kept.
        confusion: Their confusion matrix.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    skipped: int = 0
    epoch_skipped: int = 0
    skipped_in_a_row: int = 0
    first_loss: float | None = None
    best: float | None = None
    waited: int = 0
    kept_epoch: int = 0
    kept_step: int = 0
    ranking: list[list[float]] = field(default_factory=list)
    seconds: float = 0.0
    epoch_seconds: float = 0.0
    busy: float = 0.0
    loading: float = 0.0
    log: int = 0
    updates: int = 0
    scale: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    test: dict[str, Any] = field(default_factory=dict)
    confusion: list[list[int]] | None = None

    def judge(self, score: float | None, *, higher: bool) -> bool:
        """Compare a score with the best one, remember it if it is better, and return whether it is.

        Args:
            score: The new score; NaN is worse than anything.
            higher: Whether more is better.
        """
        if score is None or math.isnan(score):
            better = False
        elif self.best is None:
            better = True
        else:
            better = score > self.best if higher else score < self.best
        self.best, self.waited = (score, 0) if better else (self.best, self.waited + 1)
        return better

    def rank(self, score: float | None, *, higher: bool, keep: int) -> None:
        """Note the score of the present step if it is among the best.

        Args:
            score: The score; NaN is worse than anything.
            higher: Whether more is better.
            keep: How many are noted.
        """
        if score is not None and not math.isnan(score):
            self.ranking.append([score, self.step])
        # Of equal scores the earlier goes first.
        self.ranking.sort(key=lambda each: -each[0] if higher else each[0])
        del self.ranking[keep:]

    @property
    def best_steps(self) -> set[int]:
        """The steps of the best scores."""
        return {int(step) for _, step in self.ranking}

    def count_step(self, *, skipped: bool, serious: bool) -> None:
        """Count a step.

        Args:
            skipped: Whether it was skipped.
            serious: Whether that was because something failed, so that it counts for a row.
        """
        self.step += 1
        self.batch += 1
        self.skipped += skipped
        self.epoch_skipped += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + serious if skipped else 0

    def count_epoch(self, seconds: float) -> None:
        """Count an epoch that is over.

        Args:
            seconds: Time that it took.
        """
        self.epoch += 1
        self.batch = self.epoch_skipped = 0
        self.busy = self.loading = 0.0
        self.epoch_seconds += seconds

    def load(self, values: Mapping[str, Any]) -> None:
        """Take over plain values, or raise `ValueError`."""
        names = {each.name for each in fields(self)}
        if set(values) != names:
            odd = ", ".join(sorted(set(values) ^ names))
            raise ValueError(f"a checkpoint of another version of equipoise: it differs in {odd}")
        loaded = RunProgress(**values)
        for name in (
            "step",
            "epoch",
            "batch",
            "skipped",
            "epoch_skipped",
            "skipped_in_a_row",
            "waited",
            "kept_epoch",
            "kept_step",
            "log",
            "updates",
        ):
            require_whole(name, getattr(loaded, name))
        kinds: dict[str, tuple[type, ...]] = {
            **dict.fromkeys(("seconds", "epoch_seconds", "busy", "loading"), (int, float)),
            **dict.fromkeys(("scale", "train", "test"), (dict,)),
            **dict.fromkeys(("best", "first_loss"), (int, float, NoneType)),
            "confusion": (list, NoneType),
            "ranking": (list,),
        }
        for name, kind in kinds.items():
            require_type(name, getattr(loaded, name), kind, f"a {kind[-1].__name__}")
        for score, step in loaded.ranking:
            require_type("ranking", score, (int, float), "a number")
            require_whole("ranking", step)
        vars(self).update(vars(loaded))


class RunState:
    """All that changes in a run.

    Args:
        model: The model.
        optimizer: Its optimiser.
        average: The running average of its weights, if there is one.
        scaler: Of gradients in float16.
        task: What the run is for.
        warm: Where the solves of training samples start, if that is kept.

    Attributes:
        position: How far the run is.
        epoch: Sums over the present epoch.
        past: Sums over the epochs that are over.
        kept: The best weights so far, where a run stops early.
        memory: What the model remembers of the texts that it learns from.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        average: Average | None,
        scaler: torch.amp.GradScaler,
        task: Task,
        warm: WarmStart | None = None,
    ) -> None:
        self.model, self.optimizer, self.average, self.scaler = model, optimizer, average, scaler
        self.warm = warm
        self.position = RunProgress()
        self.epoch, self.past = Totals(task), Totals(task)
        self.kept: dict[str, Tensor] = {}
        self.memory = SegmentMemory(model)

    def keep(self) -> None:
        """Remember the present weights as the best so far."""
        self.kept = {name: value.clone() for name, value in self.model.state_dict().items()}

    def finish(self) -> None:
        """Give the model the weights to use: the best, if only those are kept, else the average."""
        if self.kept:
            self.model.load_state_dict(self.kept)
        elif self.average:
            self.average.apply()

    def pack(self, group: Group) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return everything as tensors and plain values; all processes must call it.

        Args:
            group: The processes.
        """
        self.position.updates = self.average.updates if self.average else 0
        self.position.scale = self.scaler.state_dict()
        parts = {
            "model": self.model.state_dict(),
            "optimizer": optimizer_tensors(self.optimizer),
            "average": self.average.values if self.average else {},
            "kept": self.kept,
            "random": random_tensors(group),
            "totals": {"epoch": self.epoch.vector, "past": self.past.vector},
            "warm": self.warm.pack(group) if self.warm else {},
            "memory": self.memory.pack(group),
        }
        return {
            f"{part}.{name}": tensor
            for part, values in parts.items()
            for name, tensor in values.items()
        }, asdict(self.position)

    def unpack(
        self, tensors: Mapping[str, Tensor], position: Mapping[str, Any], group: Group
    ) -> None:
        """Go back to what `pack` returned, or raise `ValueError` if that was another run's.

        Args:
            tensors: The tensors.
            position: The plain values.
            group: The processes.
        """
        parts: dict[str, dict[str, Tensor]] = {
            "kept": {},
            "optimizer": {},
            "average": {},
            "random": {},
            "warm": {},
            "memory": {},
        }
        for name, tensor in tensors.items():
            part, _, rest = name.partition(".")
            parts.setdefault(part, {})[rest] = tensor
        self.position.load(position)
        if parts["kept"]:
            load_weights(self.model, parts["kept"])
            self.keep()
        load_weights(self.model, parts["model"])
        load_optimizer(self.optimizer, parts["optimizer"])
        if self.average:
            self.average.load(parts["average"], self.position.updates)
        self.scaler.load_state_dict(self.position.scale)
        if self.warm:
            self.warm.unpack(parts["warm"])
        load_random(parts["random"], group)
        self.memory.load(parts["memory"], group)
        for totals, name in ((self.epoch, "epoch"), (self.past, "past")):
            if (
                parts["totals"][name].shape != totals.vector.shape
                or parts["totals"][name].dtype != torch.float64
            ):
                raise ValueError("sums of another task")
            totals.load(parts["totals"][name])


def load_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give a model its weights and buffers, or raise `ValueError` if they are another model's.

    Args:
        model: The model.
        tensors: Its state, by name.
    """
    own = model.state_dict()
    if odd := sorted(set(own) ^ set(tensors)):
        raise ValueError(f"weights of another model: {odd[0]!r} is in one of them only")
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape or tensor.dtype != own[name].dtype:
            raise ValueError(
                f"weights of another model: {name!r} is {_kind(tensor)} where "
                f"{_kind(own[name])} belongs"
            )
    model.load_state_dict(dict(tensors))


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the state of an optimiser as tensors called `INDEX.NAME`."""
    state = optimizer.state_dict()["state"]
    return {
        f"{index}.{name}": torch.as_tensor(value)
        for index, each in state.items()
        for name, value in each.items()
        if value is not None
    }


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Give an optimiser of the same weights its state, or raise `ValueError`.

    Args:
        optimizer: The optimiser.
        tensors: What `optimizer_tensors` returned.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        index, _, name = key.partition(".")
        if (
            not index.isdecimal()
            or int(index) >= len(weights)
            or (tensor.dim() and tensor.shape != weights[int(index)].shape)
        ):
            raise ValueError(f"an optimiser of other weights: {key!r}")
        # In the layout of its weight, since the order of memory decides how sums are rounded.
        like = weights[int(index)]
        state.setdefault(int(index), {})[name] = (
            torch.empty_like(like).copy_(tensor) if tensor.dim() else tensor
        )
    optimizer.load_state_dict(
        {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
    )


def random_tensors(group: Group) -> dict[str, Tensor]:
    """Return the states of torch's random numbers in all processes."""
    own = {"cpu": torch.get_rng_state()}
    if group.device.type == "cuda":
        own["cuda"] = torch.cuda.get_rng_state(group.device)
    found: dict[str, Tensor] = {}
    for name, state in own.items():
        rows = torch.zeros(group.world, len(state), dtype=torch.float64)
        rows[group.rank] = state.double()
        found[name] = group.sum(rows).to(torch.uint8)
    return found


def load_random(tensors: Mapping[str, Tensor], group: Group) -> None:
    """Set torch's random numbers to what they were.

    Nothing is set where there were other numbers of processes, or another kind of device.

    Args:
        tensors: What `random_tensors` returned.
        group: The processes.
    """
    cpu, cuda = tensors.get("cpu"), tensors.get("cuda")
    if cpu is not None and cpu.shape == (group.world, len(torch.get_rng_state())):
        torch.set_rng_state(
            cpu[group.rank].clone()
        )  # of a view with an offset, torch reads beyond the end
    if cuda is not None and group.device.type == "cuda" and len(cuda) == group.world:
        torch.cuda.set_rng_state(cuda[group.rank].clone(), group.device)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
