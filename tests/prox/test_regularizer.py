from __future__ import annotations

import itertools
import math
import pickle
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

from equipoise.prox import (
    HSIC,
    REGULARIZERS,
    AbsoluteSum,
    Custom,
    Decorrelation,
    Incay,
    NuclearNorm,
    Regularizer,
    SquaredNorm,
    TotalVariation,
    as_regularizer,
)


def quartic(z: Tensor) -> Tensor:
    return z.flatten(1).pow(4).sum(dim=1)


def batch_mean(z: Tensor) -> Tensor:
    return z.mean(dim=0).square().sum()


FLAT, IMAGE = (4, 3), (2, 3, 4, 3)
EVERYWHERE = [
    SquaredNorm(),
    AbsoluteSum(),
    Incay(),
    Incay(epsilon=0.3),
    Decorrelation(),
    Decorrelation(epsilon=0.5),
    HSIC(),
    HSIC(bandwidth=0.4),
    HSIC(features=6, seed=3),
    HSIC(features=2),
    Custom(quartic),
    Custom(batch_mean, coupled=True),
]
IMAGES_ONLY = [
    NuclearNorm(),
    TotalVariation(),
    TotalVariation(epsilon=0.7),
    TotalVariation(epsilon=0.0),
]
CASES = [(R, shape) for R in EVERYWHERE for shape in (FLAT, IMAGE)] + [
    (R, IMAGE) for R in IMAGES_ONLY
]
CASES += [(NuclearNorm(), (2, 3, 2)), (NuclearNorm(), (2, 2, 5)), (TotalVariation(), (2, 4, 3))]
PROXIMAL = [case for case in CASES if case[0].has_prox]

every = pytest.mark.parametrize(("R", "shape"), CASES, ids=str)
proximal = pytest.mark.parametrize(("R", "shape"), PROXIMAL, ids=str)


def state(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype)


def numerical(function, z: Tensor, width: float = 1e-6) -> Tensor:
    """The gradient of a scalar function by central differences."""
    flat = z.flatten()
    slopes = []
    for i in range(len(flat)):
        step = torch.zeros_like(flat)
        step[i] = width
        slopes.append(
            (function((flat + step).view_as(z)) - function((flat - step).view_as(z))) / (2 * width)
        )
    return torch.stack(slopes).view_as(z)


def test_every_registered_regularizer_is_tested() -> None:
    assert {type(R) for R, _ in CASES} == {REGULARIZERS[name] for name in REGULARIZERS} | {Custom}
    assert set(REGULARIZERS) == {"decorrelation", "hsic", "incay", "l1", "l2", "nuclear", "tv"}


@every
def test_value_has_one_number_for_each_sample_or_one_for_all(
    R: Regularizer, shape: tuple[int, ...]
) -> None:
    z = state(shape)
    assert R.value(z).shape == (() if R.coupled else shape[:1])
    assert R.gradient(z).shape == shape
    if not R.coupled:
        assert torch.allclose(R.value(z)[1], R.value(z[1:2])[0], rtol=1e-14)
        assert torch.allclose(R.gradient(z)[1], R.gradient(z[1:2])[0], rtol=1e-12, atol=1e-14)


@every
def test_gradient_is_that_of_the_value(R: Regularizer, shape: tuple[int, ...]) -> None:
    z = state(shape).requires_grad_()
    (automatic,) = torch.autograd.grad(R.value(z).sum(), z)
    assert torch.allclose(R.gradient(z), automatic, rtol=1e-10, atol=1e-13)
    assert torch.allclose(
        automatic, numerical(lambda z: R.value(z).sum(), z.detach()), rtol=1e-5, atol=1e-7
    )


@every
def test_gradient_and_value_can_be_differentiated(R: Regularizer, shape: tuple[int, ...]) -> None:
    z = state(shape).requires_grad_()
    assert torch.autograd.gradcheck(R.value, z)
    if R.gradient(z).requires_grad:  # the sign has no history
        assert torch.autograd.gradcheck(R.gradient, z)
        assert torch.autograd.gradgradcheck(R.value, z)


@every
def test_gradient_works_without_recording_and_leaves_no_history(
    R: Regularizer, shape: tuple[int, ...]
) -> None:
    z = state(shape).requires_grad_()
    with torch.no_grad():
        quiet = R.gradient(z)
    assert not quiet.requires_grad or quiet is z
    loud = R.gradient(z.detach())
    assert not loud.requires_grad  # a cell's step would seem to use a tensor from elsewhere
    assert torch.allclose(quiet, loud, rtol=1e-12, atol=1e-15)


