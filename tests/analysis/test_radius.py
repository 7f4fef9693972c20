"""Certified radii, and attacks that must not break them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from equipoise import Equilibrium, OptEq, create_model
from equipoise.analysis import (
    AttackSettings,
    RadiusCertifier,
    attack_radii,
    certified_accuracy,
)
from equipoise.families.lipschitz import LipschitzBounded
from equipoise.families.relu_implicit import ReluImplicitNetwork
from equipoise.families.well_posed import WellPosed
from equipoise.layers import Bound
from equipoise.models import TableNetwork


def blobs(count: int = 256) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, 3, (count,), generator=generator)
    centres = torch.tensor([[1.0, 0.0, 0.0, 1.0], [-1.0, 1.0, 0.0, 0.0], [0.0, -1.0, 1.0, 0.0]])
    return centres[y] + 0.6 * torch.randn(count, 4, generator=generator), y


def train(model: nn.Module, steps: int, x: Tensor, y: Tensor) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        for module in model.modules():
            if isinstance(module, Equilibrium) and module.cell.projects:
                module.cell.project_()


NETWORKS = {
    "opteq": lambda: TableNetwork(OptEq(4, 8, 10, norm="project"), nn.Linear(8, 3), (4,)),
    "opteq-deep": lambda: TableNetwork(OptEq(4, 8, [6, 6], norm="project"), nn.Linear(8, 3), (4,)),
    "monotone": lambda: create_model("monotone-table", width=8),
    "lipschitz": lambda: TableNetwork(LipschitzBounded(4, 8, 3, 4.0), nn.Identity(), (4,)),
    "well-posed": lambda: TableNetwork(WellPosed(4, 8, norm="project"), nn.Linear(8, 3), (4,)),
    "relu-implicit": lambda: ReluImplicitNetwork(
        (4,), 32, outputs=3, unit_norm=False, project=True
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("monotone", "relu-implicit")
        else pytest.param(name, marks=pytest.mark.slow)
        for name in NETWORKS
    ],
)
def test_attack_breaks_no_certificate(name):
    torch.manual_seed(0)
    x, y = blobs()
    model = NETWORKS[name]()
    train(model, 60, x, y)
    certifier = RadiusCertifier(model)
    found = certifier.radii(x)
    if name == "relu-implicit":  # its sum hides the equilibrium, so that errors are not known
        assert float(found.radius.max()) == 0
        return
    assert float(found.radius.median()) > 0.02
    assert (found.radius >= found.by_norm).all()
    exact = certifier.model
    for factor in (1.0, 10.0):
        points, _ = attack_radii(
            exact, x.double(), found.predicted, factor * found.radius, AttackSettings(20, 2)
        )
        assert ((points - x).norm(dim=1) <= factor * found.radius).all()
        changed = certifier.logits(points)[0].argmax(dim=1) != found.predicted
        assert bool(changed.any()) == (factor > 1)


def test_radius_of_a_linear_network_is_the_distance_to_the_boundary():
    torch.manual_seed(0)
    layer = OptEq(4, 5, 6, "identity", tolerance=1e-12)
    model = TableNetwork(layer, nn.Linear(5, 2), (4,)).double()
    x = torch.randn(20, 4, dtype=torch.float64)
    J = torch.func.jacrev(lambda row: model(row[None])[0])(x[0]).detach()
    y = model(x).detach()
    true = (y[:, 0] - y[:, 1]).abs() / (J[0] - J[1]).norm()
    certifier = RadiusCertifier(model, first=[Bound("scale", 2.0)], prepare=lambda x: 2 * x)
    found = certifier.radii(x / 2)
    assert (found.radius <= true / 2).all()
    assert (found.radius > 0).any()
    # An attack at the true distance succeeds, just short of it it does not.
    for factor, breaks in ((0.99, False), (1.01, True)):
        _, margin = attack_radii(model, x, y.argmax(dim=1), factor * true, AttackSettings(10, 1))
        assert bool((margin < 0).all()) == breaks
        assert bool((margin < 0).any()) == breaks


def test_unsolved_samples_have_no_radius():
    torch.manual_seed(0)
    model = create_model("monotone-table", width=8)
    x, _ = blobs(8)
    solved = RadiusCertifier(model).radii(x)
    loose = RadiusCertifier(model, tolerance=0.5, max_steps=1).radii(x)
    assert (loose.error > 1e3 * solved.error).all()
    assert (loose.radius < solved.radius).all()


def test_certified_accuracy_counts_right_samples_beyond_a_radius():
    radius, correct = torch.tensor([0.1, 0.3, 0.5]), torch.tensor([True, False, True])
    found = certified_accuracy(radius, correct, [0.1, 0.4])
    assert found == {0.1: pytest.approx(1 / 3), 0.4: pytest.approx(1 / 3)}
    for bad in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="must be a positive number"):
            certified_accuracy(radius, correct, [bad])


def test_radii_of_a_network_without_classes_are_refused():
    model = create_model("monotone-table", num_classes=1)
    with pytest.raises(ValueError, match="two or more classes"):
        RadiusCertifier(model).radii(torch.zeros(2, 4))


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_certificates_hold_after_ten_thousand_steps_with_projection(name):
    from equipoise import certify

    torch.manual_seed(0)
    x, y = blobs(64)
    model = NETWORKS[name]()
    train(model, 10_000, x, y)
    assert all(one.holds for one in certify(model).values())
    certifier = RadiusCertifier(model)
    assert certifier.bound.value < math.inf
    found = certifier.radii(x)
    _, margin = attack_radii(
        certifier.model, x.double(), found.predicted, found.radius, AttackSettings(50, 3)
    )
    assert (margin > 0)[found.radius > 0].all()


def test_radii_count_a_normalisation_after_the_last_map():
    torch.manual_seed(0)
    linear, norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
    with torch.no_grad():
        norm.weight.mul_(torch.tensor([50.0, 20.0, 80.0]))
    x = torch.randn(64, 3, dtype=torch.float64)
    for sample in (None, x):
        certifier = RadiusCertifier(nn.Sequential(linear, norm), x=sample)
        found, y = certifier.radii(x), certifier.logits(x)[0]
        scale = norm.weight / (norm.running_var + norm.eps).sqrt()
        rows = (scale[:, None] * linear.weight).detach().double()
        apart = (rows[found.predicted][:, None] - rows).norm(dim=2)
        gaps = y.gather(1, found.predicted[:, None]) - y
        true = torch.where(apart > 0, gaps / apart, math.inf).amin(dim=1)
        assert (found.radius <= true * (1 + 1e-6)).all()
    assert (found.radius >= 0.99 * true).all()  # rows are known to be what is given


def test_radii_of_a_last_map_that_acts_on_parts_of_a_sample_are_by_the_norm():
    model = nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Linear(2, 2), nn.Flatten())
    found = RadiusCertifier(model).radii(torch.randn(5, 4))
    assert (found.radius > 0).all()


def test_largest_residual_of_a_layer_that_comes_twice_counts():
    torch.manual_seed(0)
    layer = OptEq(4, 4, 6)
    certifier = RadiusCertifier(nn.Sequential(layer, layer, nn.Linear(4, 2)), max_steps=1)
    x = 100 * torch.randn(3, 4)
    first = RadiusCertifier(nn.Sequential(layer, nn.Linear(4, 2)), max_steps=1)
    assert len(certifier.bound.errors) == 2
    assert (certifier.logits(x)[1]["0"] >= first.logits(x)[1]["0"]).all()
