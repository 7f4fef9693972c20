"""From what a user writes (a name, an object, a torch module or function) to an activation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from equipoise.prox.activation import (
    ACTIVATIONS,
    ELU,
    Activation,
    HardTanh,
    Identity,
    LeakyReLU,
    ReLU,
    Sigmoid,
    Softplus,
    SoftShrink,
    Tanh,
)

__all__ = ["as_activation", "from_module"]

_NEGATIVE = {
    "gelu": (-0.129, -0.752),
    "silu": (-0.0998, -1.278),
    "swish": (-0.0998, -1.278),
    "mish": (-0.113, -1.192),
}
"""The smallest slope of popular activations that are not monotone, and where it turns negative."""

_FUNCTIONS: tuple[tuple[Callable[..., Tensor], str], ...] = (
    (torch.relu, "relu"),
    (F.relu, "relu"),
    (F.leaky_relu, "leaky_relu"),
    (torch.tanh, "tanh"),
    (F.tanh, "tanh"),
    (torch.sigmoid, "sigmoid"),
    (F.sigmoid, "sigmoid"),
    (F.softplus, "softplus"),
    (F.elu, "elu"),
    (F.hardtanh, "hard_tanh"),
    (F.softshrink, "soft_shrink"),
    (F.gelu, "gelu"),
    (F.silu, "silu"),
    (F.mish, "mish"),
)


def as_activation(
    value: str | Mapping[str, Any] | Activation | nn.Module | Callable[[Tensor], Tensor],
) -> Activation:
    """Return the activation that `value` means, if it is admissible (OptEq, Assumption 1).

    Only those make a layer a proximal map.

    Args:
        value: A name (`relu`), a table such as `{"name": "leaky_relu", "negative_slope": 0.1}`, an
            `Activation`, or what `from_module` takes.
    """
    if isinstance(value, str | Mapping):
        _refuse_negative(value if isinstance(value, str) else value.get("name"))
        return ACTIVATIONS.resolve(value)
    if isinstance(value, Activation):
        if not value.admissible:
            raise ValueError(
                f"activation {type(value).__name__} is not admissible: {value.reason}."
            )
        return value
    if isinstance(value, nn.Module) or _is_module_class(value) or _function_name(value):
        return from_module(value)
    return ACTIVATIONS.resolve(value)  # type: ignore[arg-type]  # which refuses it


def from_module(module: nn.Module | Callable[[Tensor], Tensor]) -> Activation:
    """Convert a `torch.nn` module, or a `torch` function with its default options.

    Args:
        module: `nn.ReLU()`, `nn.LeakyReLU(0.1)`, `nn.Tanh()`, `nn.Sigmoid()`, `nn.Softplus()`,
            `nn.ELU()`, `nn.Hardtanh()`, `nn.Softshrink()`, `nn.Identity()`, or `torch.relu`,
            `torch.tanh` and the like. Options that leave the function as it is (`inplace`) are
            dropped.
    """
    name = _function_name(module)
    if name:
        return as_activation(name)
    if _is_module_class(module):
        raise ValueError(
            f"from_module must get an object; got the class {module.__name__}. Write "
            f"nn.{module.__name__}()."
        )
    kind = type(module)
    if kind in (nn.GELU, nn.SiLU, nn.Mish):
        _refuse_negative(kind.__name__.lower())
    if kind not in _MODULES:  # a subclass may compute anything: nn.ReLU6 is an nn.Hardtanh
        names = ", ".join(f"nn.{known.__name__}" for known in _MODULES)
        got = getattr(module, "__name__", kind.__name__)
        raise ValueError(
            f"from_module must get one of {names}; got {got}. For another function write an "
            "Activation."
        )
    return _MODULES[kind](module)


def _function_name(value: object) -> str | None:
    return next((name for function, name in _FUNCTIONS if function is value), None)


def _is_module_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def _refuse_negative(name: object) -> None:
    if isinstance(name, str) and name in _NEGATIVE:
        slope, below = _NEGATIVE[name]
        raise ValueError(
            f"activation {name!r} is not admissible: its slope is negative (down to about "
            f"{slope}) for a below {below}, "
            "so the layer would not be a proximal map. Use 'softplus' or 'relu'."
        )


def _from_softplus(module: Any) -> Activation:
    if module.beta != 1:
        raise ValueError(
            f"nn.Softplus.beta must be 1; got {module.beta}. Scale the weights instead: "
            "softplus(beta a) / beta."
        )
    if module.threshold < 20:
        raise ValueError(
            f"nn.Softplus.threshold must be at least 20; got {module.threshold}: the function "
            "would jump down there."
        )
    return Softplus()


def _from_hardtanh(module: Any) -> Activation:
    if (module.min_val, module.max_val) != (-1, 1):
        raise ValueError(
            f"nn.Hardtanh must have the bounds -1 and 1; got {module.min_val} and {module.max_val}."
        )
    return HardTanh()


_MODULES: dict[type[nn.Module], Callable[[Any], Activation]] = {
    nn.ReLU: lambda _: ReLU(),
    nn.LeakyReLU: lambda module: LeakyReLU(module.negative_slope),
    nn.Tanh: lambda _: Tanh(),
    nn.Sigmoid: lambda _: Sigmoid(),
    nn.Softplus: _from_softplus,
    nn.ELU: lambda module: ELU(module.alpha),
    nn.Hardtanh: _from_hardtanh,
    nn.Softshrink: lambda module: SoftShrink(module.lambd),
    nn.Identity: lambda _: Identity(),
}
