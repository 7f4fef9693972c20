"""Every activation keeps the promises of `equipoise.testing.check_activation`."""

import pytest
import torch

from equipoise.prox import ACTIVATIONS, ELU, LeakyReLU, MatrixActivation, SoftShrink
from equipoise.testing import check_activation

VARIANTS = [LeakyReLU(0.0), LeakyReLU(0.3), ELU(0.0), ELU(0.4), ELU(2.5), SoftShrink(0.0)]


@pytest.mark.parametrize("activation", [*ACTIVATIONS, *VARIANTS], ids=str)
def test_activation_keeps_its_promises(activation):
    check_activation(activation)


def test_matrix_activation_keeps_its_promises():
    S = torch.tensor([[0.5, 0.2], [0.2, 0.7]], dtype=torch.float64)
    check_activation(MatrixActivation(S), torch.randn(60, 2))
