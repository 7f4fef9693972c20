"""Monotone networks on images: products, resolvents and the published sizes."""

from typing import get_args

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from equipoise import MonotoneConv2d, MonotoneMultiTier, create_model
from equipoise.families.monotone import MonotoneConvolution, MonotoneTiers, Splitting

OPERATORS = {
    "zeros": lambda: MonotoneConvolution(2, 3, 0.8),
    "circular": lambda: MonotoneConvolution(2, 3, 0.8, padding="circular"),
    "large": lambda: MonotoneConvolution(1, 5, 0.8),
    "tiers": lambda: MonotoneTiers((2, 1, 2), (12, 16), 0.8),
}
A_STEP = 0.7


def made(name):
    """An operator of large weights, and its matrices on states and on enlarged ones."""
    torch.manual_seed(1)
    operator = OPERATORS[name]().double()
    with torch.no_grad():
        for size, one in operator.named_parameters():
            if "size" in size:
                one.fill_(1.5)
    shape = (operator.A.shape[0], 6, 7) if name != "tiers" else (2 * 192 + 48 + 2 * 12,)
    identity = torch.eye(torch.Size(shape).numel(), dtype=torch.float64).unflatten(1, shape)
    large = operator.enlarge(identity[:1]).shape[1:]
    enlarged = torch.eye(large.numel(), dtype=torch.float64).unflatten(1, large)
    return operator, identity, enlarged


def matrix(product, identity):
    return product(identity).flatten(1).T


@pytest.mark.parametrize("name", OPERATORS)
@torch.no_grad()
def test_products_adjoints_resolvents_and_bounds_are_those_of_the_matrix(name):
    operator, identity, enlarged = made(name)
    weights = operator.weights()
    turned = operator.transposed(weights)
    W = matrix(lambda z: operator.apply_with(weights, z), identity)
    large = matrix(lambda z: operator.apply_enlarged(weights, z), enlarged)
    for found, wanted in (
        (matrix(lambda z: operator.adjoint_with(turned, z), identity), W.T),
        (matrix(lambda z: operator.adjoint_enlarged(turned, z), enlarged), large.T),
        (
            matrix(
                lambda z: operator.crop(operator.apply_enlarged(weights, operator.enlarge(z))),
                identity,
            ),
            W,
        ),
    ):
        assert torch.allclose(found, wanted, atol=1e-13)
    factors = operator.factor(weights, A_STEP, enlarged)
    for one, transpose in ((large, False), (large.T, True)):
        eye = torch.eye(len(one), dtype=one.dtype)
        resolvent = torch.linalg.inv(eye + A_STEP * (eye - one))
        found = matrix(
            lambda b, transpose=transpose: operator.resolve_with(factors, b, transpose=transpose),
            enlarged,
        )
        assert torch.allclose(found, resolvent, atol=1e-13)
        assert torch.linalg.eigvalsh(eye - (one + one.T) / 2)[0] >= 0.8 - 1e-12
        assert operator.gap_bound() >= torch.linalg.matrix_norm(eye - one, 2)


@pytest.mark.parametrize("name", OPERATORS)
def test_gradients_of_products_in_the_weights_are_autograds(name):
    operator, _, enlarged = made(name)
    weights = tuple(weight.detach().requires_grad_() for weight in operator.weights())
    z, v = (torch.randn(3, *enlarged.shape[1:], dtype=torch.float64) for _ in range(2))
    wanted = torch.autograd.grad((operator.apply_enlarged(weights, z) * v).sum(), weights)
    for found, own in zip(operator.pull(weights, z, v), wanted, strict=True):
        assert torch.allclose(found, own, atol=1e-11)


@pytest.mark.parametrize("padding", ["zeros", "circular"])
@torch.no_grad()
def test_convolution_is_made_of_a_and_b(padding):
    operator = MonotoneConvolution(3, 3, 0.6, padding=padding).double()
    A, B = (kernel / kernel.norm() for kernel in (operator.A, operator.B))
    z = torch.randn(2, 3, 5, 6, dtype=torch.float64)

    def convolve(z, kernel, margin):
        if padding == "zeros":
            return F.conv2d(z, kernel, padding=margin)
        return F.conv2d(F.pad(z, (1, 1, 1, 1), mode="circular"), kernel)

    def adjoint(kernel, margin, y):
        return torch.func.vjp(lambda z: convolve(z, kernel, margin), z)[1](y)[0]

    # With zero padding, A z has a pixel more on every side.
    wanted = 0.4 * z - adjoint(A, 2, convolve(z, A, 2)) + convolve(z, B, 1) - adjoint(B, 1, z)
    assert torch.allclose(operator.apply_with(operator.weights(), z), wanted, atol=1e-14)


