import re

import pytest
import torch

from equipoise.operators import (
    Blur,
    Composed,
    Convolution,
    Dense,
    Identity,
    Mask,
    Pooled,
    separable,
)


def mask():
    operator = Mask()
    operator.mask = (torch.arange(30).reshape(5, 6) % 3 > 0).float()
    return operator


OPERATORS = {
    "identity": lambda: (Identity(), (2, 3, 4, 5)),
    "blur": lambda: (Blur(0.8, 3), (2, 3, 5, 6)),
    "blur_zeros": lambda: (Blur(1.2, 5, "zeros"), (2, 1, 5, 6)),
    "mask": lambda: (mask(), (2, 3, 5, 6)),
    "dense_tall": lambda: (Dense(3, 7), (2, 3)),
    "dense_wide": lambda: (Dense(7, 3), (2, 7)),
    "zeros": lambda: (Convolution(3, 5), (2, 3, 6, 7)),
    "circular": lambda: (Convolution(3, 5, padding="circular"), (2, 3, 6, 7)),
    "even": lambda: (Convolution(3, 2, 2), (2, 3, 4, 5)),
    "even_circular": lambda: (Convolution(3, 2, (4, 2), padding="circular"), (2, 3, 4, 5)),
    "pointwise": lambda: (Convolution(3, 4, 1), (2, 3, 1, 1)),
    "rectangular": lambda: (Convolution(3, 2, (1, 5)), (2, 3, 4, 5)),
    "whole_image": lambda: (Convolution(2, 2, 5), (2, 2, 5, 5)),
    "groups": lambda: (Convolution(4, 6, groups=2), (2, 4, 5, 5)),
    "depthwise": lambda: (Convolution(4, 8, padding="circular", groups=4), (2, 4, 5, 5)),
    "separable": lambda: (separable(3, 5), (2, 3, 5, 6)),
    "double_separable": lambda: (
        Composed([separable(3, 3, 5, multiplier=2), separable(3, 4)]),
        (2, 3, 6, 6),
    ),
    "pooled": lambda: (Pooled(Convolution(3, 5), 2), (2, 3, 6, 8)),
    "pooled_circular": lambda: (
        Pooled(Convolution(4, 6, padding="circular", groups=2), 3),
        (2, 4, 9, 12),
    ),
    "pooled_separable": lambda: (Pooled(separable(2, 3), 2), (2, 2, 6, 6)),
}


@pytest.fixture(params=OPERATORS)
def case(request):
    operator, shape = OPERATORS[request.param]()
    return operator.double(), torch.randn(shape, dtype=torch.float64)


def matrix_of(operator, shape):
    """The operator's matrix, from its action on unit vectors."""
    size = torch.Size(shape[1:]).numel()
    eye = torch.eye(size, dtype=torch.float64).reshape(size, *shape[1:])
    return operator(eye).detach().reshape(size, -1).T


def test_adjoint_is_the_transposed_matrix(case):
    operator, z = case
    y = torch.randn_like(operator(z))
    left, right = (operator(z) * y).sum(), (z * operator.adjoint(y)).sum()
    assert abs(left - right) <= 1e-14 * y.norm() * z.norm()
    found = operator.adjoint(y).detach().flatten(1)
    assert torch.allclose(found, y.flatten(1) @ matrix_of(operator, z.shape), rtol=0, atol=1e-13)


def test_adjoint_is_exact_in_float32(case):
    operator, z = case
    operator, z = operator.float(), z.float()
    y = torch.randn_like(operator(z))
    # Sums in float64, so that only the operator rounds.
    left = (operator(z).double() * y.double()).sum()
    right = (z.double() * operator.adjoint(y).double()).sum()
    assert (
        abs(left - right) <= 1e-6 * operator.bound(operator.weights()).item() * y.norm() * z.norm()
    )


def test_convolution_is_torchs_convolution():
    operator = Convolution(3, 5)
    z = torch.randn(2, 3, 6, 7)
    assert torch.allclose(operator(z), torch.nn.functional.conv2d(z, operator.kernel, padding=1))
    y = torch.randn(2, 5, 6, 7)
    assert torch.allclose(
        operator.adjoint(y),
        torch.nn.functional.conv_transpose2d(y, operator.kernel, padding=1),
        atol=1e-6,
    )


def test_pooled_has_the_singular_values_of_its_inner_operator():
    inner = Convolution(2, 3).double()
    pooled = Pooled(inner, 2)
    found = torch.linalg.svdvals(matrix_of(pooled, (1, 2, 6, 8)))
    expected = torch.linalg.svdvals(matrix_of(inner, (1, 2, 3, 4)))
    assert torch.allclose(found[: len(expected)], expected)
    assert found[len(expected) :].max() <= 1e-12
    z = torch.randn(2, 2, 6, 8).double()
    once = torch.nn.functional.conv2d(2 * torch.nn.functional.avg_pool2d(z, 2), inner.kernel, None)
    assert torch.allclose(pooled(z)[:, :, 1:-1, 1:-1], once)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("side", [3, 8, 41, 47, 49, 82, 123])