@every
def test_gradient_works_under_function_transforms(R: Regularizer, shape: tuple[int, ...]) -> None:
    stack = state((3, *shape))
    one_by_one = torch.stack([R.gradient(z) for z in stack])
    assert torch.allclose(torch.func.vmap(R.gradient)(stack), one_by_one, rtol=1e-10, atol=1e-13)
    assert torch.allclose(
        torch.func.grad(lambda z: R.value(z).sum())(stack[0]), one_by_one[0], rtol=1e-10, atol=1e-13
    )
    v = state(shape)
    _, pushed = torch.func.jvp(lambda z: R.value(z).sum(), (stack[0],), (v,))
    assert torch.allclose(pushed, (v * one_by_one[0]).sum(), rtol=1e-8, atol=1e-12)


@every
def test_regularizer_keeps_the_dtype(R: Regularizer, shape: tuple[int, ...]) -> None:
    z = state(shape, torch.float32)
    assert R.value(z).dtype == R.gradient(z).dtype == torch.float32
    assert torch.allclose(R.gradient(z).double(), R.gradient(z.double()), rtol=1e-3, atol=1e-4)
    if R.has_prox:
        assert R.prox(z, 0.3).dtype == R.envelope(z, 0.3).dtype == torch.float32


@every
def test_gradient_and_its_derivative_are_finite_at_zero(
    R: Regularizer, shape: tuple[int, ...]
) -> None:
    """A solve starts at zero."""
    z = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    slope = R.gradient(z)
    assert torch.allclose(slope, torch.zeros_like(slope), atol=1e-15)
    if slope.requires_grad:
        (second,) = torch.autograd.grad(slope, z, state(shape))
        assert second.isfinite().all()


@every
def test_nan_is_never_hidden(R: Regularizer, shape: tuple[int, ...]) -> None:
    z = state(shape)
    good_value, good = R.value(z), R.gradient(z)
    z[(1,) + (0,) * (len(shape) - 1)] = math.nan
    value, slope = R.value(z), R.gradient(z)
    assert value.isnan().any()
    assert slope.isnan().any()
    if not R.coupled:
        assert slope[1].isnan().any()
        assert torch.allclose(value[0], good_value[0], rtol=1e-14)
        assert torch.allclose(slope[0], good[0], rtol=1e-12, atol=1e-14)
    if R.has_prox:
        assert R.prox(z, 0.3)[1].isnan().any()
        assert R.prox(z, 0.3)[0].isfinite().all()


@every
def test_regularizer_accepts_an_empty_batch_where_it_needs_no_observation(
    R: Regularizer, shape: tuple[int, ...]
) -> None:
    z = torch.zeros(0, *shape[1:], dtype=torch.float64)
    if isinstance(R, HSIC):
        with pytest.raises(ValueError, match="at least 2 observations"):
            R.value(z)
        return
    if R.coupled and isinstance(R, Custom):
        return  # the mean of nothing
    assert R.gradient(z).shape == z.shape
    assert R.value(z).shape == (() if R.coupled else (0,))


@pytest.mark.parametrize(
    ("R", "shape"), [case for case in CASES if case[0].lipschitz is not None], ids=str
)
def test_lipschitz_constant_holds(R: Regularizer, shape: tuple[int, ...]) -> None:
    for scale, distance in itertools.product([1e-3, 0.3, 1.0, 10.0], [1e-6, 0.1, 10.0]):
        a = scale * state((200, *shape[1:]))
        b = a + distance * scale * state(a.shape)
        change = (R.gradient(a) - R.gradient(b)).flatten(1).norm(dim=1)
        assert (change <= R.lipschitz * (a - b).flatten(1).norm(dim=1) * (1 + 1e-8)).all()


def test_lipschitz_constants_are_nearly_reached() -> None:
    v = torch.full((1, 3), 1e-7, dtype=torch.float64)
    for R in (SquaredNorm(), Incay(0.3), Incay(2.0)):
        assert float(R.gradient(v).norm()) == pytest.approx(R.lipschitz * float(v.norm()), rel=1e-6)
    corners = torch.arange(32)[:, None] + torch.arange(32)
    board = 1e-7 * (1.0 - 2.0 * (corners % 2)).double()[None]
    R = TotalVariation(0.2)
    assert R.gradient(board).norm() > 0.95 * R.lipschitz * board.norm()
    assert R.gradient(board).norm() < R.lipschitz * board.norm()


