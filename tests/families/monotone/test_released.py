"""Released tensors become a network that computes what the authors' one does."""

import pytest
import torch
from torch import nn

from equipoise.families.monotone import from_released


def released(features=6, numbers=16, classes=3):
    """Tensors of the form of the authors' dense model, made by modules such as theirs."""
    torch.manual_seed(0)
    linear_module = nn.Module()
    linear_module.U = nn.Linear(numbers, features)
    linear_module.A = nn.Linear(features, features, bias=False)
    linear_module.B = nn.Linear(features, features, bias=False)
    model = nn.Module()
    model.mon = nn.Module()
    model.mon.linear_module = linear_module
    model.Wout = nn.Linear(features, classes)
    return model.double()


@pytest.mark.parametrize("margin", [1.0, 20.0])
@torch.no_grad()
def test_released_tensors_compute_what_the_authors_layer_does(margin):
    theirs = released()
    ours = from_released(theirs.state_dict(), margin=margin, input_shape=(1, 4, 4), tolerance=1e-12)
    images = torch.randn(5, 1, 4, 4, dtype=torch.float64)
    x, lin = images.flatten(1), theirs.mon.linear_module
    z = ours.features(images)
    # The sum that the authors' layer takes the ReLU of, in the order of their formula.
    product = (1 - margin) * z - lin.A(z) @ lin.A.weight + lin.B(z) - z @ lin.B.weight
    assert torch.allclose(torch.relu(product + lin.U(x)), z, atol=1e-10)
    assert torch.allclose(ours(images), theirs.Wout(z), atol=1e-12)


@pytest.mark.parametrize(
    ("change", "options", "sentence"),
    [
        (lambda d: d.pop("Wout.bias"), {}, "must hold the tensors of a dense model.*'Wout.bias'"),
        (lambda d: d.update(g=torch.ones(1)), {}, r"must hold .*\['g'\] besides"),
        (dict.copy, {"input_shape": (1, 5, 5)}, "input_shape must have 16 numbers"),
        (dict.copy, {"margin": 0.0}, "margin must be .*positive"),
        (
            lambda d: d.update({"mon.linear_module.B.weight": torch.ones(2, 2)}),
            {},
            r"operator.B of shape \(6, 6\); got shape \(2, 2\)",
        ),
    ],
)
def test_other_tensors_are_refused_in_one_sentence(change, options, sentence):
    tensors = dict(released().state_dict())
    change(tensors)
    with pytest.raises(ValueError, match=sentence):
        from_released(tensors, **{"margin": 1.0, "input_shape": (1, 4, 4), **options})
