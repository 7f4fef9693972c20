"""Neural ODEs (Chen et al., 2018) and augmented ones (Dupont et al., 2019)."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Literal, TypedDict, Unpack, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from equipoise.core.errors import ConvergenceError
from equipoise.core.registry import choose
from equipoise.core.validate import SettingError, require_count, require_flag, require_positive
from equipoise.models.factory import register_model
from equipoise.models.image_network import ExplicitNetwork, require_image_shape

__all__ = ["Method", "NeuralODE", "OdeOptions"]

Method = Literal["dopri5", "bosh3", "adaptive_heun", "rk4", "midpoint", "euler"]
"""The methods of integration of torchdiffeq that are offered."""


class NeuralODE(nn.Module):
    """Return `z(1)` of `dz/dt = g(z)`, `z(0) = x` with `augment` channels of zeros.

    `g` is convolutions of side 1, 3 and 1 with ReLU between them, as in Dupont et al. (2019).
    torchdiffeq integrates.

    Args:
        channels: Channels of the input.
        filters: Channels within `g`.
        augment: Channels of zeros that are appended, without which trajectories cannot cross.
        method: The method of integration.
        tolerance: Relative and absolute tolerance of a step.
        adjoint: Whether backward integrates the adjoint equation, in constant memory, in place of
            keeping the steps.

    Shape:
        (batch, channels, height, width) to (batch, channels + augment, height, width).
    """

    def __init__(
        self,
        channels: int,
        filters: int,
        augment: int = 0,
        *,
        method: Method = "dopri5",
        tolerance: float = 1e-3,
        adjoint: bool = False,
    ) -> None:
        super().__init__()
        require_count("NeuralODE.filters", filters)
        choose("NeuralODE.method", method, get_args(Method))
        require_positive("NeuralODE.tolerance", tolerance)
        require_flag("NeuralODE.adjoint", adjoint)
        if isinstance(augment, bool) or not isinstance(augment, int) or augment < 0:
            raise SettingError("NeuralODE.augment", "be a whole number, 0 or more", augment)
        self.augment, self.method, self.tolerance, self.adjoint = (
            augment,
            method,
            tolerance,
            adjoint,
        )
        width = channels + augment
        self.field = nn.Sequential(
            nn.Conv2d(width, filters, 1),
            nn.ReLU(),
            nn.Conv2d(filters, filters, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(filters, width, 1),
        )
        self.evaluations = 0

    def forward(self, x: Tensor) -> Tensor:
        """Integrate from 0 to 1."""
        library = _torchdiffeq()
        z = functional.pad(x, (0, 0, 0, 0, 0, self.augment))
        self.evaluations = 0
        integrate = library.odeint_adjoint if self.adjoint else library.odeint
        options = {"adjoint_params": tuple(self.field.parameters())} if self.adjoint else {}
        try:
            path = integrate(
                self._field,
                z,
                torch.tensor([0.0, 1.0], dtype=z.dtype, device=z.device),
                rtol=self.tolerance,
                atol=self.tolerance,
                method=self.method,
                **options,
            )
        except AssertionError as error:  # torchdiffeq's way to say so
            raise ConvergenceError(
                f"NeuralODE must be integrated in steps that the precision can tell apart; got "
                f"{str(error).rstrip('.')!r} after {self.evaluations} evaluations. Lower the "
                "learning rate, or loosen tolerance."
            ) from error
        end: Tensor = path[-1]
        return end

    def _field(self, t: Tensor, z: Tensor) -> Tensor:
        self.evaluations += 1
        g: Tensor = self.field(z)
        return g


def _torchdiffeq() -> ModuleType:
    try:
        return importlib.import_module("torchdiffeq")
    except ImportError as error:
        raise SettingError(
            "model.name",
            "be one whose packages are installed",
            "torchdiffeq",
            "Neural ODEs need it: pip install 'equipoise[ode]'.",
            got="a neural ODE, without torchdiffeq",
        ) from error


class OdeOptions(TypedDict, total=False):
    """How a neural ODE is integrated; `NeuralODE` explains the options.

    Attributes:
        method: The method of integration.
        tolerance: Relative and absolute tolerance of a step.
        adjoint: Whether backward integrates the adjoint equation, in constant memory.
    """

    method: Method
    tolerance: float
    adjoint: bool


def _flat(
    input_shape: Sequence[int],
    filters: int,
    augment: int,
    num_classes: int,
    options: OdeOptions,
) -> ExplicitNetwork:
    """The flow of an image, and a linear map of all its pixels."""
    shape = require_image_shape("NeuralODE", input_shape)
    channels, height, width = shape
    require_count("NeuralODE.num_classes", num_classes)
    flow = NeuralODE(channels, filters, augment, **options)
    size = (channels + augment) * height * width
    return ExplicitNetwork(nn.Sequential(flow, nn.Flatten()), nn.Linear(size, num_classes), shape)


@register_model("neural-ode-mnist")
def neural_ode_mnist(
    *,
    num_classes: int = 10,
    input_shape: Sequence[int] = (1, 28, 28),
    **options: Unpack[OdeOptions],
) -> ExplicitNetwork:
    """Neural ODE for grey images of 28 x 28 with 84,395 parameters (Dupont et al., 2019).

    Args:
        num_classes: Number of classes.
        input_shape: Channels, height and width of the images; the last map's size follows them.
        **options: See `OdeOptions`.
    """
    return _flat(input_shape, 92, 0, num_classes, options)


@register_model("augmented-neural-ode-mnist")
def augmented_neural_ode_mnist(
    *,
    num_classes: int = 10,
    input_shape: Sequence[int] = (1, 28, 28),
    **options: Unpack[OdeOptions],
) -> ExplicitNetwork:
    """Augmented neural ODE for 28 x 28 with 84,816 parameters (Dupont et al., 2019).

    Five channels of zeros are appended.

    Args:
        num_classes: Number of classes.
        input_shape: Channels, height and width of the images; the last map's size follows them.
        **options: See `OdeOptions`.
    """
    return _flat(input_shape, 64, 5, num_classes, options)


@register_model("neural-ode-cifar10")
def neural_ode_cifar10(
    *,
    num_classes: int = 10,
    input_shape: Sequence[int] = (3, 32, 32),
    **options: Unpack[OdeOptions],
) -> ExplicitNetwork:
    """Neural ODE for CIFAR-10 with 172,358 parameters (Dupont et al., 2019; OptEq, Table 4).

    Args:
        num_classes: Number of classes.
        input_shape: Channels, height and width of the images; the last map's size follows them.
        **options: See `OdeOptions`.
    """
    return _flat(input_shape, 125, 0, num_classes, options)


@register_model("augmented-neural-ode-cifar10")
def augmented_neural_ode_cifar10(
    *,
    num_classes: int = 10,
    input_shape: Sequence[int] = (3, 32, 32),
    **options: Unpack[OdeOptions],
) -> ExplicitNetwork:
    """Augmented neural ODE for CIFAR-10 with 171,799 parameters (Dupont et al., 2019).

    Ten channels of zeros are appended.

    Args:
        num_classes: Number of classes.
        input_shape: Channels, height and width of the images; the last map's size follows them.
        **options: See `OdeOptions`.
    """
    return _flat(input_shape, 64, 10, num_classes, options)
