"""Lipschitz constants of whole networks, against autograd, exact operators and sampled pairs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from equipoise import Cell, Equilibrium, ImageNetwork, OptEq, Skip, create_model
from equipoise.analysis import lipschitz_bound
from equipoise.analysis.torch_bounds import _SLOPES, bound_torch_module
from equipoise.core.tree import Structure
from equipoise.families.lipschitz import LipschitzBounded
from equipoise.families.monotone import MonotoneDense
from equipoise.families.well_posed import WellPosed
from equipoise.layers import Bound, ChangeOfVariable, Regularized
from equipoise.models import TableNetwork
from equipoise.models.extractor import BasicBlock

TIGHT = {"tolerance": 1e-12, "max_steps": 5000}


def exact_norm(module: nn.Module, shape: tuple[int, ...]) -> float:
    """The norm of an affine module, from its matrix."""
    zero = torch.zeros(1, *shape, dtype=torch.float64)
    matrix = torch.func.jacrev(lambda x: module(x).flatten())(zero).flatten(1)
    return float(torch.linalg.matrix_norm(matrix.detach(), 2))


@pytest.mark.parametrize(
    ("module", "shape", "slack"),
    [
        (nn.Linear(5, 7), (5,), 1e-9),
        (nn.Conv2d(2, 3, 3, padding=1), (2, 7, 7), 0.2),
        (nn.Conv2d(2, 3, 3, stride=2, padding=1), (2, 8, 8), 0.2),
        (nn.Conv2d(1, 4, 5, stride=3), (1, 14, 14), 0.2),
        (nn.Conv2d(4, 4, 3, padding=1, groups=2, dilation=2), (4, 9, 9), 0.4),
        (nn.Conv1d(2, 3, 3, stride=2), (2, 15), 0.2),
        (nn.AvgPool2d(3), (1, 9, 9), 1e-9),
        (nn.AvgPool2d(3, stride=2, padding=1), (1, 9, 9), 1.0),
        (nn.AdaptiveAvgPool2d(3), (1, 8, 7), 1e-9),
        (nn.AdaptiveAvgPool2d(5), (1, 3, 3), 1e-9),
    ],
)
def test_torch_module_is_bounded_by_its_norm_from_above(module, shape, slack):
    torch.manual_seed(0)
    module = module.double()
    bound = bound_torch_module(module, "it", lambda: (1, *shape)).value
    exact = exact_norm(module, shape)
    assert exact <= bound <= exact * (1 + slack)


@pytest.mark.parametrize("kind", sorted(_SLOPES, key=lambda kind: kind.__name__))
def test_slope_of_an_activation_is_not_exceeded(kind):
    if any(part in kind.__name__ for part in ("Pad", "latten", "Dropout")):
        pytest.skip("moves numbers about")
    module = kind().eval()
    x = torch.linspace(-8, 8, 40001, dtype=torch.float64)[:, None]
    y = module.double()(x)
    steepest = float(((y[1:] - y[:-1]) / (x[1:] - x[:-1])).abs().max().detach())
    bound = bound_torch_module(module, "it", lambda: None).value
    assert steepest <= bound * (1 + 1e-9) <= steepest * 1.001 + 1e-9


def test_normalisation_is_folded_and_pooling_counts_overlaps():
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()).double()
    block[1].running_var.copy_(torch.tensor([0.01, 1.0, 4.0, 0.5]))
    block.eval()
    found = lipschitz_bound(block)
    assert [part.name for part in found.parts] == ["0", "2"]
    exact = exact_norm(block[:2], (2, 6, 6))
    assert exact <= found.value <= 1.2 * exact
    assert lipschitz_bound(nn.MaxPool2d(3, stride=2)).value == pytest.approx(2.0)
    unfolded = lipschitz_bound(nn.BatchNorm2d(3, track_running_stats=False))
    assert "normalises by the batch" in unfolded.unknown[0].theorem


LAYERS = {
    "opteq": lambda: OptEq(4, 6, [5, 7], **TIGHT),
    "monotone": lambda: MonotoneDense(4, 6, 0.5, **TIGHT),
    "forward-backward": lambda: MonotoneDense(
        4, 6, 0.5, splitting="forward-backward", solver="fixed_point", **TIGHT
    ),
    "lipschitz": lambda: LipschitzBounded(4, 6, 6, 0.7, **TIGHT),
    "well-posed": lambda: WellPosed(4, 6, 0.9, "perron-frobenius", norm="project", **TIGHT),
    "skip": lambda: Equilibrium(Skip(OptEq(4, 6, 5).cell, 0.5), **TIGHT),
    "regularized": lambda: Equilibrium(Regularized(OptEq(4, 6, 5).cell, "l1", 0.1), **TIGHT),
}


@pytest.mark.parametrize("name", LAYERS)
def test_network_moves_no_further_than_its_bound(name):
    torch.manual_seed(1)
    layer = LAYERS[name]()
    with torch.no_grad():
        for weight in layer.parameters():
            weight.mul_(2.0)  # away from small first weights
    if layer.cell.projects:
        layer.cell.project_()
    model = TableNetwork(layer, nn.Linear(6, 3), (4,)).double().eval()
    found = lipschitz_bound(model)
    assert found.value < math.inf
    assert found.pairs is not None
    x = (2 * torch.randn(200, 4, dtype=torch.float64)).requires_grad_()
    y = model(x)
    rows = [torch.autograd.grad(y[:, k].sum(), x, retain_graph=True)[0] for k in range(3)]
    jacobians, x = torch.stack(rows, dim=1), x.detach()
    steepest = float(torch.linalg.matrix_norm(jacobians, 2).max())
    assert 0.02 * found.value < steepest <= found.value
    pairs = torch.linalg.vector_norm(jacobians[:, :, None] - jacobians[:, None], dim=3).amax(dim=0)
    assert (pairs <= found.pairs).all()
    # The error of an approximate equilibrium is at most what its residual allows.
    exact = layer(x).detach()
    cell, factor = layer.cell, layer.cell.error_factor()
    structure = Structure(cell.inject(x), "inject")
    context = structure.rebuild(structure.leaves)
    z = layer.last.value + 0.1 * torch.randn_like(layer.last.value)
    residual = (cell.step(z, context) - z).norm(dim=1)
    assert ((cell.readout(z, context) - exact).norm(dim=1) <= factor * residual).all()


def test_monotone_rows_are_sharper_than_the_published_bound():
    torch.manual_seed(0)
    model = create_model("monotone-digits").double()
    layer, W = model.equilibrium, model.head.weight.detach()
    found = lipschitz_bound(model)
    norm = float(torch.linalg.matrix_norm(layer.cell.inputs.weight.detach(), 2))
    published = torch.linalg.vector_norm(W[:, None] - W, dim=2) * norm / layer.margin
    upper = torch.triu_indices(10, 10, 1)
    assert (found.pairs[upper[0], upper[1]] < published[upper[0], upper[1]]).all()


def test_unknown_parts_are_named():
    found = lipschitz_bound(create_model("residual-deq-mnist"))
    assert found.value == math.inf
    assert [part.name for part in found.unknown] == ["equilibrium"]
    assert found.pairs is None
    found = lipschitz_bound(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)))
    assert "LayerNorm" in found.unknown[0].theorem
    assert lipschitz_bound(BasicBlock(2, 2).eval()).value > 1


class Changed(ImageNetwork):
    def forward(self, x: Tensor) -> Tensor:
        return 10 * super().forward(x)


def test_network_that_computes_something_else_inherits_no_bound():
    model = create_model("opteq-digits")
    changed = Changed(model.extractor, model.equilibrium, model.head, (1, 8, 8))
    assert "Changed has a forward of its own" in lipschitz_bound(changed).unknown[0].theorem


class Own(Cell):
    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(3, 3)

    def inject(self, x: Tensor) -> Tensor:
        return self.inputs(x)

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return 0.5 * torch.tanh(z) + context

    def lipschitz(self) -> float:
        return 0.5

    def input_lipschitz(self) -> Bound:
        return self.inputs


def test_cell_of_ones_own_is_bounded_by_what_it_declares():
    cell = Own()
    norm = float(torch.linalg.matrix_norm(cell.inputs.weight.detach().double(), 2))
    assert lipschitz_bound(Equilibrium(cell)).value == pytest.approx(2 * norm)


def test_part_that_comes_twice_counts_twice():
    linear = nn.Linear(3, 3).double()
    once = lipschitz_bound(nn.Sequential(linear)).value
    assert lipschitz_bound(nn.Sequential(linear, nn.ReLU(), linear)).value == pytest.approx(once**2)
    pool = nn.AdaptiveAvgPool2d(8)
    images = torch.zeros(1, 1, 4, 4)
    assert lipschitz_bound(nn.Sequential(pool, pool), images).value == math.inf


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(1, 1, 1, padding=1, padding_mode="circular"),
        nn.Conv2d(1, 1, 3, padding=2, padding_mode="circular"),
        nn.Conv1d(1, 1, 3, padding=2, padding_mode="circular"),
        nn.Softplus(threshold=0.0),
        nn.Flatten(0),
        nn.Unflatten(0, (1, 1)),
    ],
)
def test_settings_that_repeat_or_jump_have_no_bound(module):
    assert lipschitz_bound(nn.Sequential(module)).value == math.inf


def test_circular_padding_within_the_reach_of_a_kernel_is_bounded():
    torch.manual_seed(0)
    same = nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular").double()
    assert exact_norm(same, (1, 6, 6)) <= lipschitz_bound(same).value < math.inf


def test_normalisation_of_another_axis_is_not_folded():
    linear, norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[10.0, 0.0], [0.0, 0.1]]))
        norm.weight.copy_(torch.tensor([0.1, 10.0]))
    model = nn.Sequential(linear, norm).double().eval()
    along = lipschitz_bound(model, torch.zeros(1, 2, 2, dtype=torch.float64)).value
    assert exact_norm(model, (2, 2)) <= along
    rows = lipschitz_bound(model, torch.zeros(1, 2, dtype=torch.float64)).value
    assert exact_norm(model, (2,)) <= rows < 2


def hooked_weights() -> nn.Module:
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(nn.Linear(3, 3))


def hooked(module: nn.Module, place: str = "", *, before: bool = False) -> nn.Module:
    inside = module.get_submodule(place)
    if before:
        inside.register_forward_pre_hook(lambda _, inputs: (100 * inputs[0],))
    else:
        inside.register_forward_hook(lambda _, __, y: 100 * y)
    return module


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: nn.Sequential(hooked(nn.Linear(3, 3))), "0"),
        (lambda: nn.Sequential(hooked(nn.Linear(3, 3), before=True)), "0"),
        (lambda: nn.Sequential(hooked(nn.Identity())), "0"),
        (lambda: nn.Sequential(hooked(nn.Sequential(nn.ReLU()))), "0"),
        (lambda: nn.Sequential(hooked_weights()), "0"),
        (lambda: nn.Sequential(hooked(OptEq(3, 3, 4), before=True)), "0"),
        (lambda: nn.Sequential(hooked(OptEq(3, 3, 4), "cell")), "0.cell"),
        (lambda: nn.Sequential(hooked(OptEq(3, 3, 4), "cell.inputs.0")), "0.cell.inputs.0"),
    ],
)
def test_module_with_a_hook_has_no_bound(make, name):
    found = lipschitz_bound(make())
    assert found.value == math.inf
    assert found.pairs is None
    assert name in [part.name for part in found.unknown if "hook" in part.theorem]


class Louder(type(OptEq(3, 4, 8).cell)):
    def inject(self, x: Tensor) -> Tensor:
        return super().inject(100 * x)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda cell: cell,
        lambda cell: Skip(cell, 0.5),
        lambda cell: ChangeOfVariable(cell, scale=2.0),
        lambda cell: Regularized(cell, "l2", 0.1),
        lambda cell: Skip(Regularized(cell, "l2", 0.1), 0.5),
    ],
)
def test_wrapped_subclass_inherits_no_bound(wrap):
    cell = OptEq(3, 4, 8).cell
    cell.__class__ = Louder
    layer = Equilibrium(wrap(cell))
    found = lipschitz_bound(nn.Sequential(layer, nn.Linear(4, 2)))
    assert "Louder has an inject of its own" in found.unknown[0].theorem
    assert found.pairs is None
    assert found.errors[0].factor == math.inf


class Loud(TableNetwork):
    def prepare(self, x: Tensor) -> Tensor:
        return 100 * x


def test_network_that_prepares_samples_otherwise_inherits_no_bound():
    found = lipschitz_bound(Loud(OptEq(3, 4, 8), nn.Linear(4, 2), (3,)))
    assert "Loud has a prepare of its own" in found.unknown[0].theorem


def test_bound_changes_nothing_in_a_model_in_training():
    linear = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
    nn.init.normal_(linear.parametrizations.weight.original)  # as a step of an optimiser would
    model = nn.Sequential(linear, nn.BatchNorm1d(3).eval())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert lipschitz_bound(model).value < math.inf
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (model.training, linear.training, model[1].training) == (True, True, False)
