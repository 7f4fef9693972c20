"""Networks of every family solve and train under autocast, near what they are in float32."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from equipoise import Cell, Equilibrium, Implicit, OptEq, OptEqConv2d, Stop, create_model

LOOSE, TIGHT = 0.016, 0.015
"""On either side of twice bfloat16's precision."""

MODELS = [
    "lipschitz-table",
    "monotone-digits",
    "multiscale-digits",
    "opteq-cifar10-162k",
    "opteq-digits",
    "opteq-table",
    "residual-deq-mnist",
    "transformer-tiny",
    "well-posed-table",
]
LAYERS = {
    "one layer": lambda: OptEq(4, 24, 32),
    "without a skip": lambda: OptEq(4, 24, [32, 40], alpha=1.0),
    "trained alpha": lambda: OptEq(4, 24, [32, 40], learn_alpha=True),
    "regularised": lambda: OptEq(4, 24, 32, regularizer="l1", strength=0.01),
    "convolutions": lambda: OptEqConv2d(4, 16, [16, 32]),
    "convolutions without a skip": lambda: OptEqConv2d(4, 16, [16, 32], alpha=1.0),
    "separable": lambda: OptEqConv2d(4, 16, 16, separable=True),
    "pooled": lambda: OptEqConv2d(4, 16, [16, 32], pool=[1, 2]),
}


class Products(TorchDispatchMode):
    """Remembers the precision of convolutions and matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes = set[torch.dtype]()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(name in str(function) for name in ("convolution", "mm.", "mm_.")):
            self.dtypes |= {each.dtype for each in args if isinstance(each, Tensor)}
        return function(*args, **(kwargs or {}))


def set_tolerance(module: nn.Module, tolerance: float) -> None:
    for each in module.modules():
        if isinstance(each, Equilibrium):
            each.stop = Stop(tolerance, max_steps=100)
            each.solves.on_failure = "raise"


def run(module: nn.Module, x: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Return an output and the gradients of a fixed function of it."""
    module.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        y = module(x)
    y = y.float()
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    (y * weights).sum().backward()
    found = [p.grad.flatten() for p in module.parameters() if p.grad is not None]
    assert all(gradient.dtype == torch.float32 for gradient in found)
    return y.detach(), torch.cat(found)


def error(found: Tensor, true: Tensor) -> float:
    return float((found - true).norm() / true.norm())


def layer_and_input(name: str) -> tuple[Equilibrium, Tensor]:
    torch.manual_seed(0)
    layer = LAYERS[name]()
    shape = (3, 4, 8, 8) if isinstance(layer, OptEqConv2d) else (3, 4)
    return layer, torch.randn(shape)


@pytest.mark.parametrize("name", MODELS)
def test_model_solves_and_trains_near_float32(name):
    torch.manual_seed(0)
    model = create_model(name).eval()
    text = name.startswith("transformer")
    shape = (16,) if text else model.input_shape
    # One ReLU that an inexact solve leaves on the other side must not weigh much.
    count = 32 if math.prod(shape) < 100 else 4
    x = torch.randint(0, 20, (count, *shape)) if text else torch.randn(count, *shape)
    set_tolerance(model, 1e-5)
    true_y, true_gradient = run(model, x, None)
    set_tolerance(model, LOOSE)
    full_y, full_gradient = run(model, x, None)
    y, gradient = run(model, x, torch.bfloat16)
    assert error(y, true_y) < error(full_y, true_y) + 0.02
    assert error(gradient, true_gradient) < error(full_gradient, true_gradient) + 0.1


@pytest.mark.parametrize("name", LAYERS)
def test_loose_layer_makes_all_its_products_in_bfloat16(name):
    layer, x = layer_and_input(name)
    set_tolerance(layer, LOOSE)
    true_y, true_gradient = run(layer, x, None)
    with Products() as seen:
        y, gradient = run(layer, x, torch.bfloat16)
    assert seen.dtypes == {torch.bfloat16}
    assert layer.last.value.dtype == torch.float32
    assert error(y, true_y) < 0.03
    assert error(gradient, true_gradient) < 0.03


@pytest.mark.parametrize("name", LAYERS)
def test_tight_layer_solves_in_float32(name):
    layer, x = layer_and_input(name)
    set_tolerance(layer, TIGHT)
    with Products() as seen:
        run(layer, x, torch.bfloat16)
    assert torch.float32 in seen.dtypes
    assert (layer.last.residual <= TIGHT).all()


class Affine(Cell):
    """`z = W z + c`, which declares its Lipschitz constant."""

    def __init__(self) -> None:
        super().__init__()
        Q = torch.linalg.qr(torch.randn(8, 8)).Q
        self.W = nn.Parameter(0.8 * Q)

    def inject(self, x: Tensor) -> Tensor:
        return x

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return z @ self.W.T + context

    def lipschitz(self) -> float:
        return 0.8001


@pytest.mark.parametrize(
    "options",
    [
        {"stop": Stop(0.02, max_steps=100, tolerance_on="error")},
        {"tolerance": 0.02, "gradient": Implicit(tolerance=1e-5)},
    ],
    ids=["tolerance on the error", "tight adjoint"],
)
def test_other_tolerances_keep_a_solve_in_float32(options):
    torch.manual_seed(0)
    layer, x = Equilibrium(Affine(), **options), torch.randn(6, 8)
    with Products() as seen:
        run(layer, x, torch.bfloat16)
    assert seen.dtypes == {torch.float32}
    assert layer.last.error_bound is not None


def test_rounded_residual_proves_no_error_bound():
    torch.manual_seed(0)
    layer, x = Equilibrium(Affine(), tolerance=0.02), torch.randn(6, 8)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x)
    assert layer.last.error_bound is None
    layer(x)
    assert layer.last.error_bound is not None


@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1.0, 1e30])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradient_is_right_at_any_scale(dtype, scale):
    torch.manual_seed(0)
    layer, x = Equilibrium(Affine(), tolerance=0.02), torch.randn(6, 8)
    gradients = []
    for lower in (None, dtype):
        layer.zero_grad()
        with torch.autocast("cpu", lower, enabled=lower is not None):
            z = layer(x)
        (z.sum() * scale).backward()
        gradients.append(layer.cell.W.grad.clone())
    assert error(gradients[1] / scale, gradients[0] / scale) < 0.05
