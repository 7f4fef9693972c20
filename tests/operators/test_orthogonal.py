"""Weights all of whose singular values are equal, against SciPy and against whole matrices."""

import pytest
import scipy.linalg
import torch

from equipoise.operators import Composed, Convolution, Dense, Operator, separable
from equipoise.operators.orthogonal import descend_to_frame, nearest_frame, symbol_floor


def singular_values(operator, shape):
    """Those of the operator's matrix, from its action on unit vectors."""
    size = torch.Size(shape).numel()
    eye = torch.eye(size, dtype=torch.float64).reshape(size, *shape)
    return torch.linalg.svdvals(operator(eye).detach().reshape(size, -1))


FRAMES = {
    "tall": lambda: (Dense(4, 7), (4,)),
    "wide": lambda: (Dense(7, 4), (7,)),
    "zeros": lambda: (Convolution(3, 5), (3, 5, 5)),
    "circular": lambda: (Convolution(5, 3, padding="circular"), (5, 5, 5)),
    "even": lambda: (Convolution(3, 3, (2, 4)), (3, 5, 5)),
    "groups": lambda: (Convolution(4, 6, groups=2), (4, 4, 4)),
    "depthwise": lambda: (Convolution(3, 3, groups=3), (3, 4, 4)),
    "separable": lambda: (separable(3, 5), (3, 4, 4)),
}


@pytest.mark.parametrize("name", FRAMES)
def test_drawn_frame_has_equal_singular_values_with_borders_too(name):
    operator, shape = FRAMES[name]()
    operator.draw_frame_()
    values = singular_values(operator.double(), shape)
    assert torch.allclose(values, torch.ones_like(values), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
@pytest.mark.parametrize("spread", [0.02, 1.0, 1e12])
def test_nearest_frame_is_the_polar_factor(shape, spread):
    torch.manual_seed(0)
    W = torch.linalg.qr(torch.randn(max(shape), min(shape), dtype=torch.float64))[0]
    W = (W if shape[0] >= shape[1] else W.mT) + spread * torch.randn(shape, dtype=torch.float64)
    expected = torch.from_numpy(scipy.linalg.polar(W.numpy())[0])
    assert torch.allclose(nearest_frame(W), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("factor", [0.0, 1e-30, 1.0, 1e30])
@pytest.mark.parametrize("shape", [(5, 8), (8, 5)])
def test_orthogonalized_matrix_is_an_exact_frame_of_its_size(factor, shape):
    operator = Dense(*shape).double()
    operator.scale_(factor)
    with torch.no_grad():
        operator.weight[0] = 0  # one rank less
    operator.orthogonalize_(0.9)
    W = operator.weight.detach()
    gram = W @ W.mT if shape[0] > shape[1] else W.mT @ W
    assert torch.allclose(gram, 0.81 * torch.eye(5, dtype=torch.float64), rtol=0, atol=1e-12)
    assert operator.lower_bound(operator.weights()) == pytest.approx(0.9, rel=1e-6)


@pytest.mark.parametrize(
    ("into", "out", "groups", "size"),
    [(4, 7, 1, 3), (7, 4, 1, 3), (4, 4, 1, (1, 5)), (4, 8, 4, 3), (4, 6, 2, 2), (5, 3, 1, 1)],
)
def test_orthogonalized_convolution_has_singular_values_close_to_its_size(into, out, groups, size):
    torch.manual_seed(0)
    operator = Convolution(into, out, size, padding="circular", groups=groups).double()
    operator.draw_frame_()
    with torch.no_grad():
        operator.kernel.add_(0.1 * torch.randn_like(operator.kernel))
    operator.orthogonalize_(0.9)
    values = singular_values(operator, (into, 7, 7))
    smaller = 49 * min(into, out)
    low, high = values[smaller - 1].item(), values[0].item()
    assert 0.85 < operator.lower_bound(operator.weights()) <= low
    assert high <= operator.bound(operator.weights()).item() < 0.95
    assert operator.kernel.square().mean() > 0


def test_descent_brings_large_and_small_kernels_to_a_frame():
    torch.manual_seed(0)
    kernel = torch.randn(8, 5, 3, 3)
    for factor in (0.01, 1.0, 100.0):
        assert symbol_floor(factor * kernel) < 0.5 * factor * kernel.norm()
        assert symbol_floor(descend_to_frame(factor * kernel)) > 0.8


def test_floor_is_below_all_singular_values_and_close_for_frames():
    torch.manual_seed(0)
    for shape, groups in (
        ((6, 4, 3, 3), 1),
        ((4, 6, 2, 3), 1),
        ((6, 2, 3, 1), 3),
        ((4, 6, 1, 1), 1),
    ):
        for spread in (0.01, 0.1, 1.0):
            kernel = Convolution(shape[1] * groups, shape[0], shape[2:], groups=groups)
            kernel.draw_frame_()
            taps = (kernel.kernel + spread * torch.randn(shape)).detach()
            symbols = torch.fft.fft2(taps.double().unflatten(0, (groups, -1)), (101, 101))
            lowest = torch.linalg.svdvals(symbols.movedim((1, 2), (-2, -1))).min().item()
            floor = symbol_floor(taps, groups)
            assert floor <= lowest * (1 + 1e-9)
            if spread == 0.01:
                assert floor > 0.8 * lowest


def test_depthwise_kernels_are_scaled_only():
    operator = Convolution(4, 4, groups=4).double()
    before = operator.kernel.detach().clone()
    operator.orthogonalize_(0.9)
    assert operator.bound(operator.weights()).item() == pytest.approx(0.9, rel=1e-6)
    ratio = operator.kernel.detach() / before
    assert torch.allclose(ratio, ratio.flatten()[0])


def test_composed_operators_orthogonalize_their_parts():
    operator = Composed([Dense(4, 6), Dense(6, 6)]).double()
    operator.orthogonalize_(0.7)
    values = singular_values(operator, (4,))
    assert torch.allclose(values, torch.full_like(values, 0.7))


def test_own_operator_without_frames_is_refused_in_one_sentence():
    class Doubling(Operator):
        weights = transposed = apply_with = adjoint_with = bound = zeros = lambda *_: ()

    with pytest.raises(
        ValueError,
        match=r"^Doubling.orthogonalize_ must be defined for orthogonal weights; got nothing\. Use "
        r"norm='project' and init='small'\.$",
    ):
        Doubling().draw_frame_()
