"""Stepping out of what torch wraps around a call: compiled graphs, autocast, transforms."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

__all__ = ["full_precision", "is_transformed", "is_wrapped", "outside_graphs"]

P = ParamSpec("P")
R = TypeVar("R")


def outside_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function outside of `torch.compile` graphs, as `torch.compiler.disable` does.

    That decorator imports the compiler, which doubles the time to import torch; this one leaves it
    until somebody compiles.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        compiler = sys.modules.get("torch._dynamo")
        run: Callable[P, R] = function if compiler is None else compiler.disable(function)
        return run(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call


def full_precision(device: str) -> AbstractContextManager[object]:
    """Switch autocast off for a type of device within a `with` block; free if it is off already."""
    return (
        torch.autocast(device, enabled=False)
        if torch.is_autocast_enabled(device)
        else nullcontext()
    )


def is_wrapped(tensor: Tensor) -> bool:
    """Return whether a `torch.func` transform is at work on a tensor, which then has no values."""
    wrapped: bool = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return wrapped


def is_transformed(*tensors: Tensor) -> bool:
    """Return whether `torch.func` or forward-mode differentiation is at work on some tensor."""
    return torch.autograd.forward_ad._current_level >= 0 or any(map(is_wrapped, tensors))
