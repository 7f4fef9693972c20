"""A clean break in `torch.compile` graphs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

__all__ = ["outside_graphs"]

P = ParamSpec("P")
R = TypeVar("R")


def outside_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function outside of `torch.compile` graphs, as `torch.compiler.disable` does.

    That decorator imports the compiler, which doubles the time to import torch; this one leaves it until somebody compiles.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        compiler = sys.modules.get("torch._dynamo")
        run: Callable[P, R] = function if compiler is None else compiler.disable(function)
        return run(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call
