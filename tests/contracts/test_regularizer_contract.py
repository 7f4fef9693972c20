"""Every regulariser keeps the promises of `equipoise.testing.check_regularizer`."""

import pytest

from equipoise.prox import HSIC, REGULARIZERS, Custom, Decorrelation, Incay, TotalVariation
from equipoise.testing import check_regularizer


def quartic(z):
    return z.flatten(1).pow(4).sum(dim=1)


def batch_mean(z):
    return z.mean(dim=0).square().sum()


VARIANTS = [
    Incay(epsilon=0.3),
    Decorrelation(epsilon=0.5),
    HSIC(features=6, seed=3),
    TotalVariation(epsilon=0.0),
    Custom(quartic, convex=True),
    Custom(batch_mean, coupled=True, lipschitz=2.0, convex=True),
]


@pytest.mark.parametrize("regularizer", [*REGULARIZERS, *VARIANTS], ids=str)
def test_regularizer_keeps_its_promises(regularizer):
    check_regularizer(regularizer)
