"""Every registered model keeps the promises of `equipoise.testing.check_model`."""

import pytest
import torch

from equipoise.models import list_models
from equipoise.testing import check_model

SMALL_SIDES = {
    "opteq-imagenet-small": 40,
    "opteq-imagenet-mid": 40,
    "opteq-cityscapes": 32,
    "fcn-cityscapes": 32,
    "multiscale-camvid": 48,
    "multiscale-cityscapes-large": 64,
    "multiscale-cityscapes-small": 64,
    "multiscale-cityscapes-xl": 64,
    "multiscale-imagenet-small": 64,
    "multiscale-imagenet-xl": 64,
    "resnet-18": 32,
    "resnet-34": 32,
    "resnet-50": 32,
}
"""Images smaller than those the largest models were made for, so that a CPU can run them."""


LARGE = [
    "augmented-neural-ode-cifar10",
    "monotone-cifar10-1m",
    "multiscale-cifar10-large",
    "multiscale-cityscapes-large",
    "multiscale-cityscapes-small",
    "multiscale-cityscapes-xl",
    "multiscale-imagenet-small",
    "multiscale-imagenet-xl",
    "neural-ode-cifar10",
    "opteq-cifar10-1.4m",
    "opteq-cityscapes",
    "opteq-imagenet-mid",
    "opteq-imagenet-small",
    "resnet-34",
    "resnet-50",
    "wide-resnet-50",
]
"""Models that take many seconds; they differ from others by numbers and blocks only."""


@pytest.mark.parametrize("name", sorted({*list_models()} - {*LARGE}))
def test_model_keeps_its_promises(name):
    side = SMALL_SIDES.get(name)
    check_model(name, None if side is None else torch.randn(2, 3, side, side))


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_large_model_keeps_its_promises(name):
    test_model_keeps_its_promises(name)