def test_lipschitz_constant_is_unknown_where_there_is_none() -> None:
    for R in (
        AbsoluteSum(),
        TotalVariation(0.0),
        NuclearNorm(),
        Decorrelation(),
        HSIC(),
        Custom(quartic),
    ):
        assert R.lipschitz is None
    assert Custom(quartic, lipschitz=3.0).lipschitz == 3.0


@pytest.mark.parametrize(("R", "shape"), [case for case in CASES if case[0].convex], ids=str)
def test_convex_regularizers_have_monotone_gradients(
    R: Regularizer, shape: tuple[int, ...]
) -> None:
    a, b = state((300, *shape[1:])), state((300, *shape[1:]))
    assert ((R.gradient(a) - R.gradient(b)) * (a - b)).flatten(1).sum(dim=1).min() >= -1e-12
    assert (R.value((a + b) / 2) <= (R.value(a) + R.value(b)) / 2 + 1e-12).all()


@pytest.mark.parametrize("R", [Incay(), Decorrelation(), HSIC()], ids=str)
def test_other_regularizers_are_declared_not_convex_and_are_not(R: Regularizer) -> None:
    assert R.convex is False
    pairs = [(state((5, 3)), state((5, 3))) for _ in range(200)]
    assert any(
        R.value((a + b) / 2).sum() > (R.value(a) + R.value(b)).sum() / 2 + 1e-2 for a, b in pairs
    )


# The proximal map.


@proximal
@pytest.mark.parametrize("gamma", [0.05, 0.4, 3.0])
def test_prox_beats_a_numerical_minimiser(
    R: Regularizer, shape: tuple[int, ...], gamma: float
) -> None:
    shape = (1, *(min(n, 2) for n in shape[1:]))
    z = state(shape)

    def objective(u: np.ndarray) -> float:
        point = torch.from_numpy(u).view(shape)
        return float((point - z).square().sum() / 2 + gamma * R.value(point).sum())

    found = R.prox(z, gamma)
    ours = objective(found.numpy().ravel())
    starts = [z.numpy().ravel(), found.numpy().ravel(), np.zeros(z.numel())]
    witness = min(
        (
            minimize(objective, start, method="Powell", options={"xtol": 1e-9, "ftol": 1e-14})
            for start in starts
        ),
        key=lambda w: w.fun,
    )
    assert ours <= witness.fun + 1e-10
    assert ours == pytest.approx(witness.fun, abs=1e-7)
    assert np.abs(witness.x - found.numpy().ravel()).max() < 1e-3
    assert float(R.envelope(z, gamma).sum()) == pytest.approx(ours, rel=1e-12)


@proximal
@pytest.mark.parametrize("gamma", [0.05, 0.4, 3.0])
def test_prox_is_optimal(R: Regularizer, shape: tuple[int, ...], gamma: float) -> None:
    """`(z - u)/gamma` is a subgradient at `u`.

    `R(v) >= R(u) + <z - u, v - u>/gamma` for all `v`.
    """
    z = state(shape)
    u = R.prox(z, gamma)
    for scale in (1e-4, 0.1, 1.0, 10.0):
        for center in (u, torch.zeros_like(u)):
            v = center + scale * state(shape)
            below = R.value(u) + ((z - u) / gamma * (v - u)).flatten(1).sum(dim=1)
            assert (R.value(v) >= below - 1e-10).all()


@proximal
def test_prox_is_firmly_nonexpansive(R: Regularizer, shape: tuple[int, ...]) -> None:
    for gamma in (0.1, 1.0, 4.0):
        a, b = 2 * state((100, *shape[1:])), 2 * state((100, *shape[1:]))
        moved = R.prox(a, gamma) - R.prox(b, gamma)
        assert (
            moved.square().flatten(1).sum(1) <= (moved * (a - b)).flatten(1).sum(1) + 1e-12
        ).all()


