"""Every cell of the package keeps the promises of `equipoise.testing.check_cell`."""

import importlib
import pkgutil
from itertools import product
from typing import get_args

import pytest
import torch
from torch import nn

import equipoise
from equipoise import Cell, Equilibrium, Stop
from equipoise.families.explicit import to_weight_tied
from equipoise.families.imaging import GradientCell, ProximalCell, ResidualNetwork
from equipoise.families.lipschitz import LipschitzBounded
from equipoise.families.monotone import MonotoneConv2d, MonotoneDense, MonotoneMultiTier
from equipoise.families.multiscale import MultiscaleCell
from equipoise.families.opteq import OptEq, OptEqCell, OptEqConv2d, to_blocks
from equipoise.families.opteq.cell import Norm
from equipoise.families.relu_implicit import ReluImplicitCell
from equipoise.families.residual import ResidualCell
from equipoise.families.transformer import TransformerCell
from equipoise.families.well_posed import WellPosed
from equipoise.layers import ChangeOfVariable, Regularized, Skip
from equipoise.layers.function import FixedPointCell, FunctionCell
from equipoise.layers.root import RootCell
from equipoise.operators import Blur, Composed, Identity, Mask, separable
from equipoise.prox import ACTIVATIONS, REGULARIZERS, Incay, MatrixActivation, Tanh
from equipoise.testing import check_cell
from equipoise.testing.cells import CELLS
from equipoise.testing.gradient_case import WideCell

STOP = Stop(tolerance=1e-13, max_steps=1000)
ROTATION = torch.linalg.qr(
    torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
)[0]
STRETCH = torch.diag(torch.tensor([1.0, 2.0, 0.5])).double()
MATRIX = torch.tensor([[0.5, 0.2], [0.2, 0.7]], dtype=torch.float64)
KINKED = ("relu", "leaky_relu", "hard_tanh", "soft_shrink", "mixed")


def quartic(z):
    return z.pow(4).sum(dim=1) / 4


def dense(hidden, activation="tanh", **options):
    return OptEq(3, 3, hidden, activation, **options).cell


def conv(hidden, *args, **options):
    return OptEqConv2d(2, 2, hidden, *args, activation="softplus", **options).cell


def double_separable():
    operators = [Composed([separable(2, 2, 3, multiplier=2), separable(2, 3)]) for _ in range(2)]
    return OptEqCell(operators, [torch.nn.Conv2d(2, 3, 1) for _ in range(2)], [Tanh()] * 2)


def lipschitz(**options):
    cell = LipschitzBounded(3, 4, 2, 2.0, 0.8, **options).cell
    nn.init.normal_(cell.operator.log_psi, std=0.3)
    return cell


def imaging(kind, degradation):
    return kind(degradation, ResidualNetwork(2, 3, 2, 3, 0.8), 0.7)


def contracting_residual():
    cell = ResidualCell(2, 4, groups=2, normalization="spectral", spectral_norm=1.0)
    for norm in (cell.norm1, cell.norm2, cell.norm3):
        norm.eps = 1.0  # so large that the certificate proves a contraction
        nn.init.constant_(norm.weight, 0.5)
    return cell


CASES = {
    "imaging_conv_relu_denoise": lambda: imaging(ProximalCell, Identity()),
    "imaging_conv_relu_deblur": lambda: imaging(GradientCell, Blur(0.8, 3)),
    "imaging_conv_relu_inpaint": lambda: imaging(GradientCell, Mask()),
    **{f"activation_{name}": lambda name=name: dense(4, name) for name in ACTIVATIONS},
    **{f"norm_{name}": lambda name=name: dense([4, 2], norm=name) for name in get_args(Norm)},
    **{
        f"conv_regularizer_{name}": lambda name=name: conv(2, regularizer=name, strength=0.02)
        for name in REGULARIZERS
    },
    "scaled": lambda: dense(4, "sigmoid", mu=0.3),
    "wide": lambda: OptEq(2, 5, 3, "elu").cell,
    "deep": lambda: dense([4, 2, 3]),
    "deep_relu": lambda: dense([4, 2], "relu", alpha=0.6),
    "mixed": lambda: dense([4, 2], ["relu", "softplus"]),
    "learned_alpha": lambda: dense([4, 2], alpha=[0.5, 0.9], learn_alpha=True),
    "matrix": lambda: dense(2, MatrixActivation(MATRIX)),
    "conv": lambda: conv(3),
    "conv_deep": lambda: conv([3, 2]),
    "conv_circular": lambda: conv([3, 2], padding="circular"),
    "conv_even": lambda: conv(2, 2),
    "conv_groups": lambda: conv(4, groups=2),
    "conv_separable": lambda: conv([3, 2], separable=True),
    "conv_double_separable": double_separable,
    "conv_pooled": lambda: conv([3, 2], 2, pool=[1, 2]),
    **{
        f"monotone_relu_{name}": lambda name=name: MonotoneDense(3, 4, 0.8, splitting=name).cell
        for name in ("peaceman-rachford", "douglas-rachford", "forward-backward")
    },
    "monotone_none": lambda: MonotoneDense(3, 4, 1.0, "tanh", "none").cell,
    "monotone_conv_relu": lambda: MonotoneConv2d(2, 2, margin=0.8).cell,
    "monotone_conv_relu_circular": lambda: (
        MonotoneConv2d(2, 2, splitting="douglas-rachford", padding="circular").cell
    ),
    "monotone_conv_none": lambda: MonotoneConv2d(2, 2, 3, 1.0, "softplus", "none").cell,
    "monotone_tiers_relu": lambda: MonotoneMultiTier(2, (1, 2), (6, 8)).cell,
    "conv_residual_relu": lambda: ResidualCell(2, 4, groups=2, deviation=0.05),
    "conv_residual_weight": lambda: ResidualCell(2, 4, groups=2, normalization="weight"),
    "conv_residual_spectral": lambda: ResidualCell(
        2, 4, groups=2, normalization="spectral", spectral_norm=0.2
    ),
    "conv_residual_contracts": contracting_residual,
    "multiscale_relu": lambda: MultiscaleCell((2, 2), 1, 1, deviation=0.03, gain=0.02),
    "transformer_relu": lambda: TransformerCell(4, 2, 3, gain=0.1),
    "relu_implicit": lambda: ReluImplicitCell(3, 5, 0.3),
    **{
        f"lipschitz_relu_{name}": lambda name=name: lipschitz(splitting=name)
        for name in ("peaceman-rachford", "douglas-rachford", "forward-backward")
    },
    "lipschitz_none": lambda: lipschitz(activation="tanh", splitting="none"),
    **{
        f"well_posed_{norm}_{condition}": lambda norm=norm, condition=condition: (
            WellPosed(3, 4, 0.8, condition, norm, "tanh").cell
        )
        for norm, condition in product(("scale", "project"), ("infinity", "perron-frobenius"))
    },
    "feed_forward": lambda: (
        to_weight_tied(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))).cell
    ),
    "skip": lambda: Skip(dense(4), 0.4),
    "rotated": lambda: ChangeOfVariable(dense(4), matrix=ROTATION, scale=1.5, shift=0.2),
    "stretched": lambda: ChangeOfVariable(dense(4), matrix=STRETCH),
    "blocks": lambda: to_blocks(OptEq(3, 3, [4, 2], "tanh")),
    "regularized_l2": lambda: Regularized(dense(4), "l2", 0.3),
    "regularized_incay": lambda: Regularized(dense(4), Incay(epsilon=2.0), 0.1),
    "regularized_function": lambda: Regularized(dense(4), quartic, 0.05),
    "regularized_decorrelation": lambda: dense([4, 2], regularizer="decorrelation", strength=0.02),
}