def test_pooled_writes_to_whole_fields_at_sides_whose_inverse_is_rounded_down(side, dtype):
    """The pixel after a field would get it, too, by torch's `nearest`."""
    operator = Pooled(Convolution(4, 4, 1), side).to(dtype)
    y = torch.randn(1, 4, 2, 3, dtype=dtype).contiguous(memory_format=torch.channels_last)
    expected = operator.inner.adjoint(y) / side
    expected = expected.repeat_interleave(side, 2).repeat_interleave(side, 3)
    rounding = {"atol": torch.finfo(dtype).eps / side, "rtol": torch.finfo(dtype).eps}
    torch.testing.assert_close(operator.adjoint(y), expected, **rounding)


@pytest.mark.parametrize("side", [2, 3])
def test_pooled_takes_an_image_without_a_batch(side):
    operator = Pooled(Convolution(3, 4), side)
    images = torch.randn(5, 3, 6 * side, 4 * side)
    hidden = operator(images)
    torch.testing.assert_close(operator(images[0]), hidden[0])
    torch.testing.assert_close(operator.adjoint(hidden[0]), operator.adjoint(hidden)[0])
    each = torch.func.vmap(lambda z: operator.adjoint(operator(z)))(images)
    torch.testing.assert_close(each, operator.adjoint(hidden))


def test_composed_operators_start_at_the_state_of_the_first():
    operator = Composed([Pooled(Convolution(2, 3), 2), Pooled(Convolution(3, 4, 1), 2)])
    z = torch.randn(1, 2, 12, 8)
    assert operator.zeros(operator(z)).shape == z.shape


def test_bound_is_above_the_norm_and_close(case):
    operator, z = case
    norm = torch.linalg.matrix_norm(matrix_of(operator, z.shape), 2)
    bound = operator.bound(operator.weights())
    assert norm <= bound * (1 + 1e-12)
    # Small images with zero padding are farther from their bound, and products of bounds may be far
    # from the product's norm.
    assert bound <= 3 * norm or isinstance(operator, Composed)


def test_scaled_and_scale_multiply_the_operator(case):
    operator, z = case
    before = operator(z).detach()
    weights = operator.scaled(operator.weights(), 0.25)
    assert torch.allclose(operator.apply_with(weights, z), before / 4)
    assert torch.allclose(operator(z), before)
    operator.scale_(0.25)
    assert torch.allclose(operator(z), before / 4)


def test_zeros_has_the_shape_of_the_state(case):
    operator, z = case
    assert operator.zeros(operator(z)).shape == z.shape


def test_affine_adds(case):
    operator, z = case
    c = torch.randn_like(operator(z))
    with torch.no_grad():
        assert torch.allclose(operator.affine_with(operator.weights(), z, c), operator(z) + c)


def test_new_weights_have_a_norm_of_about_one_half():
    torch.manual_seed(0)
    for operator in (Dense(200, 300), Convolution(30, 60)):
        assert 0.4 < operator.bound(operator.weights()).item() < 0.65


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: Convolution(3, 4, groups=2),
            "Convolution.groups must divide both channel counts; got 2 for 3 and 4.",
        ),
        (
            lambda: Convolution(3, 4, padding="reflect"),
            "Convolution.padding must be one of circular, zeros; got 'reflect'.",
        ),
        (
            lambda: Convolution(3, 4, 0),
            "Convolution.kernel_size must be a whole number of at least 1; got 0.",
        ),
        (
            lambda: Pooled(Convolution(3, 4), 0),
            "Pooled.side must be a whole number of at least 1; got 0.",
        ),
        (
            lambda: Pooled(torch.nn.Conv2d(3, 4, 3), 2),
            "Pooled.inner must be an operator of `equipoise.operators`; got Conv2d.",
        ),
        (
            lambda: Pooled(Convolution(3, 4), 2)(torch.zeros(1, 3, 9, 8)),
            "The input must have sides that are multiples of 2, which are pooled; got (1, 3, 9, "
            "8).",
        ),
        (
            lambda: Pooled(Convolution(3, 4), 4).check(torch.zeros(1, 3, 8, 8)),
            "Convolution.kernel_size must not exceed the image; got a kernel of 3 x 3 for an "
            "image of 2 x 2. Fields of 4 x 4 pixels are pooled, of 8 x 8.",
        ),
        (
            lambda: Pooled(Convolution(3, 4), 2).check(torch.zeros(1, 3, 8, 8).double()),
            "The input must be torch.float32, as the weights are; got torch.float64. Convert one "
            "of them.",
        ),
        (
            lambda: Pooled(Convolution(3, 4), 2).check(torch.zeros(1, 3, 8, 7)),
            "The input must have sides that are multiples of 2, which are pooled; got (1, 3, 8, "
            "7).",
        ),
        (lambda: Composed([]), "Composed.parts must hold at least one operator; got none."),
    ],
)
def test_bad_operators_get_one_sentence(make, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        make()
