"""Baselines: published sizes, and the flow of a neural ODE beside SciPy's."""

from __future__ import annotations

import importlib

import pytest
import torch
from scipy.integrate import solve_ivp

from equipoise import ConvergenceError, create_model
from equipoise.core import SettingError
from equipoise.families.explicit import NeuralODE

PUBLISHED = {
    "resnet-18": 11_689_512,
    "resnet-34": 21_797_672,
    "resnet-50": 25_557_032,
    "wide-resnet-50": 68_883_240,
    "neural-ode-mnist": 84_395,
    "augmented-neural-ode-mnist": 84_816,
    "neural-ode-cifar10": 172_358,
    "augmented-neural-ode-cifar10": 171_799,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_baselines_have_their_published_sizes(name: str) -> None:
    with torch.device("meta"):
        model = create_model(name)
    assert model.parameter_counts()["total"] == PUBLISHED[name]


@pytest.mark.parametrize("stem", ["large", "small"])
def test_width_scales_every_stage_of_a_resnet(stem: str) -> None:
    whole, narrow = (create_model("resnet-18", stem=stem, width=width) for width in (64, 16))
    pairs = [
        (one.out_channels, other.out_channels)
        for one, other in zip(whole.modules(), narrow.modules(), strict=True)
        if isinstance(one, torch.nn.Conv2d)
    ]
    assert len(pairs) == 20
    assert all(one == 4 * other for one, other in pairs)
    assert narrow(torch.rand(1, *narrow.input_shape)).shape == (1, 1000)
    with pytest.raises(SettingError, match=r"resnet.width must be"):
        create_model("resnet-18", width=0)


@pytest.mark.parametrize(
    ("baseline", "rival"),
    [("dnn-cifar10-199k", 199_000), ("fcn-cityscapes", "opteq-cityscapes")],
)
def test_baselines_without_published_widths_have_the_size_of_their_rival(
    baseline: str, rival: str | int
) -> None:
    size = create_model(baseline).parameter_counts()["total"]
    other = rival if isinstance(rival, int) else create_model(rival).parameter_counts()["total"]
    assert abs(size / other - 1) < 0.005


@pytest.mark.parametrize("adjoint", [False, True])
def test_neural_ode_agrees_with_scipy_and_its_gradient_with_differences(adjoint: bool) -> None:
    torch.manual_seed(0)
    flow = NeuralODE(2, 4, 1, tolerance=1e-9, adjoint=adjoint).double()
    x = torch.randn(1, 2, 3, 3, dtype=torch.float64)
    start = torch.cat([x, torch.zeros(1, 1, 3, 3, dtype=torch.float64)], dim=1)

    def field(_: float, z: object) -> object:
        with torch.no_grad():
            return flow.field(torch.as_tensor(z).reshape(start.shape)).flatten().numpy()

    path = solve_ivp(field, (0, 1), start.flatten().numpy(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        flow(x).detach().flatten(), torch.from_numpy(path.y[:, -1]), rtol=1e-5, atol=2e-6
    )
    weights = list(flow.parameters())
    slope = torch.autograd.grad(flow(x).square().sum(), weights)
    length = torch.cat([g.flatten() for g in slope]).norm()
    values = []
    with torch.no_grad():
        for step in (1e-3, -2e-3):  # far above the error of the integration at a kink
            for weight, g in zip(weights, slope, strict=True):
                weight += step * g / length
            values.append(flow(x).square().sum())
    torch.testing.assert_close((values[0] - values[1]) / 2e-3, length, rtol=2e-3, atol=0)


def test_neural_ode_without_torchdiffeq_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    flow = NeuralODE(1, 2)
    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(SettingError, match=r"pip install 'equipoise\[ode\]'"):
        flow(torch.zeros(1, 1, 2, 2))


def test_neural_ode_that_cannot_be_integrated_raises_one_sentence() -> None:
    flow = NeuralODE(1, 2)
    with torch.no_grad():
        flow.field[4].weight.mul_(1e30)
    with pytest.raises(ConvergenceError, match=r"Lower the learning rate"):
        flow(torch.ones(1, 1, 2, 2))


def test_wide_resnet_takes_small_images_and_trains() -> None:
    model = create_model("wide-resnet-50", num_classes=3, stem="small")
    loss = model(torch.randn(2, 3, 8, 8)).square().mean()
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("stem", ["large", "small"])
def test_resnet_takes_grey_images_of_any_size(stem: str) -> None:
    model = create_model("resnet-18", num_classes=3, stem=stem, input_shape=(1, 14, 14)).eval()
    for side in (14, 9):
        assert model(torch.randn(2, 1, side, side)).shape == (2, 3)
    with pytest.raises(ValueError, match=r"must have shape \(batch, 1, height, width\)"):
        model(torch.randn(2, 3, 14, 14))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"filters": 0}, r"NeuralODE.filters must"),
        ({"filters": 2, "augment": -1}, r"NeuralODE.augment must be a whole number, 0 or more"),
        ({"filters": 2, "method": "dopri"}, r"Did you mean 'dopri5'\?"),
        ({"filters": 2, "tolerance": 0}, r"NeuralODE.tolerance must"),
    ],
)
def test_neural_ode_refuses_nonsense(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        NeuralODE(1, **options)  # type: ignore[arg-type]
