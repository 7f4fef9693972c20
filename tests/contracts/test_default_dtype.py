"""Everything works under another default precision than torch's own."""

from collections.abc import Iterator

import pytest
import torch

from equipoise import (
    OptEq,
    OptEqConv2d,
    certify,
    create_model,
    objective,
    project_norms,
)


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


LAYERS = {
    "dense": lambda: OptEq(4, 5, [6, 7], learn_alpha=True),
    "convolution": lambda: OptEqConv2d(2, 5, [6, 8], norm="project"),
    "separable": lambda: OptEqConv2d(2, 5, 6, separable=True),
    "groups": lambda: OptEqConv2d(2, 4, 8, groups=2),
    "pooled": lambda: OptEqConv2d(2, 5, [6, 8], pool=[1, 2], norm="project"),
    "regularised": lambda: OptEq(4, 5, 6, regularizer="decorrelation", strength=0.01),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", LAYERS)
def test_layer_trains_and_certifies_in_either_precision(name, dtype):
    layer = LAYERS[name]().to(dtype)
    shape = (3, 4) if name in ("dense", "regularised") else (3, 2, 6, 6)
    x = torch.randn(shape, dtype=dtype)
    y = layer(x)
    assert y.dtype == dtype
    y.square().sum().backward()
    for parameter in layer.parameters():
        assert parameter.grad.dtype == dtype
    if layer.layers.projects:
        project_norms(layer)
    if name != "regularised":
        assert certify(layer).holds


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_objective_in_either_precision(dtype):
    layer = OptEqConv2d(2, 3, 4, tolerance=1e-6, max_steps=500).to(dtype)
    x = torch.randn(2, 2, 4, 4, dtype=dtype)
    assert objective(layer, x).minimizer_gap(layer(x)).max() <= 1e-4


@pytest.mark.parametrize("model", ["opteq-digits"])
def test_model_trains_in_the_default_precision(model):
    network = create_model(model)
    x = torch.randn(2, *network.input_shape)
    network(x).sum().backward()
    assert all(p.grad.dtype == torch.float64 for p in network.parameters())
