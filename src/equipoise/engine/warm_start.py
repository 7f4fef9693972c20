"""Solves of training samples that start where the last solves of the same samples ended.

In training by small steps the equilibrium of a sample moves little from one epoch to the next, so
most of a solve from zero finds again what was known. The equilibrium and the solution of the
adjoint equation are kept for each sample. What is kept decides only where a solve starts: whether
it has converged is decided by its recomputed residual, and evaluation always starts afresh.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from equipoise.core import SettingError
from equipoise.core.module_mode import evaluation_mode
from equipoise.core.tree import row_dot
from equipoise.engine.distributed import Group
from equipoise.gradients.start import StartStates
from equipoise.models import find_equilibria
from equipoise.solvers import Solution, Status
from equipoise.solvers.policy import Direction

__all__ = ["WarmStart"]

KEY = "train.warm_start"
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


class WarmStart:
    """The last solutions of all training samples.

    Samples are known by their positions in the data. With several processes each keeps what it
    finds, and they exchange it after each epoch, since samples come to other processes then.

    Args:
        model: The model, on its device.
        x: A few training samples, to see what its layers solve for.
        samples: How many training samples there are.
        limit: MiB that may be kept in each process.
    """

    def __init__(self, model: nn.Module, x: Tensor, samples: int, limit: int) -> None:
        self.samples = samples
        self._layers = find_equilibria(model)
        if not self._layers:
            raise SettingError(KEY, "be false for a model without equilibrium layers", True)
        for name, layer in self._layers.items():
            solver = type(layer.solver).__name__
            if layer.gradient.depends_on_start or (layer.solver and layer.solver.runs_all_steps):
                what = type(layer.gradient).__name__ if layer.gradient.depends_on_start else solver
                raise SettingError(
                    KEY, f"be false for layer {name!r}, since {what} depends on the start", True
                )
        starts = self._probe(model, x)
        numbers = samples * sum(start.shape[1] * start.element_size() for start in starts.values())
        self.bytes = 2 * len(DIRECTIONS) * numbers
        needed = math.ceil(self.bytes / 2**20)
        if needed > limit:
            raise SettingError(
                "train.warm_start_memory",
                f"be at least {needed}, the MiB that the states of {samples:,} samples take",
                limit,
                "Raise it, or set train.warm_start = false.",
            )
        self._tables = {
            f"{key}.{direction}": _Table(start, samples, scaled=direction == "backward")
            for key, start in starts.items()
            for direction in DIRECTIONS
        }
        self._pending: list[tuple[str, Tensor, Solution]] = []

    def _probe(self, model: nn.Module, x: Tensor) -> dict[str, Tensor]:
        """Where the solves for some samples start, one matrix for each call of a layer."""
        found: dict[str, Tensor] = {}
        calls: Counter[str] = Counter()
        devices = [x.device] if x.device.type == "cuda" else []
        before = {name: layer.solves.on_failure for name, layer in self._layers.items()}

        def note(name: str, z0: Tensor) -> None:
            found[f"{name}.{calls[name]}"] = z0
            calls[name] += 1

        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices))
            stack.enter_context(torch.no_grad())
            stack.enter_context(evaluation_mode(model))
            for name, layer in self._layers.items():
                layer.solves.on_failure = "ignore"
                stack.enter_context(layer.starting_from(partial(note, name)))
            model(x)
        for name, layer in self._layers.items():
            layer.solves.on_failure = before[name]
        for key, z0 in found.items():
            if len(z0) != len(x):
                name = key.rpartition(".")[0]
                rule = f"be false for layer {name!r}, which does not solve for each sample alone"
                raise SettingError(KEY, rule, True)
        return found

    def describe(self) -> str:
        """Return what is kept and how much memory it takes, as a sentence."""
        return (
            f"warm starts: the last two equilibria and adjoints of {self.samples:,} samples are "
            f"kept, {_size(self.bytes)} in memory and in each checkpoint"
        )

    @contextmanager
    def batch(self, rows: Tensor) -> Iterator[None]:
        """Let solves start from what is kept while the context lasts, and note what they find.

        Args:
            rows: Where in the data the samples of the batch are.
        """
        calls: Counter[str] = Counter()
        with ExitStack() as stack:
            for name, layer in self._layers.items():
                find = partial(self._find, name, rows, calls)
                stack.enter_context(layer.starting_from(find))
            yield

    def _find(self, name: str, rows: Tensor, calls: Counter[str], z0: Tensor) -> StartStates:
        key = f"{name}.{calls[name]}"
        calls[name] += 1
        table = self._tables.get(f"{key}.forward")
        like = None if table is None else table.last
        if like is None or z0.shape != (len(rows), like.shape[1]) or z0.dtype != like.dtype:
            rule = (
                f"be false for layer {name!r}, which solves for other states in training than in "
                "evaluation"
            )
            raise SettingError(KEY, rule, True, got=f"a state of shape {tuple(z0.shape)}")
        return _Starts(self, key, rows.to(z0.device))

    def look_up(self, key: str, direction: Direction, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return where some samples start, zeros if that is not known, and of which it is.

        Args:
            key: The name of a layer and the number of its call.
            direction: Of the solve.
            rows: The samples.
        """
        return self._tables[f"{key}.{direction}"].read(rows)

    def note(self, key: str, direction: Direction, rows: Tensor, solution: Solution) -> None:
        """Note a solution, which is kept once the step is known to be sound."""
        self._pending.append((f"{key}.{direction}", rows, solution))

    def commit(self) -> None:
        """Keep what was found since the last call: the step was made.

        Only what converged, or ran out of steps, is worth starting from.
        """
        for key, rows, solution in self._pending:
            sound = (solution.status <= Status.MAX_STEPS) & solution.residual.isfinite()
            self._tables[key].write(rows, solution.value.detach(), sound)
        self._pending.clear()

    def forget(self) -> None:
        """Let the samples of a step that was skipped start afresh: where they started may be why.

        No other sample is touched.
        """
        for key, rows, solution in self._pending:
            self._tables[key].write(
                rows, solution.value.detach(), torch.zeros_like(rows, dtype=torch.bool)
            )
        self._pending.clear()

    def share(self, group: Group) -> None:
        """Give all processes what each of them found in an epoch; all must call it.

        Args:
            group: The processes.
        """
        for table in self._tables.values():
            table.load(table.merged(group))

    def pack(self, group: Group) -> dict[str, Tensor]:
        """Return what is kept in all processes, by name; all must call it.

        In an epoch each sample is met once and by one process, so the processes continue as they
        would without.

        Args:
            group: The processes.
        """
        return {
            f"{key}.{name}": tensor
            for key, table in self._tables.items()
            for name, tensor in table.merged(group).items()
        }

    def unpack(self, tensors: Mapping[str, Tensor]) -> None:
        """Go back to what `pack` returned, or raise `ValueError` if that was another run's.

        Args:
            tensors: What was kept, by name.
        """
        own = self.pack(Group())
        if {name: (each.shape, each.dtype) for name, each in tensors.items()} != {
            name: (each.shape, each.dtype) for name, each in own.items()
        }:
            raise ValueError("warm starts of another model or other samples")
        for key, table in self._tables.items():
            table.load({name: tensors[f"{key}.{name}"] for name in table.names})