@proximal
def test_prox_and_envelope_can_be_differentiated(R: Regularizer, shape: tuple[int, ...]) -> None:
    z = state(shape).requires_grad_()
    gamma = 0.4
    assert torch.autograd.gradcheck(lambda z: R.prox(z, gamma), z)
    assert torch.autograd.gradcheck(lambda z: R.envelope(z, gamma), z)
    assert torch.autograd.gradgradcheck(lambda z: R.envelope(z, gamma), z)
    (slope,) = torch.autograd.grad(R.envelope(z, gamma).sum(), z)
    assert torch.allclose(slope, z - R.prox(z, gamma), rtol=1e-12)
    members = torch.stack([z.detach(), 2 * z.detach()])
    assert torch.allclose(
        torch.func.vmap(lambda z: R.prox(z, gamma))(members)[1], R.prox(members[1], gamma)
    )
    _, pushed = torch.func.jvp(lambda z: R.envelope(z, gamma), (z.detach(),), (members[0],))
    assert torch.allclose(pushed, (members[0] * slope).flatten(1).sum(dim=1))


@proximal
def test_envelope_lies_below_the_function_and_keeps_its_least_value(
    R: Regularizer, shape: tuple[int, ...]
) -> None:
    z = state(shape)
    assert (R.envelope(z, 0.7) <= 0.7 * R.value(z) + 1e-14).all()
    assert torch.equal(
        R.envelope(torch.zeros_like(z), 0.7), torch.zeros(shape[0], dtype=torch.float64)
    )


def test_prox_closed_forms() -> None:
    z = torch.tensor([[-2.0, -0.3, 0.0, 0.3, 2.0]], dtype=torch.float64)
    assert torch.allclose(SquaredNorm().prox(z, 0.5), z / 1.5)
    assert torch.allclose(
        AbsoluteSum().prox(z, 0.5), torch.tensor([[-1.5, 0.0, 0.0, 0.0, 1.5]], dtype=torch.float64)
    )
    assert torch.equal(
        AbsoluteSum().prox(torch.tensor([[math.inf, -math.inf]]), 0.5),
        torch.tensor([[math.inf, -math.inf]]),
    )


# Singular values.


def test_nuclear_norm_agrees_with_numpy() -> None:
    z = state((3, 2, 2, 4))
    U, s, Vh = np.linalg.svd(z.numpy().reshape(3, 2, 8), full_matrices=False)
    assert np.allclose(NuclearNorm().value(z).numpy(), s.sum(axis=1))
    assert np.allclose(NuclearNorm().gradient(z).numpy().reshape(3, 2, 8), U @ Vh)
    shrunk = (U * np.maximum(s - 0.8, 0)[:, None, :]) @ Vh
    assert np.allclose(NuclearNorm().prox(z, 0.8).numpy().reshape(3, 2, 8), shrunk)


@pytest.mark.parametrize("size", [(3, 3), (2, 4), (4, 2)])
def test_nuclear_norm_can_be_differentiated_where_singular_values_are_equal(
    size: tuple[int, int],
) -> None:
    z = (1.5 * torch.eye(*size, dtype=torch.float64))[None].requires_grad_()
    R = NuclearNorm()
    assert torch.autograd.gradcheck(R.gradient, z)
    assert torch.autograd.gradcheck(lambda z: R.prox(z, 0.4), z)
    assert torch.autograd.gradcheck(lambda z: R.prox(z, 2.0), z)  # all of them vanish
    with torch.no_grad():
        half = z.clone()
        half[0, 1, 1] = 0.3  # one below the threshold, the others equal
    assert torch.autograd.gradcheck(lambda z: R.prox(z, 0.4), half.requires_grad_())


def test_nuclear_norm_takes_the_smallest_subgradient_of_a_matrix_that_lacks_rank() -> None:
    z = torch.outer(state((3,)), state((4,)))[None]
    slope = NuclearNorm().gradient(z)[0]
    assert torch.allclose(slope, z[0] / torch.linalg.matrix_norm(z[0], 2), atol=1e-12)
    assert torch.linalg.matrix_rank(slope, atol=1e-8) == 1


# Feature incay and decorrelation, as printed and as they are (errata of OptEq, Table 2).


def test_incay_expands_features_and_the_printed_sign_would_shrink_them() -> None:
    z, gamma, epsilon = state(FLAT).requires_grad_(), 0.3, 0.5
    R = Incay(epsilon)
    (automatic,) = torch.autograd.grad((2 / (z.square().sum(dim=1) + 2 * epsilon)).sum(), z)
    factor = 4 * gamma / (z.square().sum(dim=1, keepdim=True) + 2 * epsilon) ** 2
    exact = z - gamma * automatic
    assert torch.allclose(z - gamma * R.gradient(z), exact, rtol=1e-12)
    assert torch.allclose((1 + factor) * z, exact, rtol=1e-12)
    printed = (1 - factor) * z
    assert not torch.allclose(printed, exact, rtol=1e-2)
    assert (exact.norm(dim=1) > z.norm(dim=1)).all()
    assert (printed.norm(dim=1) < z.norm(dim=1)).all()


