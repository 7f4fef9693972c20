from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from equipoise.prox import ACTIVATIONS, ELU, MatrixActivation, as_activation, is_proximal


def weights(rows: int, columns: int, norm: float, dtype: torch.dtype = torch.float64) -> Tensor:
    W = torch.randn(rows, columns, dtype=torch.float64)
    return (W * (norm / torch.linalg.matrix_norm(W, ord=2))).to(dtype)


def points(n: int, batch: int = 48) -> Tensor:
    return 2 * torch.randn(batch, n, dtype=torch.float64)


LINEAR = torch.tensor([[0.5, 0.2], [0.2, 0.3]], dtype=torch.float64)
ROTATION = torch.tensor([[0.0, -0.5], [0.5, 0.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    "f",
    [
        lambda z: F.softshrink(z, 0.7),
        lambda z: z.clamp(-0.5, 1.5),
        lambda z: z,
        torch.zeros_like,
        lambda z: z @ LINEAR,
        lambda z: z / z.norm(dim=1, keepdim=True).clamp_min(1),  # projection onto the unit ball
        lambda z: z.mean(dim=1, keepdim=True).expand_as(z),  # projection onto the diagonal
    ],
    ids=["soft threshold", "box", "identity", "zero", "quadratic", "ball", "diagonal"],
)
def test_is_proximal_accepts_proximal_maps(f) -> None:
    report = is_proximal(f, points(2))
    assert report
    assert report.proximal
    assert report.counterexample is None
    assert report.reason == (
        "No counter-example at 48 points and on the segments between them: evidence, not a proof."
    )
    assert report.asymmetry <= 1e-12
    assert report.smallest_eigenvalue >= -1e-12
    assert report.norm <= 1 + 1e-12


@pytest.mark.parametrize("name", list(ACTIVATIONS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_is_proximal_accepts_every_optimal_layer(name: str, dtype: torch.dtype) -> None:
    """OptEq, Theorem 1: the layer is a proximal map when mu >= L |W|^2."""
    s = as_activation(name)
    W, c = weights(7, 5, 1.5, dtype), torch.randn(7, dtype=dtype)
    mu = s.slopes[1] * 1.5**2
    assert is_proximal(lambda z: s(z @ W.T + c) @ W / mu, 2 * torch.randn(64, 5, dtype=dtype))


def test_is_proximal_needs_the_scale_of_theorem_1() -> None:
    s, W = ELU(3.0), weights(7, 5, 1.0)
    assert is_proximal(lambda z: s(z @ W.T) @ W / 3, points(5))
    assert not is_proximal(lambda z: s(z @ W.T) @ W, points(5))


def test_is_proximal_accepts_the_matrix_activation() -> None:
    A, W = weights(7, 7, 1.0), weights(7, 5, 1.0)
    s = MatrixActivation(A.T @ A)
    assert is_proximal(lambda z: s(z @ W.T + 0.3) @ W, points(5))


def test_is_proximal_lets_every_row_have_its_own_map() -> None:
    W, c = weights(6, 4, 1.0), 3 * torch.randn(48, 6, dtype=torch.float64)
    assert is_proximal(lambda z: torch.relu(z @ W.T + c) @ W, points(4))


@pytest.mark.parametrize("f", [F.gelu, F.silu, F.mish], ids=["gelu", "silu", "mish"])
def test_is_proximal_refutes_activations_that_fall(f) -> None:
    report = is_proximal(f, points(3))
    assert not report
    assert "falls" in report.reason
    assert report.smallest_eigenvalue < -0.05
    where = report.counterexample
    assert where is not None
    if where.ndim == 1:
        assert float(torch.func.jacrev(f)(where).diagonal().min()) == pytest.approx(
            report.smallest_eigenvalue, rel=1e-10
        )


def test_is_proximal_refutes_a_contraction_that_is_no_gradient() -> None:
    report = is_proximal(lambda z: z @ ROTATION, points(2).requires_grad_())
    assert not report.proximal
    assert report.reason == "The Jacobian is not symmetric (|J - J^T| = 1), so f is not a gradient."
    assert report.asymmetry == pytest.approx(1, abs=1e-12)
    assert report.norm == pytest.approx(0.5, abs=1e-12)
    assert report.smallest_eigenvalue == pytest.approx(0, abs=1e-12)
    assert report.counterexample is not None
    assert report.counterexample.shape == (2,)
    assert not report.counterexample.requires_grad


def test_is_proximal_refutes_asymmetry_that_depends_on_the_point() -> None:
    """The Jacobian is [[1/2, 0], [0.3 * 1[z0 > 1], 1/2]].

    The counter-example must be where it is not symmetric.
    """

    def f(z: Tensor) -> Tensor:
        return torch.stack([z[:, 0] / 2, z[:, 1] / 2 + 0.3 * F.relu(z[:, 0] - 1)], dim=1)

    report = is_proximal(f, points(2))
    assert report.counterexample is not None
    assert report.counterexample[0] > 1
    assert report.asymmetry == pytest.approx(0.3, rel=1e-12)


def test_is_proximal_refutes_an_expansion() -> None:
    report = is_proximal(lambda z: 2 * z, points(3))
    assert report.reason == "f is expansive (by a factor of 2)."
    assert report.norm == pytest.approx(2, rel=1e-12)
    assert report.counterexample is not None


def test_is_proximal_refutes_a_layer_whose_weights_are_too_large() -> None:
    W = weights(6, 4, 1.2)
    report = is_proximal(lambda z: (z @ W.T) @ W, points(4))
    assert not report
    assert report.norm == pytest.approx(1.44, rel=1e-10)


def test_is_proximal_refutes_a_decreasing_map() -> None:
    report = is_proximal(lambda z: -0.5 * z, points(3))
    assert (
        report.reason
        == "f falls (slope -0.5 in some direction), so it is not the gradient of a convex function."
    )
    assert report.smallest_eigenvalue == pytest.approx(-0.5, rel=1e-12)


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["up", "down"])
def test_is_proximal_refutes_jumps_that_no_jacobian_shows(sign: float) -> None:
    """Hard thresholding and its mirror image: the proximal maps of no convex function."""

    def f(z: Tensor) -> Tensor:
        return 0.2 * z + sign * 0.5 * (z > 0.3)

    report = is_proximal(f, points(6))
    assert not report
    ends = report.counterexample
    assert ends is not None
    assert ends.shape == (2, 6)
    step, rise = ends[1] - ends[0], f(ends)[1] - f(ends)[0]
    if sign > 0:
        assert float(rise.norm() / step.norm()) == pytest.approx(report.norm, rel=1e-10)
        assert report.norm > 2
    else:
        assert float(step @ rise / step.square().sum()) == pytest.approx(
            report.smallest_eigenvalue, rel=1e-10
        )
        assert report.smallest_eigenvalue < -2


def test_is_proximal_finds_a_jump_among_coinciding_points() -> None:
    at = torch.tensor([[-1.0], [1.0], [1.0]], dtype=torch.float64, requires_grad=True)
    report = is_proximal(lambda z: torch.sign(z - 0.1), at)
    assert not report
    assert report.counterexample is not None
    assert not report.counterexample.requires_grad
    assert sorted((report.counterexample[:, 0] > 0.1).tolist()) == [False, True]


def test_is_proximal_refutes_a_map_that_is_not_finite() -> None:
    at = points(2)
    at[5, 0] = -7.0
    report = is_proximal(lambda z: torch.where(z < -6.9, math.nan, z), at.clamp(-7, 6))
    assert not report
    assert report.reason == "f or its Jacobian is not finite at the counter-example."
    torch.testing.assert_close(report.counterexample, at[5])


# Lemma 6


def test_is_proximal_relative_to_a_permutation_accepts_a_deep_layer() -> None:
    """OptEq, Theorem 2: the blocks z_l = f_l(z_{l-1}) of a deep network, cyclically shifted."""
    first, second = weights(5, 3, 1.0), weights(5, 3, 1.0)

    def blocks(z: Tensor) -> Tensor:
        before, last = z[:, :3], z[:, 3:]
        return torch.cat(
            [torch.relu(last @ first.T) @ first, torch.tanh(before @ second.T) @ second], dim=1
        )

    assert not is_proximal(blocks, points(6))
    assert is_proximal(blocks, points(6), inverse=lambda y: y.roll(-3, dims=1))


def test_is_proximal_relative_to_a_scaling_refutes_the_printed_lemma() -> None:
    """f(z) = z and A(z) = z/2 meet the conditions as printed.

    Yet z = argmin |u|^2/2 - <u, z/2> + phi(u) needs phi = -|u|^2/4.
    """
    report = is_proximal(lambda z: z, points(3), inverse=lambda y: 2 * y)
    assert not report
    assert report.norm == pytest.approx(2, rel=1e-12)


# drawing, arguments


def test_is_proximal_draws_points_of_a_dimension_and_repeats_with_a_generator() -> None:
    seen = []

    def f(z: Tensor) -> Tensor:
        seen.append(z.detach())
        return F.gelu(z)

    first, again = (
        is_proximal(f, 4, samples=33, scale=5.0, generator=torch.Generator().manual_seed(3))
        for _ in range(2)
    )
    assert first.smallest_eigenvalue == again.smallest_eigenvalue
    assert seen[0].shape == (33, 4)
    assert float(seen[0].std()) == pytest.approx(5, rel=0.2)
    assert not first


def test_is_proximal_takes_modules_with_parameters_and_one_point() -> None:
    report = is_proximal(nn.Linear(3, 3), torch.zeros(1, 3))
    assert not report
    assert report.counterexample is not None
    assert not report.counterexample.requires_grad


def test_is_proximal_tolerance_decides() -> None:
    def f(z: Tensor) -> Tensor:
        return 1.001 * z

    assert not is_proximal(f, points(2))
    assert is_proximal(f, points(2), tolerance=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"points": 0}, r"points must be a whole number of at least 1; got 0"),
        ({"points": True}, r"points must be a whole number of at least 1; got True"),
        ({"points": 2, "samples": 0}, r"samples must be a whole number of at least 1; got 0"),
        ({"points": 2, "scale": -1.0}, r"scale must be a positive number; got -1\.0"),
        (
            {"points": 2, "tolerance": -1.0},
            r"tolerance must be zero or a positive number; got -1\.0",
        ),
        (
            {"points": torch.zeros(3)},
            r"points must be a floating-point tensor of shape \(batch, n\) or a dimension; "
            r"got .*\(3,\)",
        ),
        ({"points": torch.zeros(3, 0)}, r"points must be a floating-point tensor"),
        (
            {"points": torch.zeros(3, 2, dtype=torch.int64)},
            r"points must be a floating-point tensor .*torch\.int64",
        ),
    ],
    ids=str,
)
def test_is_proximal_refuses_bad_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^is_proximal\.{message}"):
        is_proximal(lambda z: z, **arguments)


def test_is_proximal_refuses_a_map_to_another_space() -> None:
    with pytest.raises(
        ValueError, match=r"^is_proximal\.function must keep the shape \(64, 3\); got \(64, 2\)\.$"
    ):
        is_proximal(lambda z: z[:, :2], 3)


def test_is_proximal_refutes_a_layer_in_stretched_coordinates() -> None:
    W = torch.randn(5, 4, dtype=torch.float64)
    W /= torch.linalg.matrix_norm(W, 2)

    def layer(z: Tensor) -> Tensor:
        return torch.relu(z @ W.T + 0.3) @ W

    stretch = torch.tensor([2.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    assert is_proximal(lambda z: layer(2 * z) / 2, points(4))
    report = is_proximal(lambda z: layer(stretch * z) / stretch, points(4))
    assert not report
    assert report.asymmetry > 0.01