class _Table:
    """The last two solutions of one solve of each sample.

    Along a smooth path, as that of full-batch gradient descent, `z_k + (z_k - z_(k-1))` is much
    nearer to the next solution than `z_k`; along a rough one it is farther. Each sample starts from
    the one that would have been the better start the last time.

    Args:
        like: A matrix with the width of a solution.
        samples: How many samples there are.
        scaled: Whether solutions matter up to a factor only, as those of the adjoint equation.

    Attributes:
        last: The last solutions, one row for each sample; zeros where there is none.
        move: How far they are from those before.
        count: How many of the two there were, for each sample.
        linear: Which samples start from the line through both.
        fresh: Which were written since processes last exchanged what they found.
    """

    names = ("last", "move", "count", "linear")

    def __init__(self, like: Tensor, samples: int, *, scaled: bool) -> None:
        self.scaled = scaled
        # Zeros that are not written to take no memory.
        self.last = like.new_zeros(samples, like.shape[1])
        self.move = torch.zeros_like(self.last)
        self.count = torch.zeros(samples, dtype=torch.uint8, device=like.device)
        self.linear = torch.zeros_like(self.count, dtype=torch.bool)
        self.fresh = torch.zeros_like(self.linear)

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Where some samples start, and which of them have been solved for."""
        start, linear = self.last[rows], self.linear[rows]
        if bool(linear.any()):
            start = torch.addcmul(start, self.move[rows], linear[:, None].to(start))
        return start, self.count[rows] > 0

    def write(self, rows: Tensor, values: Tensor, sound: Tensor) -> None:
        """Take in new solutions; samples whose own is not sound start afresh."""
        last, move, count = self.last[rows], self.move[rows], self.count[rows]
        if self.scaled:
            # Of length 1, and in the direction of the last one.
            size = torch.linalg.vector_norm(values, dim=1, keepdim=True)
            size = torch.where(row_dot(values, last) < 0, -size, size)
            values = values * torch.where(size != 0, 1 / size, 0.0)
        if not bool(sound.all()):
            values = torch.where(sound[:, None], values, 0.0)
        moved = values - last
        near = torch.linalg.vector_norm(moved, dim=1)
        linear = torch.linalg.vector_norm(move.sub_(moved), dim=1) < near
        self.linear[rows] = linear & (count > 1) & sound
        self.last.index_copy_(0, rows, values)
        self.move.index_copy_(0, rows, moved)
        self.count[rows] = torch.where(sound, (count + 1).clamp(max=2), 0).to(torch.uint8)
        self.fresh[rows] = True

    def merged(self, group: Group) -> dict[str, Tensor]:
        """The newest of all processes, of which no two wrote the same sample."""
        own = {name: getattr(self, name) for name in self.names}
        if group.world == 1:
            return own
        fresh = group.sum(self.fresh.to(torch.uint8)) > 0
        for name, tensor in own.items():
            shape = (-1,) + (1,) * (tensor.dim() - 1)
            plain = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor
            found = group.sum(torch.where(self.fresh.view(shape), plain, 0)).to(tensor.dtype)
            own[name] = torch.where(fresh.view(shape), found, tensor)
        return own

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `merged` returned."""
        for name in self.names:
            getattr(self, name).copy_(tensors[name])
        self.fresh.zero_()


class _Starts(StartStates):
    """The starts of one call of a layer."""

    def __init__(self, warm: WarmStart, key: str, rows: Tensor) -> None:
        self.warm, self.key, self.rows = warm, key, rows

    def forward(self, z0: Tensor) -> Tensor:
        values, known = self.warm.look_up(self.key, "forward", self.rows)
        return values if bool(known.all()) else torch.where(known[:, None], values, z0)

    def backward(self, g: Tensor) -> Tensor | None:
        values, known = self.warm.look_up(self.key, "backward", self.rows)
        return values if bool(known.any()) and values.dtype == g.dtype else None

    def keep(self, direction: Direction, solution: Solution) -> None:
        self.warm.note(self.key, direction, self.rows, solution)


def _size(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB" if count < 10 * 2**20 else f"{count / 2**20:,.0f} MiB"
