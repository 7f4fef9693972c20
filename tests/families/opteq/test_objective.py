from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from samples import ACTIVATION, POTENTIAL, Explicit, arrays, opteq, reference
from scipy.linalg import cholesky, solve_triangular
from scipy.optimize import linprog, lsq_linear, minimize, nnls
from torch import Tensor, nn

import equipoise.families.opteq.conjugate
import equipoise.families.opteq.potential
from equipoise.analysis import certify, objective
from equipoise.core.errors import ConvergenceError, ConvergenceWarning
from equipoise.families.opteq import DeepObjective, Objective, OptEq, OptEqConv2d
from equipoise.families.opteq.conjugate import conjugate
from equipoise.layers import Cell, Equilibrium
from equipoise.prox import ACTIVATIONS, MatrixActivation


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def test_objective_of_200_relu_layers_is_minimised_by_a_non_negative_quadratic_program() -> None:
    """OptEq, eq. 4: SciPy's active-set solver finds the equilibria of all kinds of layers."""
    for trial in range(200):
        n, m = int(torch.randint(1, 24, ())), int(torch.randint(1, 24, ()))
        mu, norm, alpha = (
            float(torch.empty(()).uniform_(0.3, 3)),
            (0.99, 0.9, 0.5)[trial % 3],
            (1.0, 0.8, 0.3)[trial % 3 - trial % 2],
        )
        layer, x = opteq(n, m, norm=norm, mu=mu, alpha=alpha, batch=2, tolerance=1e-11)
        W, c = arrays(layer, x)
        R = cholesky(np.eye(n) - W @ W.T / mu)
        z = layer(x).detach()
        for row in range(2):
            q, _ = nnls(R, solve_triangular(R, c[row], trans="T"), maxiter=100 * n)
            assert np.abs(W.T @ q / mu - z[row].numpy()).max() <= 1e-6, trial


@pytest.mark.parametrize("shape", [(6, 9), (9, 6)], ids=["wide", "tall"])
@pytest.mark.parametrize("name", ["relu", "hard_tanh", "identity"])
def test_quadratic_program_gives_the_equilibrium(name: str, shape: tuple[int, int]) -> None:
    layer, x = opteq(*shape, name, mu=1.7)
    problem = objective(layer, x).quadratic_program(sample=1)
    assert np.linalg.eigvalsh(problem.P)[0] > 0
    R = cholesky(problem.P)
    found = lsq_linear(
        R,
        solve_triangular(R, problem.c, trans="T"),
        bounds=(problem.lower, problem.upper),
        tol=1e-14,
    )
    assert np.abs(problem.back @ found.x - layer(x)[1].detach().numpy()).max() <= 1e-7


@pytest.mark.parametrize("name", ["tanh", "sigmoid", "softplus", "elu"])
@pytest.mark.parametrize("alpha", [1.0, 0.6])
def test_merit_is_minimised_at_the_equilibrium_by_scipy(name: str, alpha: float) -> None:
    mu = 1.4
    layer, x = opteq(12, 8, name, mu=mu, alpha=alpha)
    W, c = arrays(layer, x)
    z, problem = layer(x).detach(), objective(layer, x)
    for row in range(len(x)):

        def h(y: np.ndarray, own=c[row]) -> tuple[float, np.ndarray]:
            a = W @ y + own
            return y @ y / 2 - POTENTIAL[name](a).sum() / mu, y - W.T @ ACTIVATION[name](a) / mu

        found = minimize(h, np.zeros(8), jac=True, method="BFGS", options={"gtol": 1e-10})
        assert np.abs(found.x - z[row].numpy()).max() <= 1e-7
        assert problem.merit(z)[row] == pytest.approx(found.fun, abs=1e-12)
    assert problem.minimizer_gap(z).max() <= 1e-11
    assert problem.merit(z) == pytest.approx(
        problem.value(z), abs=1e-10
    )  # the minima of phi and of its envelope are equal