def make(name):
    """A cell whose norms are near or beyond what control allows, and an input for it."""
    torch.manual_seed(5)
    cell = CASES[name]().double()
    for inner in (part for part in cell.modules() if isinstance(part, OptEqCell)):
        for operator in inner.operators:
            operator.scale_(
                (1.7 if inner.norm == "scale" else 0.95)
                * inner.limit(0)
                / operator.bound(operator.weights())
            )
    if name == "transformer_relu":
        return cell, (torch.randn(2, 3, 4).double(), torch.randn(2, 2, 8).double())
    if "tiers" in name:
        return cell, torch.randn(2, 2, 6, 8, dtype=torch.float64)
    if "multiscale" in name or "pooled" in name:
        return cell, torch.randn(2, 2, 4, 4, dtype=torch.float64)
    shape = (2, 2, 3, 4) if "conv" in name else (2, 2 if name == "wide" else 3)
    return cell, torch.randn(shape, dtype=torch.float64)


OPERATORS = (
    "conv_circular",
    "conv_double_separable",
    "conv_even",
    "conv_groups",
    "conv_pooled",
    "conv_separable",
    "monotone_tiers_relu",
    "multiscale_relu",
)
"""Cells that differ from others in an operator, whose adjoint has tests of its own.

Those of `multiscale_relu` are torch's, and its 34 parameters make finite differences slow."""


@pytest.mark.parametrize("name", CASES)
def test_cell_keeps_its_promises(name):
    # Finite differences take most of the time; what differs only in an activation or a regulariser
    # is compared with a long unroll alone.
    alike = name in OPERATORS or (
        name.startswith(("activation_", "conv_regularizer_"))
        and not name.endswith(("_tanh", "_relu", "_l2", "_nuclear"))
    )
    skip = ["derivatives_pass_finite_differences"] if alike else []
    second = not alike and not any(k in name for k in KINKED)
    report = check_cell(*make(name), second=second, skip=skip)
    if name in OPERATORS:
        assert "gradient_is_that_of_a_long_unroll" in report.passed


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATORS)
def test_cell_with_another_operator_passes_finite_differences(name):
    check_cell(*make(name), second=not any(k in name for k in KINKED))


@pytest.mark.parametrize("make", [*CELLS.values(), WideCell])
def test_cell_that_others_are_checked_on_keeps_its_promises(make):
    check_cell(make(), torch.randn(3, 2))


def test_every_cell_class_of_the_package_is_checked():
    for module in pkgutil.walk_packages(equipoise.__path__, "equipoise."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    todo, classes = [Cell], set()
    while todo:
        found = [one for one in todo.pop().__subclasses__() if one.__module__.startswith("equipo")]
        todo += found
        public = [one for one in found if not one.__name__.startswith("_")]
        # Those without a step of their own are bases.
        classes |= {one for one in public if one.step is not Cell.step}
    checked = {type(part) for name in CASES for part in make(name)[0].modules()}
    checked |= {type(make()) for make in (*CELLS.values(), WideCell)}
    # Plain functions as cells; tests/layers/test_function.py and test_root.py check them.
    assert classes <= checked | {FunctionCell, FixedPointCell, RootCell}


@pytest.mark.parametrize("name", ["activation_tanh", "deep", "conv", "rotated"])
def test_layer_solves_its_equation_whatever_it_starts_from(name):
    cell, x = make(name)
    layer = Equilibrium(cell, stop=STOP, on_failure="raise")
    z = layer(x)
    assert torch.allclose(layer.map(x)(z), z, atol=1e-10)
    assert torch.allclose(layer(x, torch.randn_like(z)), z, atol=1e-9)
