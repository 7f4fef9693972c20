"""The largest matrix of a symbol is found, and proven to be so, with and without kernels."""

import math
import os
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor

from equipoise import convolution_bound
from equipoise.core.kernels import find_compiled, without_kernels
from equipoise.operators import symbol_search
from equipoise.operators.convolution_norm import (
    convolution_within,
    separable_bound,
    separable_within,
)
from equipoise.operators.symbol import KernelSymbol

compiled_only = pytest.mark.skipif(
    os.environ.get("EQUIPOISE_KERNELS") == "0", reason="kernels are switched off"
)


def kernels() -> object:
    pytest.importorskip("numba")
    with torch.no_grad():
        return find_compiled(torch.zeros(1), symbol_search.KERNELS)


def true_bound(kernel: Tensor, groups: int = 1) -> float:
    """The bound by the singular values of all matrices."""
    parts = kernel.detach().double().numpy().reshape(groups, -1, *kernel.shape[1:])
    grid = tuple(12 * (side - 1) or 1 for side in kernel.shape[2:])
    size = tuple(max(n, side) for n, side in zip(grid, kernel.shape[2:], strict=True))
    matrices = np.fft.fft2(parts, s=size).transpose(0, 3, 4, 1, 2)
    axes = sum(side > 1 for side in kernel.shape[2:])
    largest = np.linalg.norm(matrices, 2, axis=(3, 4)).max()
    return float(largest) * math.cos(math.pi / 24) ** -axes


def hidden(side: int, frequency: tuple[float, float]) -> Tensor:
    """A kernel that is largest where the entries of its matrices are not.

    Most channels are equally large at all frequencies; one is a little larger at one of them.
    """
    phases = frequency[0] * torch.arange(3.0)[:, None] + frequency[1] * torch.arange(3.0)
    kernel = torch.zeros(side, side, 3, 3, dtype=torch.float64)
    kernel[:, :, 1, 1] = torch.eye(side, dtype=torch.float64)
    # |wave| is 1.05 at one frequency, and the channel next to it is small just there
    kernel[0, 0] = 1.05 * phases.cos() / 5
    kernel[1, 1] = 0.1 * kernel[1, 1]
    return kernel


CASES = {
    "random": torch.randn(40, 20, 3, 3, generator=torch.Generator().manual_seed(0)),
    "wide": torch.randn(7, 29, 3, 3, generator=torch.Generator().manual_seed(1)),
    "not square": torch.randn(9, 12, 2, 5, generator=torch.Generator().manual_seed(2)),
    "row": torch.randn(9, 12, 1, 4, generator=torch.Generator().manual_seed(3)),
    "hidden": hidden(24, (2 * math.pi / 8, 2 * math.pi / 6)),
    "hidden at zero": hidden(24, (0.0, 0.0)),
    "hidden at the corner": hidden(24, (math.pi, math.pi)),
    "all equal": hidden(24, (0.0, 0.0)) * 0
    + torch.eye(24, dtype=torch.float64)[:, :, None, None]
    * torch.eye(3, dtype=torch.float64)[1, :, None]
    * torch.eye(3, dtype=torch.float64)[1],
    "rank one": torch.ones(16, 16, 3, 3),
    "one entry": torch.zeros(8, 8, 3, 3).index_put(
        tuple(torch.tensor([place]) for place in (3, 4, 0, 2)), torch.tensor(2.0)
    ),
    "large side": torch.randn(64, 64, 3, 3, generator=torch.Generator().manual_seed(4)),
}


@pytest.mark.parametrize("context", [nullcontext, without_kernels])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_the_largest_matrix_is_found(name, dtype, context):
    for scale in (1, 1e-18, 1e18):
        kernel = (CASES[name].to(torch.float64) * scale).to(dtype)
        true, rounding = true_bound(kernel), 1e-11 + 4 * torch.finfo(dtype).eps
        with context():
            bound = convolution_bound(kernel).item()
            assert true * (1 - 1e-13) <= bound <= true * (1 + rounding)
            assert convolution_within(kernel, true * (1 + 2 * rounding))
            assert not convolution_within(kernel, true * (1 - 1e-6))