@pytest.mark.parametrize("name", ["tanh", "sigmoid"])
def test_value_is_minimised_at_the_equilibrium_by_scipy(name: str) -> None:
    mu = 1.4
    layer, x = opteq(5, 8, name, mu=mu)
    W, c = arrays(layer, x)
    z, problem = layer(x).detach(), objective(layer, x)
    for row in range(len(x)):
        own = Explicit(name, W, c[row], mu)
        found = minimize(
            own.phi,
            own.start(),
            jac=own.slope,
            bounds=own.bounds(),
            method="L-BFGS-B",
            options={"ftol": 1e-16, "gtol": 1e-10},
        )
        assert np.abs(own.state(found.x) - z[row].numpy()).max() <= 1e-6
        assert problem.value(z)[row] == pytest.approx(found.fun, abs=1e-10)


@pytest.mark.parametrize("shape", [(5, 8), (8, 8), (20, 8)], ids=["wide", "square", "tall"])
@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_value_agrees_in_closed_form_by_search_and_on_the_step(
    name: str, shape: tuple[int, int]
) -> None:
    layer, x = opteq(*shape, name, mu=1.7, norm=0.97, batch=6)
    problem = objective(layer, x)
    assert isinstance(problem, Objective)
    y = 2 * normal(6, 8)
    f = problem.step(y)
    assert f == pytest.approx(reference(layer, x)[0].prox(y).detach(), abs=1e-14)
    expected = problem.on_step(y)
    assert expected.shape == (6,)
    assert problem.value(f) == pytest.approx(expected, abs=1e-11)
    assert conjugate(problem._potential, f, 1e-8) - f.square().sum(dim=1) / 2 == pytest.approx(
        expected, abs=1e-11
    )


@pytest.mark.parametrize("name", ["relu", "tanh", "softplus"])
def test_value_is_the_supremum_that_scipy_finds(name: str) -> None:
    mu = 1.3
    layer, x = opteq(14, 5, name, mu=mu)
    W, c = arrays(layer, x)
    problem = objective(layer, x)
    z = problem.step(normal(3, 5)) / 2 + problem.step(normal(3, 5)) / 2  # the domain is convex
    for row, near in enumerate(z.numpy()):

        def negative(y: np.ndarray, own=c[row], at=near) -> tuple[float, np.ndarray]:
            a = W @ y + own
            return POTENTIAL[name](a).sum() / mu - at @ y, W.T @ ACTIVATION[name](a) / mu - at

        found = minimize(negative, np.zeros(5), jac=True, method="BFGS", options={"gtol": 1e-9})
        assert problem.value(z)[row] == pytest.approx(
            -found.fun - float(z[row] @ z[row]) / 2, abs=1e-9
        )


@pytest.mark.parametrize("shape", [(6, 4), (4, 4), (3, 4), (12, 4)], ids=str)
def test_value_is_infinite_exactly_outside_of_the_domain(shape: tuple[int, int]) -> None:
    """SciPy's projection on the cone of the states W^T q, q >= 0, says which are finite."""
    seen = set()
    for _ in range(12):
        layer, x = opteq(*shape, "relu", batch=8)
        problem, W = objective(layer, x), layer.layers.operators[0].weight.detach()
        z = torch.cat([normal(4, 4), torch.rand(4, shape[0], dtype=torch.float64) @ W])
        expected = [nnls(W.T.numpy(), row)[1] > 1e-9 for row in z.numpy()]
        assert problem.value(z).isinf().tolist() == expected
        seen.update(expected)
    assert False in seen
    assert True in seen or shape[0] == 12


def test_value_allows_for_rounding_and_no_more() -> None:
    layer, x = opteq(4, 7, "relu")
    problem = objective(layer, x)
    z = problem.step(normal(3, 7))
    assert problem.value(z.float()) == pytest.approx(problem.value(z), abs=1e-5)
    assert problem.value(z + 1e-4 * normal(3, 7)).isinf().all()
    assert problem.value(z + 1e-4 * normal(3, 7), tolerance=1e-2) == pytest.approx(
        problem.value(z), abs=1e-2
    )


