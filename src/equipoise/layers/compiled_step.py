"""Compiled cells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["CompiledStep"]


class CompiledStep:
    """What `torch.compile` made of one cell's call, for the cell and its copies.

    The compiler keeps a few graphs for each code object, and runs uncompiled beyond that. Training
    and evaluation, recorded and not, need graphs of their own, so each has a code object.

    Args:
        transform: Compiles a function.
    """

    def __init__(self, transform: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._transform = transform
        self._functions: dict[tuple[bool, bool], Callable[..., Any]] = {}

    def __call__(self, cell: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call the cell."""
        mode = cell.training, torch.is_grad_enabled()
        function = self._functions.get(mode)
        if function is None:

            def call(cell: nn.Module, *args: Any, **kwargs: Any) -> Any:
                return cell._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

            call.__code__ = call.__code__.replace(co_name="call_cell")  # a new object
            function = self._functions.setdefault(mode, self._transform(call))
        return function(cell, *args, **kwargs)