def test_erratum_the_two_printed_forms_of_incay_are_different_functions() -> None:
    """v1, A.1, and v3, 7.2, print `1/(|z|^2 + eps)`; v3, Table 2, `2/(|z|^2 + 2 eps)`."""
    z, epsilon = state(FLAT), 0.5
    text = 1 / (z.square().sum(dim=1) + epsilon)
    table = Incay(epsilon).value(z)
    assert (table > 1.05 * text).all()  # equal at zero alone
    assert torch.allclose(Incay(epsilon / 2).value(z), 2 * text)  # twice, with half the epsilon


def decorrelation_as_written(Z: Tensor) -> Tensor:
    """OptEq, eq. 13, on a matrix with one row for each feature."""
    D = torch.diag(1 / Z.norm(dim=1))
    return (D @ Z @ Z.T @ D - torch.eye(len(Z), dtype=Z.dtype)).square().sum() / 2


def decorrelation_gradient(Z: Tensor, sign: float) -> Tensor:
    """The gradient with `I + sign Proj(z_i)`, feature by feature."""
    U = Z / Z.norm(dim=1, keepdim=True)
    rows = []
    for i, u in enumerate(U):
        pull = sum(u @ U[j] * U[j] for j in range(len(U)) if j != i)
        rows.append(2 / Z[i].norm() * (pull + sign * (u @ pull) * u))
    return torch.stack(rows)


def test_decorrelation_needs_the_minus_that_the_paper_prints_as_a_plus() -> None:
    z = state((6, 4))
    (automatic,) = torch.autograd.grad(
        decorrelation_as_written(Z := z.T.clone().requires_grad_()), Z
    )
    ours = Decorrelation(epsilon=1e-14).gradient(z).T
    assert torch.allclose(ours, automatic, rtol=1e-8, atol=1e-12)
    assert torch.allclose(decorrelation_gradient(z.T, -1.0), automatic, rtol=1e-8, atol=1e-12)
    assert not torch.allclose(decorrelation_gradient(z.T, 1.0), automatic, rtol=1e-2, atol=1e-2)
    assert (ours * z.T).sum(
        dim=1
    ).abs().max() < 1e-12  # the value does not depend on the lengths of features


def test_erratum_the_printed_step_of_decorrelation_lacks_gamma_and_a_factor_of_two() -> None:
    """v3, Table 2: `z_i - (I + Proj(z_i)) sum_(j != i) Proj(z_j) z_i/|z_i|^2`."""
    Z, gamma = state((6, 4)).T.clone().requires_grad_(), 0.3
    (slope,) = torch.autograd.grad(decorrelation_as_written(Z), Z)
    Z = Z.detach()
    project = [torch.outer(row, row) / row.square().sum() for row in Z]
    for i, row in enumerate(Z):
        others = sum(project[j] for j in range(len(Z)) if j != i) @ row / row.square().sum()
        printed = others - project[i] @ others  # with the sign mended: see the test before
        exact = row - gamma * slope[i]
        assert torch.allclose(row - 2 * gamma * printed, exact, atol=1e-12)
        assert not torch.allclose(row - printed, exact, atol=1e-3)
        assert not torch.allclose(row - gamma * printed, exact, atol=1e-3)


@pytest.mark.parametrize("shape", [(6, 4), (2, 4, 3, 2)])
def test_decorrelation_is_the_printed_value(shape: tuple[int, ...]) -> None:
    z = state(shape)
    Z = z.movedim(1, 0).reshape(shape[1], -1)
    assert Decorrelation(1e-14).value(z) == pytest.approx(
        float(decorrelation_as_written(Z)), rel=1e-10
    )
    assert Decorrelation().value(z) == pytest.approx(float(decorrelation_as_written(Z)), rel=1e-6)


def test_decorrelation_vanishes_for_orthogonal_features_and_ignores_zero_ones() -> None:
    Q = torch.linalg.qr(state((6, 3)))[0] * torch.tensor([1.0, 2.0, 0.1])
    assert Decorrelation().value(Q) < 1e-25
    z = state((6, 3))
    padded = torch.cat([z, torch.zeros(6, 1, dtype=torch.float64)], dim=1)
    R = Decorrelation()
    assert R.value(padded) == pytest.approx(float(R.value(z)), rel=1e-12)
    assert torch.allclose(R.gradient(padded)[:, :3], R.gradient(z), rtol=1e-12)
    assert torch.equal(R.gradient(padded)[:, 3], torch.zeros(6, dtype=torch.float64))


