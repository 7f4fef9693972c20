import pytest
import torch
from torch import Tensor
from torch.nn import functional

from equipoise import convolution_bound


def operator_norm(kernel: Tensor, size: int, mode: str) -> float:
    """The norm of the convolution on `size` x `size` images, from its matrix."""
    into = kernel.shape[1]
    basis = torch.eye(into * size * size, dtype=kernel.dtype).view(-1, into, size, size)
    edge = [side for k in (kernel.shape[3], kernel.shape[2]) for side in ((k - 1) // 2, k // 2)]
    padded = functional.pad(basis, edge, mode="circular") if mode == "circular" else functional.pad(basis, edge)
    return torch.linalg.matrix_norm(functional.conv2d(padded, kernel).flatten(1), 2).item()


@pytest.mark.parametrize("mode", ["zeros", "circular"])
@pytest.mark.parametrize("shape", [(4, 3, 3, 3), (2, 6, 3, 3), (3, 3, 1, 1), (3, 2, 5, 3), (1, 1, 2, 2)])
def test_convolution_bound_is_above_the_true_norm(shape, mode):
    for kind in ("random", "equal", "one tap"):
        kernel = torch.randn(shape, dtype=torch.float64)
        if kind == "equal":  # all taps alike: the worst case for the reshaped kernel
            kernel = torch.ones(shape, dtype=torch.float64)
        if kind == "one tap":
            kernel = kernel * (torch.arange(shape[2] * shape[3]).view(shape[2:]) == 0)
        true, bound = operator_norm(kernel, 7, mode), convolution_bound(kernel).item()
        assert true <= bound * (1 + 1e-12)
        if kind == "one tap" and mode == "circular":
            assert bound == pytest.approx(true)


def test_convolution_bound_holds_where_the_reshaped_kernel_does_not():
    kernel = torch.ones(3, 3, 3, 3, dtype=torch.float64)
    reshaped = kernel / torch.linalg.matrix_norm(kernel.flatten(1), 2)
    assert operator_norm(reshaped, 8, "zeros") > 1.6
    assert operator_norm(kernel / convolution_bound(kernel), 8, "zeros") <= 1


def test_convolution_bound_is_differentiable():
    kernel = torch.randn(3, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(convolution_bound, (kernel,))


def test_convolution_bound_refuses_other_shapes():
    with pytest.raises(ValueError, match=r"^convolution_bound.kernel must have shape \(out, in, h, w\); got \(3, 3\)\.$"):
        convolution_bound(torch.zeros(3, 3))