@pytest.mark.parametrize(
    "make",
    [
        lambda **options: MonotoneConv2d(2, 3, margin=0.8, **options),
        lambda **options: MonotoneConv2d(2, 3, margin=0.8, padding="circular", **options),
        lambda **options: MonotoneMultiTier(2, (2, 3), (6, 8), 0.8, **options),
    ],
    ids=["zeros", "circular", "tiers"],
)
def test_splittings_agree_in_equilibria_and_gradients(make):
    x = torch.randn(2, 2, 6, 8, dtype=torch.float64)
    found = []
    for splitting in get_args(Splitting):
        torch.manual_seed(0)
        layer = make(splitting=splitting, tolerance=1e-12, max_steps=2000).double()
        z = layer(x)
        found.append([z, *torch.autograd.grad(z.square().sum(), list(layer.parameters()))])
    for others in found[1:]:
        for own, other in zip(found[0], others, strict=True):
            assert (own - other).abs().max() < 1e-9


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("monotone-mnist", 84_313),
        ("monotone-cifar10-172k", 172_218),
        ("monotone-cifar10-170k", 170_194),
        ("monotone-cifar10-1m", 1_014_546),
    ],
)
def test_models_have_the_published_sizes(name, count):
    with torch.device("meta"):
        assert create_model(name).parameter_counts()["total"] == count


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: MonotoneConv2d(1, 2, 4), r"MonotoneConv2d.kernel_size must be odd; got 4"),
        (lambda: MonotoneConv2d(1, 2, margin=0), r"MonotoneConv2d.margin must .*got 0\. Only then"),
        (lambda: MonotoneConv2d(1, 2, padding="reflect"), "padding must be one of"),
        (lambda: MonotoneMultiTier(1, (2, 2, 2), (30, 32)), "sides that are multiples of 4 .*3 ti"),
        (lambda: MonotoneMultiTier(1, (2,), (8, 8)), "at least two tiers.*Use MonotoneConv2d"),
        (lambda: MonotoneConv2d(1, 2)(torch.ones(1, 3, 8, 8)), r"input must have shape \(batch, 1"),
        (lambda: MonotoneConv2d(1, 2)(torch.ones(1, 1, 2, 8)), "sides of at least 3"),
        (
            lambda: MonotoneMultiTier(1, (2, 2), (8, 8))(torch.ones(1, 1, 6, 8)),
            r"MonotoneMultiTier input must have shape \(batch, 1, 8, 8\)",
        ),
    ],
)
def test_bad_input_is_refused_in_one_sentence(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


@pytest.mark.parametrize(
    "layer",
    [MonotoneConv2d(1, 2), MonotoneMultiTier(1, (2, 3), (8, 8))],
    ids=["convolution", "tiers"],
)
@torch.no_grad()
def test_solve_starts_at_the_last_state_but_at_no_output(layer):
    x = torch.randn(2, 1, 8, 8)
    z = layer(x)
    assert torch.equal(layer(x, layer.last.value), z)
    assert not layer.last.steps.any()
    with pytest.raises(ValueError, match=r"z0 must be a state of shape .*layer\.last\.value"):
        layer(x, z)


@pytest.mark.parametrize("splitting", ["peaceman-rachford", "forward-backward"])
@pytest.mark.parametrize("tiers", [False, True])
def test_an_empty_batch_has_an_empty_equilibrium_and_no_gradient(splitting, tiers):
    options = {"splitting": splitting}
    layer = (
        MonotoneMultiTier(2, (3, 4), (8, 8), **options)
        if tiers
        else MonotoneConv2d(2, 3, **options)
    )
    z = layer(torch.zeros(0, 2, 8, 8))
    assert len(z) == 0
    z.sum().backward()
    assert all(not weight.grad.any() for weight in layer.parameters() if weight.grad is not None)