# HSIC.


def hsic_pair_by_pair(z: Tensor, bandwidth: float) -> float:
    """Explicit kernels, centring matrix and traces."""
    Z = z.movedim(1, 0).reshape(z.shape[1], -1).numpy()
    m, N = Z.shape
    H = np.eye(N) - np.ones((N, N)) / N
    total = 0.0
    for i in range(m):
        for j in range(i + 1, m):
            K, L = (
                np.exp(-((Z[k][:, None] - Z[k][None, :]) ** 2) / (2 * bandwidth**2)) for k in (i, j)
            )
            total += np.trace(K @ H @ L @ H) / (N - 1) ** 2
    return total


@pytest.mark.parametrize("shape", [(7, 5), (3, 4, 2, 2), (5, 1), (2, 3)])
@pytest.mark.parametrize("bandwidth", [0.5, 2.0])
def test_hsic_agrees_with_a_sum_over_pairs(shape: tuple[int, ...], bandwidth: float) -> None:
    z = state(shape)
    assert float(HSIC(bandwidth).value(z)) == pytest.approx(
        hsic_pair_by_pair(z, bandwidth), rel=1e-10, abs=1e-16
    )


@pytest.mark.parametrize("shape", [(8, 3), (40, 2)])
def test_random_features_tend_to_the_exact_hsic(shape: tuple[int, ...]) -> None:
    z = state(shape)
    exact = HSIC(0.8)
    errors, slopes = [], []
    for features in (10, 100, 4000):
        forms = [HSIC(0.8, features, seed) for seed in range(10)]
        errors.append(
            np.mean([abs(float(form.value(z) - exact.value(z))) for form in forms])
            / float(exact.value(z))
        )
        slopes.append(
            np.mean([float((form.gradient(z) - exact.gradient(z)).norm()) for form in forms])
            / float(exact.gradient(z).norm())
        )
    assert errors[0] > 2 * errors[1] > 4 * errors[2]  # like one over the root of their number
    assert errors[2] < 0.03
    assert slopes[0] > 2 * slopes[1] > 4 * slopes[2]
    assert slopes[2] < 0.06


def test_random_features_use_the_cheaper_of_two_equal_products() -> None:
    few, many = state((30, 2)), state((3, 2))
    R = HSIC(features=4)
    for z in (few, many):
        w = R._random
        waves = []
        for column in z.T:
            wave = (
                torch.cat([torch.outer(column, w).cos(), torch.outer(column, w).sin()], dim=1) / 2
            )
            waves.append(wave - wave.mean(dim=0))
        expected = (waves[0].T @ waves[1]).square().sum() / (len(z) - 1) ** 2
        assert R.value(z) == pytest.approx(float(expected), rel=1e-12)


def test_random_features_depend_on_the_seed_alone() -> None:
    z = state((6, 3))
    torch.manual_seed(1)
    first = HSIC(features=5, seed=2).value(z)
    torch.manual_seed(2)
    again = HSIC(features=5, seed=2)
    assert torch.equal(first, again.value(z))
    assert HSIC(features=5, seed=3).value(z) != first
    assert again == HSIC(features=5, seed=2)
    assert torch.equal(pickle.loads(pickle.dumps(again)).value(z), first)


def test_hsic_sees_dependence_that_correlation_does_not() -> None:
    t = torch.linspace(-2, 2, 41, dtype=torch.float64)
    square = torch.stack([t, t.square() - t.square().mean()], dim=1)
    independent = torch.stack([t, t.square()[torch.randperm(41)]], dim=1)
    assert Decorrelation().value(square) < 1e-20
    assert HSIC().value(square) > 5 * HSIC().value(independent)


# Total variation.


@pytest.mark.parametrize("epsilon", [0.0, 0.1])
def test_total_variation_is_a_sum_over_neighbours(epsilon: float) -> None:
    z = state((2, 2, 3, 4))
    expected = []
    for sample in z.tolist():
        total = 0.0
        for channel in sample:
            for i, j in itertools.product(range(3), range(4)):
                for k, n in ((i + 1, j), (i, j + 1)):
                    if k < 3 and n < 4:
                        total += math.hypot(channel[k][n] - channel[i][j], epsilon) - epsilon
        expected.append(total)
    assert torch.allclose(
        TotalVariation(epsilon).value(z), torch.tensor(expected, dtype=torch.float64)
    )


