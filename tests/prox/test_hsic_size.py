"""HSIC over the positions of images."""

import torch

from equipoise.prox import HSIC


def test_hsic_of_many_observations_uses_random_frequencies_by_default():
    few, many = torch.randn(4, 3, 5, 5), torch.randn(4, 3, 12, 12)
    assert torch.equal(HSIC().value(many), HSIC(features=64).value(many))
    assert not torch.equal(HSIC().value(few), HSIC(features=64).value(few))
