"""What training, prediction and reports need to know of a network."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from equipoise.layers.equilibrium import Equilibrium

__all__ = ["Model", "count_parameters", "find_equilibria"]


class Model(nn.Module):
    """The base class of all models: a network from samples to outputs, with any equilibria.

    Write `__init__` and `forward(x)` as for any module. The rest has defaults:

    Attributes:
        name: The name by which `create_model` made it, that of a file without its folders.
        size_multiple: What the height and width of images must be multiples of, in a network that
            takes images of any such size; None in one that takes samples of one shape only.
        memory_length: How many tokens of the text before a sample it remembers. If any, it also
            has `start_memory(batch)`, and `forward(x, memory)` returns the outputs and the memory
            after `x`, batch first (see `TextModel`). Samples then come in the order of the text.
    """

    name: str = "model"
    size_multiple: int | None = None
    memory_length: int = 0

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(_prepare)

    def prepare(self, x: Tensor) -> Tensor:
        """Return samples in the form that `forward` takes, or raise `ValueError` in one sentence.

        Called on the input before `forward`. By default the samples themselves.

        Args:
            x: A batch of samples, as the data and their transform make them.
        """
        return x

    def equilibria(self) -> dict[str, Equilibrium]:
        """Return the equilibrium layers by name; by default all that are found, by module name."""
        return _equilibrium_layers(self)

    def parameter_counts(self) -> dict[str, int]:
        """Return how many parameters there are in `total`, and in each part worth naming."""
        return {"total": _count(self)}


def find_equilibria(model: nn.Module) -> dict[str, Equilibrium]:
    """Return the equilibrium layers of any module by name, as the model says if it is a `Model`.

    Args:
        model: The module.
    """
    return model.equilibria() if isinstance(model, Model) else _equilibrium_layers(model)


def count_parameters(model: nn.Module) -> dict[str, int]:
    """Return the numbers of parameters of any module, as the model says if it is a `Model`.

    Args:
        model: The module.
    """
    return model.parameter_counts() if isinstance(model, Model) else {"total": _count(model)}


def _prepare(model: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    assert isinstance(model, Model)
    return (model.prepare(inputs[0]), *inputs[1:]) if inputs else inputs


def _equilibrium_layers(model: nn.Module) -> dict[str, Equilibrium]:
    return {
        name or "equilibrium": module
        for name, module in model.named_modules()
        if isinstance(module, Equilibrium)
    }


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