def test_total_variation_of_one_pixel_is_zero() -> None:
    z = state((2, 3, 1, 1))
    assert torch.equal(TotalVariation().value(z), torch.zeros(2, dtype=torch.float64))
    assert torch.equal(TotalVariation().gradient(z), torch.zeros_like(z))


def test_small_differences_do_not_cancel() -> None:
    z = torch.tensor([[[[0.0, 1e-4]]]])
    assert float(TotalVariation(1.0).value(z)[0]) == pytest.approx(0.5e-8, rel=1e-5)


# Functions of a user.


def test_custom_gradient_reaches_what_the_function_closes_over() -> None:
    weight = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    R = Custom(lambda z: weight * z.square().sum(dim=1))
    z = state(FLAT)
    slope = R.gradient(z)
    assert torch.allclose(slope, 4 * z)
    slope.sum().backward()
    assert slope.grad_fn is not None
    assert weight.grad == pytest.approx(float(2 * z.sum()))
    with torch.no_grad():
        assert not R.gradient(z).requires_grad


def test_custom_gradient_is_partial_where_the_function_closes_over_the_state() -> None:
    z = state(FLAT).requires_grad_()
    R = Custom(lambda u: (u * z).sum(dim=1))
    assert torch.allclose(R.gradient(z), z)


def test_custom_function_that_ignores_the_state_has_no_gradient() -> None:
    z = state(FLAT)
    weight = torch.ones(4, dtype=torch.float64, requires_grad=True)
    for R in (Custom(lambda z: torch.zeros(len(z))), Custom(lambda _: weight)):
        assert torch.equal(R.gradient(z), torch.zeros_like(z))


def test_custom_function_may_use_an_old_autograd_function() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, g):
            return 2 * g * ctx.saved_tensors[0]

    z = state(FLAT)
    assert torch.allclose(Custom(lambda z: Square.apply(z).sum(dim=1)).gradient(z), 2 * z)


def test_gradient_by_autograd_refuses_inference_mode() -> None:
    with (
        torch.inference_mode(),
        pytest.raises(ValueError, match=r"outside of torch\.inference_mode; use torch\.no_grad\."),
    ):
        Custom(quartic).gradient(state(FLAT))


@pytest.mark.parametrize(
    ("function", "coupled", "message"),
    [
        (
            lambda z: z,
            False,
            r"shape \(4,\); got shape \(4, 3\)\. Sum over all axes but the first, or use "
            r"Custom\(function, coupled=True\)\.",
        ),
        (
            lambda z: z.sum(),
            False,
            r"shape \(4,\); got shape \(\)\. Sum over all axes but the first, or use "
            r"Custom\(function, coupled=True\)\.",
        ),
        (lambda z: z.sum(dim=1), True, r"shape \(\); got shape \(4,\)\. Sum over everything\."),
        (lambda _: 3.0, True, r"shape \(\); got float\. Sum over everything\."),
    ],
)
def test_custom_function_must_return_its_shape(function, coupled: bool, message: str) -> None:
    for method in ("value", "gradient"):
        with pytest.raises(
            ValueError, match=r"^Custom\.function must return a tensor of " + message
        ):
            getattr(Custom(function, coupled=coupled), method)(state(FLAT))


# Names and settings.


@pytest.mark.parametrize("name", list(REGULARIZERS))
def test_regularizer_finds_names(name: str) -> None:
    R = as_regularizer(name)
    assert type(R) is REGULARIZERS[name]
    assert as_regularizer(R) is R
    assert REGULARIZERS[name]() == R
    assert hash(R) == hash(REGULARIZERS[name]())


