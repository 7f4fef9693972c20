"""Convolutions with normalised kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from equipoise.models.normalized_convolution import NormalizedConvolution


def _matrix(kernel: torch.Tensor, side: int) -> torch.Tensor:
    """The convolution of small images with borders, as a matrix."""
    into = kernel.shape[1]
    images = torch.eye(into * side * side, dtype=kernel.dtype).view(-1, into, side, side)
    return F.conv2d(images, kernel, padding=kernel.shape[2] // 2).flatten(1)


def test_spectral_normalisation_bounds_the_operator_of_any_image_size() -> None:
    torch.manual_seed(0)
    part = NormalizedConvolution(3, 4, 3, normalization="spectral", norm=0.7)
    with torch.no_grad():
        part.weight.fill_(0.2)  # of which the kernel as a matrix tells too little
        part.weight.add_(0.01 * torch.randn_like(part.weight))
    kernel = part.kernel().detach().double()
    norms = [float(torch.linalg.matrix_norm(_matrix(kernel, side), 2)) for side in (3, 8, 12)]
    assert norms == sorted(norms)
    assert 0.6 < norms[-1] <= 0.7
    as_matrix = kernel / torch.linalg.matrix_norm(kernel.flatten(1), 2)
    assert float(torch.linalg.matrix_norm(_matrix(as_matrix, 8), 2)) > 2


def test_spectral_normalisation_is_differentiated() -> None:
    torch.manual_seed(0)
    part = NormalizedConvolution(2, 3, 3, normalization="spectral").double()
    part.draw_(0.1)
    x = torch.randn(2, 2, 4, 4, dtype=torch.float64)

    def output(weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(part, {"weight": weight}, (x,))

    assert torch.autograd.gradcheck(output, part.weight.detach().requires_grad_())


def test_spectral_normalisation_of_zero_is_zero() -> None:
    part = NormalizedConvolution(2, 3, 3, normalization="spectral")
    torch.nn.init.zeros_(part.weight)
    assert not part.kernel().any()
