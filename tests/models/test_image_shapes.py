"""Networks named after one data set are made for images of other shapes as well."""

from __future__ import annotations

import pytest
import torch

from equipoise import create_model
from equipoise.core import SettingError

NETWORKS = [
    "residual-deq-mnist",
    "residual-deq-cifar10",
    "weight-tied-cifar10",
    "dnn-cifar10-199k",
    "augmented-neural-ode-cifar10",
    "neural-ode-mnist",
    "monotone-cifar10-172k",
    "monotone-cifar10-170k",
]


# Untrained residual DEQs need not reach their tolerance.
@pytest.mark.filterwarnings("ignore::equipoise.core.errors.ConvergenceWarning")
@pytest.mark.parametrize("name", NETWORKS)
def test_network_is_made_for_the_shape_of_the_images(name: str) -> None:
    torch.manual_seed(0)
    model = create_model(name, input_shape=(2, 12, 16)).eval()
    assert model.input_shape == (2, 12, 16)
    with torch.no_grad():
        assert model(torch.rand(2, 2, 12, 16)).shape == (2, 10)


@pytest.mark.parametrize("name", NETWORKS)
def test_network_refuses_the_shape_of_a_table(name: str) -> None:
    with pytest.raises(SettingError, match="input_shape must be channels, height and width"):
        create_model(name, input_shape=(30,))