def test_regularizer_takes_functions_and_modules() -> None:
    assert as_regularizer(quartic) == Custom(quartic)
    module = nn.Sequential(nn.Linear(3, 1, dtype=torch.float64), nn.Flatten(0))
    z = state(FLAT)
    assert torch.allclose(as_regularizer(module).gradient(z), module[0].weight.expand_as(z))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "hsics",
            r"^regularizer must be one of decorrelation, hsic, incay, l1, l2, nuclear, tv; "
            r"got 'hsics'\. Did you mean 'hsic'\?",
        ),
        (
            SquaredNorm,
            r"^regularizer must be a name or an object; got the class SquaredNorm\. Write "
            r"SquaredNorm\(\)\.$",
        ),
        (3, r"^regularizer must be a name or a Regularizer; got int\.$"),
        (None, r"^regularizer must be a name or a Regularizer; got NoneType\.$"),
    ],
)
def test_regularizer_refuses_other_things(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_regularizer(value)


BAD = [0, 0.0, -1.0, math.nan, math.inf, True, "1", None]


@pytest.mark.parametrize("value", BAD)
def test_constants_must_be_positive(value: object) -> None:
    for R in (SquaredNorm(), AbsoluteSum(), NuclearNorm()):
        for method in (R.prox, R.envelope):
            with pytest.raises(ValueError, match=r"^gamma must be a positive number; got .*\.$"):
                method(state(IMAGE), value)
    makers = [(Incay, "epsilon"), (Decorrelation, "epsilon"), (HSIC, "bandwidth")]
    for make, name in makers:
        with pytest.raises(
            ValueError, match=rf"^{make.__name__}\.{name} must be a positive number; got .*\.$"
        ):
            make(value)
    if value != 0:
        with pytest.raises(
            ValueError,
            match=r"^TotalVariation\.epsilon must be zero or a positive number; got .*\.$",
        ):
            TotalVariation(value)
    if value is not None:
        with pytest.raises(
            ValueError, match=r"^Custom\.lipschitz must be a positive number; got .*\.$"
        ):
            Custom(quartic, lipschitz=value)


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "3"])
def test_hsic_counts_must_be_whole_numbers(value: object) -> None:
    with pytest.raises(
        ValueError, match=r"^HSIC\.features must be a whole number of at least 1; got"
    ):
        HSIC(features=value)
    if value != 0:
        with pytest.raises(
            ValueError, match=r"^HSIC\.seed must be a whole number of at least 0; got"
        ):
            HSIC(seed=value)


@pytest.mark.parametrize(
    "R", [Incay(), Decorrelation(), HSIC(), TotalVariation(), Custom(quartic)], ids=str
)
def test_prox_is_refused_where_there_is_none(R: Regularizer) -> None:
    assert not R.has_prox
    name = type(R).__name__
    message = (
        rf"^prox must be asked of .* in closed form; got {name}\. Use z - gamma \* gradient\(z\)\.$"
    )
    for method in (R.prox, R.envelope):
        with pytest.raises(ValueError, match=message):
            method(state(IMAGE), 0.1)


@pytest.mark.parametrize(
    ("R", "shape", "message"),
    [
        (
            NuclearNorm(),
            (3, 4),
            r"NuclearNorm must see samples that are matrices, .*; got shape \(3, 4\)\.",
        ),
        (TotalVariation(), (3, 4), r"TotalVariation must see images, .*; got shape \(3, 4\)\."),
        (
            Decorrelation(),
            (3,),
            r"Decorrelation must see a state of shape \(batch, features, \.\.\.\); got shape "
            r"\(3,\)\.",
        ),
        (
            HSIC(),
            (3,),
            r"HSIC must see a state of shape \(batch, features, \.\.\.\); got shape \(3,\)\.",
        ),
        (
            HSIC(),
            (1, 4),
            r"HSIC must see at least 2 observations of each feature; got 1 in .* \(1, 4\)\. "
            r"Use larger batches\.",
        ),
    ],
)
def test_states_of_other_shapes_are_refused(
    R: Regularizer, shape: tuple[int, ...], message: str
) -> None:
    for method in (R.value, R.gradient):
        with pytest.raises(ValueError, match=message):
            method(state(shape))


def test_a_state_without_further_axes_is_one_number_for_each_sample() -> None:
    z = torch.tensor([3.0, -4.0], dtype=torch.float64)
    assert torch.equal(SquaredNorm().value(z), torch.tensor([4.5, 8.0], dtype=torch.float64))
    assert torch.equal(
        AbsoluteSum().envelope(z, 1.0), torch.tensor([2.5, 3.5], dtype=torch.float64)
    )
    assert torch.allclose(Incay().gradient(z), -4 * z / (z.square() + 2) ** 2)


def test_regularizers_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Incay().epsilon = 2.0


def test_custom_must_get_a_function() -> None:
    with pytest.raises(
        ValueError, match=r"^Custom\.function must be a function of the state; got 3\.$"
    ):
        Custom(3)
