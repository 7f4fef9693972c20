"""Stepping out of what torch wraps around a call: compiled graphs, autocast, transforms."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from equipoise.core.validate import SettingError

__all__ = [
    "full_precision",
    "is_transformed",
    "is_wrapped",
    "jvp_depth",
    "outside_graphs",
    "outside_transforms",
    "require_dtype",
    "unwrapped",
]

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


def require_dtype(x: Tensor, weight: Tensor, name: str = "The input") -> None:
    """Raise unless an input has the dtype of the weights that it meets, or autocast converts it.

    Args:
        x: The input.
        weight: One of the weights.
        name: What the input is called in the sentence.
    """
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        rule, remedy = f"be {weight.dtype}, as the weights are", "Convert one of them."
        raise SettingError(name, rule, x, remedy, got=str(x.dtype))


def is_wrapped(tensor: Tensor) -> bool:
    """Return whether a `torch.func` transform is at work on a tensor, which then has no values."""
    wrapped: bool = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return wrapped


def is_transformed(*tensors: Tensor) -> bool:
    """Return whether `torch.func` or forward-mode differentiation is at work on some tensor."""
    return torch.autograd.forward_ad._current_level >= 0 or any(map(is_wrapped, tensors))


def jvp_depth(tensors: Sequence[Tensor]) -> int:
    """Return how many forward-mode transforms of `torch.func` differentiate some tensors."""
    functorch = torch._C._functorch
    stack = functorch.get_interpreter_stack()
    if not stack:
        return 0
    jvp = functorch.TransformType.Jvp
    if sum(layer.key() == jvp for layer in stack) < 2:
        return 0
    from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack

    depth = 0
    with ExitStack() as below:
        for layer in reversed(stack):
            if layer.key() == jvp:
                depth += any(
                    forward_ad.unpack_dual(tensor, level=0).tangent is not None  # type: ignore[no-untyped-call]
                    for tensor in tensors
                )
            # Each layer sees the tensors without what the layers above it put around them.
            below.enter_context(temporarily_pop_interpreter_stack())
            tensors = [
                functorch.get_unwrapped(tensor)
                if is_wrapped(tensor) and functorch.maybe_get_level(tensor) == layer.level()
                else tensor
                for tensor in tensors
            ]
    return depth


def unwrapped(tensors: Sequence[Tensor]) -> list[Tensor] | None:
    """Return the values of tensors that `torch.func` wrapped; None for a batch of `vmap`."""
    found = []
    for tensor in tensors:
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            if not torch._C._functorch.is_gradtrackingtensor(tensor):
                return None
            tensor = torch._C._functorch.get_unwrapped(tensor)
        found.append(tensor)
    return found


def outside_transforms() -> AbstractContextManager[object]:
    """Compute with values within a `with` block as if no `torch.func` transform were at work."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()
