"""What a language model remembers from each segment of a text to the next."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from equipoise.engine.distributed import Group

__all__ = ["SegmentMemory"]


class SegmentMemory:
    """Carries a model's memory from batch to batch; row i goes on with the text of row i.

    It belongs to one pass over one data set, so that nothing of an evaluation is seen in training,
    or of an epoch in the next one. Of a model without a memory it carries nothing.

    Args:
        model: The model.

    Attributes:
        length: How many tokens the model remembers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.length: int = getattr(model, "memory_length", 0)
        self._rows: Tensor | None = None  # (rows, remembered, width)
        self._next: list[Tensor] = []  # of the batch that is being computed, in parts

    def run(self, model: nn.Module, x: Tensor) -> Tensor:
        """Return the model's outputs for the next rows of a batch.

        Args:
            model: The model, which may be wrapped.
            x: The rows; a batch may come in parts, in order.
        """
        if not self.length:
            output: Tensor = model(x)
            return output
        if self._rows is None:
            memory = self._model.start_memory(len(x))  # type: ignore[operator]
        else:
            done = sum(map(len, self._next))
            memory = self._rows[done : done + len(x)]
        output, after = model(x, memory)
        # A solve that met NaN must not spoil the rest of its text.
        sound = after.isfinite().flatten(1).all(1)
        self._next.append(after if bool(sound.all()) else after.where(sound[:, None, None], 0.0))
        return output

    def advance(self) -> None:
        """Go on to the next segments, once all rows of a batch are computed."""
        if self._next:
            self._rows, self._next = torch.cat(self._next), []

    def forget(self) -> None:
        """Begin anew, as at the beginning of a text."""
        self._rows, self._next = None, []

    def pack(self, group: Group) -> dict[str, Tensor]:
        """Return what is remembered in all processes, which must all call it.

        Args:
            group: The processes, whose batches have equally many rows.
        """
        if self._rows is None:
            return {}
        if group.world == 1:
            return {"rows": self._rows[None]}
        rows = self._rows.new_zeros(group.world, *self._rows.shape)
        rows[group.rank] = self._rows
        return {"rows": group.sum(rows)}

    def load(self, tensors: Mapping[str, Tensor], group: Group) -> None:
        """Remember what `pack` returned; nothing where there were other numbers of processes.

        Args:
            tensors: What it returned.
            group: The processes.
        """
        self.forget()
        rows = tensors.get("rows")
        if rows is not None and len(rows) == group.world:
            self._rows = rows[group.rank].to(group.device).clone()
