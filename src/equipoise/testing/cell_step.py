"""What a cell promises of its methods, one call at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from equipoise.testing.cell_case import CellCase, cast
from equipoise.testing.contract import distance, require, require_close
from equipoise.testing.trees import bare, convert, leaves, pick

__all__ = ["STEP_CHECKS"]


def _shapes_and_types_are_kept(case: CellCase) -> None:
    for dtype in (torch.float64, torch.float32):
        kinds = (dtype, dtype.to_complex())
        cell, x = case.copied(dtype), cast(case.x, dtype)
        batch = leaves(x)[0].shape[0]
        with torch.no_grad():
            context = cell.inject(x)
            z = cell.initial(x, bare(context))
            new = cell.step(z, bare(context))
            out = cell.readout(new, bare(context))
        unshared: list[Tensor] = []
        convert(context, unshared.append, lambda leaf: leaf)
        for leaf in unshared:
            require(
                leaf.dim() > 0 and leaf.shape[0] == batch,
                f"{case.name}.inject",
                f"return tensors of {batch} samples, batch first, or wrapped in Shared",
                f"shape {tuple(leaf.shape)}",
                "Wrap tensors that belong to the whole batch in Shared.",
            )
        for leaf in leaves(z):
            require(
                leaf.dim() > 0 and leaf.shape[0] == batch and leaf.dtype in kinds,
                f"{case.name}.initial",
                f"return {batch} samples in {dtype}, the dtype of input and weights",
                f"shape {tuple(leaf.shape)} in {leaf.dtype}",
                "Make it from the context, as in context.new_zeros(...).",
            )
        require(
            _outline(new) == _outline(z),
            f"{case.name}.step",
            "return the tree, shapes, dtype and device of its state",
            f"{_outline(new)} for a state of {_outline(z)}",
        )
        for leaf in leaves(out):
            require(
                leaf.dim() > 0 and leaf.shape[0] == batch and leaf.dtype in kinds,
                f"{case.name}.readout",
                f"return {batch} samples in {dtype}",
                f"shape {tuple(leaf.shape)} in {leaf.dtype}",
            )


def _outline(tree: Any) -> str:
    return str(
        convert(
            tree,
            lambda leaf: f"{tuple(leaf.shape)} {leaf.dtype} on {leaf.device}",
            lambda leaf: "Shared",  # noqa: ARG005
        )
    )


def _nothing_is_written_to(case: CellCase) -> None:
    cell, x = case.cell, case.x
    with torch.no_grad():
        context = cell.inject(x)
        z = cell.initial(x, bare(context))
        z = convert(z, lambda leaf: leaf + torch.randn_like(leaf), lambda leaf: leaf)
        watched: dict[str, list[Tensor]] = {
            "its input": leaves(x),
            "its context": leaves(context),
            "its state": leaves(z),
            "its parameters": list(cell.parameters()),
        }
        for call, method in (
            ("step", lambda: cell.step(z, bare(context))),
            ("readout", lambda: cell.readout(z, bare(context))),
            ("linearize", lambda: cell.linearize(z, bare(context))),
            ("inject", lambda: cell.inject(x)),
        ):
            before = {what: [leaf.clone() for leaf in tensors] for what, tensors in watched.items()}
            method()
            for what, tensors in watched.items():
                require(
                    all(torch.equal(a, b) for a, b in zip(before[what], tensors, strict=True)),
                    f"{case.name}.{call}",
                    f"leave {what} as it was",
                    f"a change of {distance(tensors, before[what]):.1e}",
                    "Write z + 1, not z.add_(1).",
                )


def _step_is_a_function(case: CellCase) -> None:
    with torch.no_grad():
        for z in case.points():
            state = case.layout.unpack(z)
            first, second = (case.cell.step(state, case.bare) for _ in range(2))
            require(
                distance(first, second) == 0,
                f"{case.name}.step",
                "return the same for the same state and context",
                f"a difference of {distance(first, second):.1e} between two calls",
                "Draw random numbers in inject, or call eval() to turn dropout off.",
            )


def _rows_are_independent(case: CellCase) -> str | None:
    if case.cell.coupled:
        return "the cell declares that its samples are coupled"
    cell = case.cell
    batch = leaves(case.x)[0].shape[0]
    with torch.no_grad():
        z = case.layout.unpack(case.points()[-1])
        whole = cell.step(z, case.bare)
        for index in ([batch - 1], list(range(batch))[::-1], list(range(0, batch, 2))):
            for what, context in (
                ("step", pick(case.context, index)),
                ("inject", cell.inject(pick(case.x, index))),
            ):
                require_close(
                    cell.step(pick(z, index), bare(context)),
                    pick(whole, index),
                    1e-9,
                    f"{case.name}.{what}",
                    f"treat each sample for itself: samples {index} of {batch} must give what "
                    "they give in the batch",
                    "Set coupled = True on the cell if they depend on each other.",
                )
    return None


STEP_CHECKS = (
    _shapes_and_types_are_kept,
    _nothing_is_written_to,
    _step_is_a_function,
    _rows_are_independent,
)