def test_value_at_the_edge_of_the_domain_is_finite() -> None:
    """At a corner of the domain the supremum is approached but not attained.

    Only saturated units reach it.
    """
    layer, x = opteq(12, 5, "tanh")
    problem, (W, c) = objective(layer, x), arrays(layer, x)
    q = np.sign(W @ np.random.default_rng(0).normal(size=5)) * np.ones((3, 1))
    z = torch.from_numpy(q @ W)
    expected = (
        math.log(2) * 12 - (c * q).sum(axis=1) - (q @ W @ W.T * q).sum(axis=1) / 2
    )  # S*(1) = log 2
    assert problem.value(z) == pytest.approx(expected, abs=1e-9)


def test_an_open_sample_takes_nothing_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = opteq(12, 5, "tanh")
    problem = objective(layer, x)
    z = problem.step(normal(3, 5))
    expected = problem.value(z)
    z[1] = 100.0  # outside of the domain of a bounded activation, which must not be proved
    for name in ("_separated", "_proved_outside"):
        monkeypatch.setattr(
            equipoise.families.opteq.conjugate,
            name,
            lambda search, *_: torch.zeros_like(search.size, dtype=torch.bool),
        )
    with pytest.warns(ConvergenceWarning, match=r"1 of 3 samples \(rows 1\)"):
        found = problem.value(z)
    assert found[1].isnan()
    assert torch.equal(found[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("hidden", [12, 4])  # found by a search, and in closed form
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_states_that_are_not_finite_have_no_value(hidden: int, number: float) -> None:
    layer, x = opteq(hidden, 5, "relu")
    problem = objective(layer, x)
    z = problem.step(normal(3, 5))
    expected = problem.value(z)
    z[1, 0] = number
    found = problem.value(z)
    assert found[1].isnan()
    torch.testing.assert_close(found[[0, 2]], expected[[0, 2]])


def test_a_search_that_does_not_end_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = opteq(12, 5, "tanh")
    problem = objective(layer, x)
    monkeypatch.setattr(equipoise.families.opteq.conjugate, "MAX_STEPS", 2)
    with pytest.warns(
        ConvergenceWarning,
        match=(
            r"was not found for 3 of 3 samples \(rows 0, 1, 2\) in .* s, and is NaN there: it is "
            r"open whether they lie in its domain.*use on_step"
        ),
    ):
        assert problem.value(problem.step(normal(3, 5))).isnan().all()
    with pytest.raises(
        ConvergenceError, match=r"inverse of a layer was not found: relative residual"
    ):
        problem.envelope(3 * normal(3, 5), 0.01)
    layer, x = opteq(12, 5, "relu", norm=1.0)
    with torch.no_grad():
        layer.layers.inputs[0].bias.fill_(1e3)
    layer.layers.operators[0].weight.data = (
        torch.eye(5, dtype=torch.float64).repeat(3, 1)[:12] / 3**0.5
    )
    with pytest.raises(ConvergenceError, match=r"Objective\.minimizer was not found: Solution\("):
        objective(layer, x).minimizer()  # z + a constant: no fixed point


def test_objective_descends_along_plain_iteration() -> None:
    """phi(f(z_k)) and h(z_k) fall for proximal point and gradient steps: one theorem each."""
    for name in ("relu", "tanh"):
        for alpha in (1.0, 0.7):
            layer, x = opteq(
                30,
                20,
                name,
                norm=0.99,
                alpha=alpha,
                solver="fixed_point",
                tolerance=1e-9,
                max_steps=3000,
            )
            layer(x, trace=True)
            assert layer.last is not None
            found = objective(layer, x).descent(layer.last.trace)
            assert (
                found.value.shape
                == found.merit.shape
                == found.residual.shape
                == (len(layer.last.trace.state), 3)
            )
            for values in (found.value, found.merit):
                assert (np.diff(values, axis=0) <= 1e-13 * np.abs(values).max()).all()
                assert (values[0] > values[-1] + 1e-3).all()
            again = objective(layer, x).along(layer.last.trace.state)
            assert np.array_equal(again.value, found.value)
            if alpha == 1:
                assert again.residual == pytest.approx(found.residual, rel=1e-6)


def test_descent_without_a_trace_says_how_to_get_one() -> None:
    layer, x = opteq(3, 3)
    layer(x)
    with pytest.raises(ValueError, match=r"got NoneType\. Call layer\(x, trace=True\) first"):
        objective(layer, x).descent(layer.last.trace)


@pytest.mark.parametrize("name", ["tanh", "sigmoid"])
def test_step_is_the_proximal_map_of_the_objective(name: str) -> None:
    """OptEq, Theorem 1: SciPy minimises |u - y|^2/2 + phi(u) over the domain and finds f(y)."""
    mu = 0.8
    layer, x = opteq(5, 7, name, mu=mu)
    (W, c), problem = arrays(layer, x), objective(layer, x)
    y = 2 * normal(3, 7)
    for row in range(3):
        own, near = Explicit(name, W, c[row], mu), y[row].numpy()

        def total(q: np.ndarray, own=own, near=near) -> tuple[float, np.ndarray]:
            gap = own.state(q) - near
            return own.phi(q) + gap @ gap / 2, own.slope(q) + own.pull(gap)

        found = minimize(
            total,
            own.start(),
            jac=True,
            bounds=own.bounds(),
            method="L-BFGS-B",
            options={"ftol": 1e-16, "gtol": 1e-10},
        )
        assert np.abs(own.state(found.x) - problem.step(y)[row].numpy()).max() <= 1e-6


@pytest.mark.parametrize("name", ["relu", "softplus", "elu"])
def test_step_beats_every_other_state_in_the_proximal_problem(name: str) -> None:
    layer, x = opteq(14, 5, name, batch=200)
    problem = objective(layer, x)
    y = 2 * normal(200, 5)

    def total(u: Tensor) -> Tensor:
        return problem.value(u) + (u - y).square().sum(dim=1) / 2

    f = problem.step(y)
    for other in (
        problem.step(normal(200, 5)),
        problem.step(y + 0.01 * normal(200, 5)),
        f + 0.01 * normal(200, 5),
    ):
        assert (total(other) >= total(f)).all()


@pytest.mark.parametrize("t", [1.0, 0.9, 0.4, 0.01])
@pytest.mark.parametrize("name", ["tanh", "sigmoid"])
def test_envelope_is_the_minimum_that_scipy_finds(name: str, t: float) -> None:
    mu = 1.3
    layer, x = opteq(5, 7, name, mu=mu)
    (W, c), problem = arrays(layer, x), objective(layer, x)
    z = 2 * normal(3, 7)
    for row in range(3):
        own, near = Explicit(name, W, c[row], mu), z[row].numpy()

        def total(q: np.ndarray, own=own, near=near) -> tuple[float, np.ndarray]:
            gap = (own.state(q) - near) / t
            return own.phi(q) + t * gap @ gap / 2, own.slope(q) + own.pull(gap)

        found = minimize(
            total,
            own.start(),
            jac=True,
            bounds=own.bounds(),
            method="L-BFGS-B",
            options={"ftol": 1e-16, "gtol": 1e-9},
        )
        assert problem.envelope(z, t)[row] == pytest.approx(found.fun, abs=1e-8)
    assert problem.envelope(z, 1) == pytest.approx(problem.merit(z), abs=1e-12)


@pytest.mark.parametrize("name", ["relu", "softplus", "hard_tanh"])
def test_envelope_rises_as_t_falls_up_to_the_objective(name: str) -> None:
    layer, x = opteq(14, 6, name)
    problem = objective(layer, x)
    z = problem.step(normal(3, 6))
    values = [problem.envelope(z, t) for t in (1, 0.5, 0.1, 1e-2, 1e-4, 1e-8)]
    for larger, smaller in itertools.pairwise(values):
        assert (smaller >= larger - 1e-12).all()
    assert values[-1] == pytest.approx(problem.value(z), abs=1e-5)
    assert (values[-1] <= problem.value(z) + 1e-12).all()


@pytest.mark.parametrize("t", [0.0, -0.5, 1.5, math.nan])
def test_envelope_refuses_parameters_outside_of_its_range(t: float) -> None:
    layer, x = opteq(3, 3)
    with pytest.raises(ValueError, match=r"Objective\.envelope\.t must be in \(0, 1\]; got"):
        objective(layer, x).envelope(normal(3, 3), t)


def test_minimizer_is_found_from_anywhere_also_at_zero() -> None:
    layer, x = opteq(30, 20, norm=0.999)
    problem = objective(layer, x)
    z = layer(x).detach()
    assert problem.minimizer() == pytest.approx(z, abs=1e-9)
    assert problem.minimizer(100 * normal(3, 20)) == pytest.approx(z, abs=1e-9)
    with torch.no_grad():
        layer.layers.inputs[0].bias.fill_(-1e3)
    assert not objective(layer, x).minimizer().any()


def test_matrix_activation_minimises_a_quadratic_function() -> None:
    """OptEq, Table 1, row 4: <q, S^-1 q>/2 - <c, q> - |z|^2/2, z = W^T q; also singular S."""
    for rank in (6, 4):
        A = torch.randn(rank, 6, dtype=torch.float64)
        S = A.T @ A / torch.linalg.matrix_norm(A, 2) ** 2
        layer, x = opteq(6, 8, MatrixActivation(S), mu=1.2)
        W, c = arrays(layer, x)
        T = W.T @ S.numpy()
        expected = np.linalg.solve(np.eye(8) - T @ W / 1.2, T @ c.T / 1.2).T
        z, problem = layer(x).detach(), objective(layer, x)
        assert np.abs(z.numpy() - expected).max() <= 1e-10
        q = (z.numpy() @ W.T + c) @ S.numpy()  # z = W^T q/mu
        value = (
            (q @ np.linalg.pinv(S.numpy(), rcond=1e-10) * q).sum(axis=1) / 2 - (c * q).sum(axis=1)
        ) / 1.2 - (expected**2).sum(axis=1) / 2
        assert problem.value(z) == pytest.approx(value, abs=1e-9)
        assert problem.merit(z) == pytest.approx(value, abs=1e-9)
        program = problem.quadratic_program(0)
        assert program.back @ np.linalg.solve(program.P, program.c) == pytest.approx(
            expected[0], abs=1e-9
        )


@pytest.mark.parametrize(
    "more",
    [{}, {"padding": "circular"}, {"groups": 2}, {"separable": True}, {"pool": 2}],
    ids=str,
)
def test_convolution_has_the_objective_of_its_matrix(
    more: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = OptEqConv2d(
        2,
        4,
        6,
        3,
        "tanh",
        solver="newton",
        tolerance=1e-12,
        max_steps=500,
        on_failure="raise",
        **more,
    ).double()
    sides = (6, 6) if "pool" in more else (4, 5)
    x = normal(2, 2, *sides)
    (own,) = reference(layer, x)
    W, c = own.matrix(4, *sides).numpy(), own.c.flatten(1).numpy()
    z = layer(x).detach()
    y = 3 * normal(2, 4, *sides)

    def h(point: np.ndarray, own: np.ndarray) -> tuple[float, np.ndarray]:
        a = W @ point + own
        return point @ point / 2 - POTENTIAL["tanh"](a).sum(), point - W.T @ np.tanh(a)

    for width in (512, 1):  # with the matrix and without one
        monkeypatch.setattr(equipoise.families.opteq.potential, "DENSE_WIDTH", width)
        problem = objective(layer, x)
        assert (problem._potential.matrix is None) == (width == 1)
        for row in range(2):
            found = minimize(
                h,
                np.zeros(z[row].numel()),
                (c[row],),
                jac=True,
                method="BFGS",
                options={"gtol": 1e-9},
            )
            assert np.abs(found.x - z[row].flatten().numpy()).max() <= 1e-7
            assert problem.merit(z)[row] == pytest.approx(found.fun, abs=1e-10)
        f = problem.step(y)
        assert f.shape == y.shape
        assert problem.value(f) == pytest.approx(problem.on_step(y), abs=1e-9)
        assert problem.envelope(y, 0.3) == pytest.approx(
            _envelope(W, c, y.flatten(1).numpy(), 0.3), abs=1e-9
        )
        assert problem.value(100 * y).isinf().all()
        assert problem.minimizer() == pytest.approx(z, abs=1e-9)


def _envelope(W: np.ndarray, c: np.ndarray, z: np.ndarray, t: float) -> list[float]:
    """(1 - t) M^t = sup_y <z, y> - (1 - t) psi(y) - t |y|^2/2 - |z|^2/2, by SciPy."""
    values = []
    for own, at in zip(c, z, strict=True):

        def negative(y: np.ndarray, own=own, at=at) -> tuple[float, np.ndarray]:
            a = W @ y + own
            return (1 - t) * POTENTIAL["tanh"](a).sum() + t * y @ y / 2 - at @ y, (
                1 - t
            ) * W.T @ np.tanh(a) + t * y - at

        values.append(
            (
                -minimize(negative, at, jac=True, method="BFGS", options={"gtol": 1e-9}).fun
                - at @ at / 2
            )
            / (1 - t)
        )
    return values


def test_learned_alpha_and_float32_layers_are_read() -> None:
    layer = OptEq(4, 6, 9, "tanh", learn_alpha=True, tolerance=1e-6, bound=1.0)
    with torch.no_grad():
        layer.layers.operators[0].weight.mul_(10)
    x = torch.randn(3, 4)
    problem = objective(layer, x)
    z = layer(x)
    assert problem.value(z).dtype == torch.float64
    assert not problem.value(z).requires_grad
    assert problem.minimizer_gap(z).max() <= 1e-4
    assert problem.on_step(z) == pytest.approx(problem.merit(z), abs=1e-6)


def test_objective_does_not_change_with_the_layer_afterwards() -> None:
    layer, x = opteq(5, 5)
    problem, y = objective(layer, x), normal(3, 5)
    before = problem.on_step(y)
    with torch.no_grad():
        layer.layers.operators[0].weight.zero_()
        layer.layers.inputs[0].bias.zero_()
    assert torch.equal(problem.on_step(y), before)
    assert not torch.equal(objective(layer, x).on_step(y), before)


def test_objective_refuses_weights_that_are_too_large() -> None:
    layer, x = opteq(5, 8, "sigmoid", norm=1.2, mu=2.0)
    with pytest.raises(
        ValueError,
        match=r"must have mu >= L_s \|W\|\^2 in each of its layers, or it is not a proximal map "
        r"\(OptEq, Theorem 1\); got "
        r"L_s \|W\|\^2 = 2\.88 for mu = 2 in layer 1\. Use norm='scale', or mu=2\.8[89]\.",
    ):
        objective(layer, x)
    layer.layers.mu = 2.89
    objective(layer, x)
    layer.layers.mu, layer.layers.norm = 2.0, "scale"
    objective(layer, x)


def test_objective_reads_convolutions_whose_bound_is_loose_but_whose_norm_is_not() -> None:
    layer = OptEqConv2d(2, 2, 3, norm="none", alpha=0.5).double()
    x = normal(1, 2, 3, 3)
    potential = objective(layer, x)._potential
    scale = 0.999 / float(torch.linalg.matrix_norm(potential.matrix, 2))
    layer.layers.operators[0].scale_(scale)
    assert layer.layers.norms()["1"] > 1  # what is proven for all image sizes
    objective(layer, x)
    layer.layers.operators[0].scale_(1.01)
    with pytest.raises(ValueError, match=r"L_s \|W\|\^2 = 1\.01"):
        objective(layer, x)


class Foreign(Cell):
    def inject(self, x: Tensor) -> Tensor:
        return x

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return torch.tanh(z / 2 + context)


def test_objective_refuses_what_it_does_not_know() -> None:
    with pytest.raises(
        ValueError,
        match=r"^No problem is known for Foreign\.$",
    ):
        objective(Equilibrium(Foreign()), normal(2, 3))
    with pytest.raises(
        ValueError,
        match=r"objective\.layer must be an Equilibrium, such as OptEq or OptEqConv2d; "
        r"got Sequential\. Give",
    ):
        objective(nn.Sequential(), normal(2, 3))  # type: ignore[arg-type]
    layer, x = opteq(5, 5)
    with pytest.raises(
        ValueError,
        match=r"Objective\.value\.z must be a state of shape \(3, 5\); got shape \(3, 4\)",
    ):
        objective(layer, x).value(normal(3, 4))
    layer, x = opteq(5, 5, "tanh")
    with pytest.raises(
        ValueError,
        match=r"ReLU, HardTanh, Identity or MatrixActivation; got Tanh, whose problem is not "
        r"quadratic",
    ):
        objective(layer, x).quadratic_program()


def test_describe_says_what_is_minimised_and_how_convex_it_is() -> None:
    layer, x = opteq(12, 6, "relu", norm=0.83)
    text = objective(layer, x).describe()
    assert "minimises phi(z) over z" in text
    assert "S' = ReLU" in text
    assert "W is 12 x 6" in text
    assert "0.452-strongly convex and the minimiser is unique" in text  # 1/0.83^2 - 1
    assert isinstance(objective(opteq([3, 4], 5)[0], x), DeepObjective)


@pytest.mark.parametrize("norm", [0.5, 0.83])
def test_strong_convexity_is_as_large_as_described_and_no_larger(norm: float) -> None:
    """The curvature of phi along the top singular vector is 1/norm^2 - 1, elsewhere larger."""
    layer, x = opteq(7, 7, "identity", norm=norm, batch=1)
    problem = objective(layer, x)
    W = layer.layers.operators[0].weight.detach()
    top = torch.linalg.svd(W).Vh[0][None]
    z = normal(1, 7)

    def curvature(d: Tensor) -> float:
        return float(
            (problem.value(z + d) + problem.value(z - d) - 2 * problem.value(z)) / d.square().sum()
        )

    modulus = problem._potential.modulus()
    assert curvature(top) == pytest.approx(modulus, rel=1e-6)
    assert all(curvature(normal(1, 7)) >= modulus for _ in range(20))


@pytest.mark.parametrize("activation", ["relu", "tanh", "sigmoid", "softplus", "elu"])
def test_objective_at_zero_is_the_limit_of_values_nearby(activation: str) -> None:
    torch.manual_seed(0)
    problem = objective(
        OptEq(10, 6, 9, activation).double(), torch.randn(20, 10, dtype=torch.float64)
    )
    inside = problem.step(
        torch.zeros(20, 6)
    )  # a point of the domain, towards which zero is approached
    near = problem.value(1e-7 * inside)
    assert near.isfinite().all()
    assert torch.allclose(problem.value(torch.zeros(20, 6, dtype=torch.float64)), near, atol=1e-4)


def test_objective_of_an_empty_batch_is_empty() -> None:
    problem = objective(OptEq(3, 4, 7), torch.zeros(0, 3))
    assert problem.value(torch.zeros(0, 4)).shape == (0,)


def test_objective_refuses_inputs_that_the_layer_refuses_and_weights_that_are_not_finite() -> None:
    layer = OptEq(6, 4, 7)
    with pytest.raises(
        ValueError, match=r"^OptEq input must have shape \(batch, 6\); got \(2, 3, 6\)\.$"
    ):
        objective(layer, torch.zeros(2, 3, 6))
    layer.layers.operators[0].scale_(float("nan"))
    with pytest.raises(
        ValueError,
        match=r"^objective\.layer must have finite weights; got NaN or infinity in "
        r"operators\.0\.weight\.$",
    ):
        objective(layer, torch.zeros(2, 6))
    with pytest.raises(
        ValueError,
        match=r"^certify\.layer must have finite weights; got NaN or infinity in "
        r"operators\.0\.weight\.$",
    ):
        certify(layer)


def test_erratum_a_strictly_convex_objective_need_not_have_a_minimiser() -> None:
    """OptEq v1 and v3, after Theorem 1: softplus and `W = 1`, so that `z = log(1 + e^z)`.

    `phi'(z) = log(e^z - 1) - z` rises strictly and is negative everywhere.
    """
    layer = OptEq(1, 1, 1, "softplus", alpha=1.0, norm="none", bias=False).double()
    with torch.no_grad():
        layer.layers.operators[0].weight.fill_(1.0)
    x, z = torch.zeros(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    y = torch.linspace(-20, 20, 401, dtype=torch.float64)[:, None]
    slope = (y - layer.map(x.expand(401, 1))(y)).detach()[:, 0]  # phi' at z = f(y), which rises too
    assert (slope.diff() > 0).all()
    assert (slope < 0).all()
    step = layer.map(x)
    for _ in range(1000):
        z = step(z).detach()
    assert float(z) == pytest.approx(np.log(1001), abs=1e-9)  # log(k + 1): no end


@pytest.mark.parametrize(("seed", "activation"), [(13, "tanh"), (20, "hard_tanh")])
def test_value_is_infinite_where_a_linear_program_proves_it(seed, activation):
    torch.manual_seed(seed)
    z = A = found = None
    for name in ("hard_tanh", "tanh", "sigmoid", "relu"):
        m = int(torch.randint(2, 5, ()))
        n = int(torch.randint(m + 1, 9, ()))
        layer = OptEq(3, m, n, activation=name, alpha=1.0).double()
        with torch.no_grad():
            layer.layers.operators[0].scale_(1.8)
        problem = objective(layer, torch.randn(2, 3, dtype=torch.float64))
        z = torch.randn(2, m, dtype=torch.float64) * float(10 ** (2 * torch.rand(()) - 1.3))
        if name == activation:
            A = layer.layers.effective_weights()[0][0].detach().T.numpy()
            found = problem.value(z)
            break
    for row, value in zip(z.numpy(), found, strict=True):
        inside = linprog([0.0] * A.shape[1], A_eq=A, b_eq=row, bounds=(-1, 1))
        assert bool(value.isfinite()) == (inside.status == 0)


def test_value_is_finite_at_an_inactive_equilibrium_up_to_rounding():
    layer = OptEq(3, 4, 6)
    with torch.no_grad():
        for parameter in layer.layers.inputs.parameters():
            parameter.zero_()
        layer.layers.inputs[0].bias.fill_(-1.0)
    problem = objective(layer, torch.randn(2, 3))
    assert problem.value(1e-9 * torch.randn(2, 4)).abs().max() <= 1e-12


def test_objective_is_infinite_off_the_range_of_a_large_convolution() -> None:
    """Its operator is not written out: 28 x 16 x 16 states, of which 16 channels reach 4,096."""
    layer = OptEqConv2d(28, 28, [16], alpha=1.0)
    x = torch.randn(2, 28, 16, 16)
    z = layer(x).detach()
    z[1] += 0.1 * torch.randn_like(z[1])
    value = objective(layer, x).value(z)
    assert value[0].isfinite()
    assert value[1] == torch.inf