@pytest.mark.parametrize("context", [nullcontext, without_kernels])
def test_groups_and_what_is_not_finite(context):
    torch.manual_seed(0)
    kernel = torch.randn(24, 6, 3, 3)
    with context():
        assert convolution_bound(kernel, groups=3).item() == pytest.approx(
            true_bound(kernel, 3), rel=1e-6
        )
        for bad in (math.nan, math.inf):
            kernel[5, 2, 1, 0] = bad
            assert convolution_bound(kernel).isnan()
            assert not convolution_within(kernel, 1e30)


@compiled_only
def test_a_wrong_guess_changes_nothing_but_the_time(monkeypatch):
    """Wherever the search begins, and whatever climbing says, what is not proven is looked at."""
    kernels()
    kernel = torch.randn(40, 20, 3, 3, generator=torch.Generator().manual_seed(5))
    plain = convolution_bound(kernel)
    for number in (0, 17, 288):
        monkeypatch.setattr(symbol_search._Columns, "guess", lambda _self, n=number: n)
        assert convolution_bound(kernel) == plain
        monkeypatch.setattr(symbol_search._Columns, "highest", lambda _self, n=number: n)
        assert convolution_bound(kernel) == plain
        monkeypatch.undo()
    monkeypatch.setattr(symbol_search._Columns, "climb", lambda _self, _level: None)
    assert convolution_bound(kernel) == plain


@compiled_only
def test_kernels_prove_what_is_true_and_little_less():
    """Of matrices with known eigenvalues, and NaN in one of them, whose neighbours do not mind."""
    compiled = kernels()
    generator = torch.Generator().manual_seed(6)
    for side in (2, 5, 28, 64):
        count = 70  # more than are factorised at once
        real, imaginary = torch.randn(
            2, count, side, 2 * side, dtype=torch.float64, generator=generator
        )
        K = torch.complex(real, imaginary)
        grams = K @ K.mH / side
        largest = torch.linalg.eigvalsh(grams)[:, -1]
        row, column = torch.tril_indices(side, side)
        lower = grams[:, row, column].T.to(torch.complex64)
        lower[0, 3] = math.nan
        parts = [part.contiguous().numpy() for part in (lower.real, lower.imag)]
        for factor, above in ((0.5, True), (1 - 1e-3, True), (1 + 1e-3, False), (2.0, False)):
            unproven = np.empty(count, dtype=np.bool_)
            levels = (factor * largest).float().numpy()
            compiled.find_unproven(*parts, side, np.arange(count), levels, unproven)
            assert unproven[3]
            assert (np.delete(unproven, 3) == above).all()


@compiled_only
def test_kernels_see_the_matrices_of_the_symbol():
    compiled = kernels()
    for shape in ((12, 8, 3, 3), (8, 12, 3, 3), (9, 5, 2, 4), (6, 4, 1, 3), (6, 4, 5, 1)):
        taps = torch.randn(1, *shape, dtype=torch.float64)
        grid = tuple(12 * (side - 1) or 1 for side in shape[2:])
        symbol = KernelSymbol(taps, grid)
        grams = symbol.grams(torch.arange(len(symbol)), torch.float64)
        row, column = torch.tril_indices(symbol.side, symbol.side)
        lower = grams[:, row, column].T
        real, imaginary = symbol.columns(compiled)
        for found, true in ((real, lower.real), (imaginary, lower.imag)):
            assert (found - true).abs().max() <= symbol.error()


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_bound_is_that_of_the_kernel_whatever_the_default_dtype(default):
    kernel = CASES["random"]
    expected = convolution_bound(kernel)
    torch.set_default_dtype(default)
    try:
        found = convolution_bound(kernel)
        within = convolution_within(kernel, 1.01 * float(expected))
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    assert within


def test_bound_is_found_below_a_default_device_that_has_no_numbers():
    kernel = CASES["random"]
    with torch.device("meta"):
        found = convolution_bound(kernel)
    assert torch.equal(found, convolution_bound(kernel))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("scale", [1e-18, 1e-25, 1e-200, 1e-310])
def test_kernel_far_below_a_limit_is_within_it(scale):
    kernel = scale * CASES["random"].double()
    assert convolution_within(kernel, 0.99)


def test_separable_bound_is_not_below_a_norm_that_overflows():
    depthwise = 1e155 * torch.tensor([[[[1.0, -1.0]]]], dtype=torch.float64)
    pointwise = torch.full((1, 1, 1, 1), 1e155, dtype=torch.float64)
    assert not separable_within(depthwise, pointwise, 1, 1e300)
    assert not float(separable_bound(depthwise, pointwise, 1)) < 1e308
