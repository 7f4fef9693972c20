"""What wrappers do to a layer's problem (OptEq, Table 1 and Theorem 4), checked by SciPy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from samples import Explicit, arrays, opteq
from scipy.optimize import minimize
from torch import Tensor

from equipoise.analysis import objective
from equipoise.families.opteq import Objective, OptEq
from equipoise.layers import Cell, ChangeOfVariable, Equilibrium, Regularized, Skip
from equipoise.prox.regularizer import Custom

GAMMA = 0.3
MU = 1.3


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def around(cell: Cell, **more) -> Equilibrium:
    more = {"solver": "newton", "tolerance": 1e-12, "max_steps": 2000, "on_failure": "raise"} | more
    return Equilibrium(cell, **more)


def rotation(size: int) -> Tensor:
    return torch.linalg.qr(normal(size, size)).Q


def smallest(own: Explicit, more: Callable[[np.ndarray], tuple[float, np.ndarray]]) -> np.ndarray:
    """The state that minimises phi plus another function with its gradient."""

    def total(q: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = more(own.state(q))
        return own.phi(q) + value, own.slope(q) + own.pull(slope)

    options = {"ftol": 1e-16, "gtol": 1e-10, "maxiter": 5000, "maxfun": 50000}
    return own.state(
        minimize(
            total, own.start(), jac=True, bounds=own.bounds(), method="L-BFGS-B", options=options
        ).x
    )


def squares(z: np.ndarray) -> tuple[float, np.ndarray]:
    return GAMMA * z @ z / 2, GAMMA * z


def log_cosh(z: np.ndarray) -> tuple[float, np.ndarray]:
    return GAMMA * np.log(np.cosh(z - 1)).sum(), GAMMA * np.tanh(z - 1)


def absolute(z: np.ndarray) -> tuple[float, np.ndarray]:
    return GAMMA * np.abs(z).sum(), GAMMA * np.sign(z)


def huber(z: np.ndarray) -> tuple[float, np.ndarray]:
    """The Moreau envelope of gamma |z|_1."""
    size = np.abs(z)
    return np.where(size <= GAMMA, size**2 / 2, GAMMA * size - GAMMA**2 / 2).sum(), np.clip(
        z, -GAMMA, GAMMA
    )


def envelope_of_squares(z: np.ndarray) -> tuple[float, np.ndarray]:
    weight = GAMMA / (1 + GAMMA)
    return weight * z @ z / 2, weight * z


LOG_COSH = Custom(
    lambda z: torch.log(torch.cosh(z - 1)).flatten(1).sum(dim=1), lipschitz=1.0, convex=True
)
REGULARIZERS = {
    "squares, gradient": ("l2", "gradient", squares),
    "log cosh, gradient": (LOG_COSH, "gradient", log_cosh),
    "squares, prox": ("l2", "prox", envelope_of_squares),
    "absolute, prox": ("l1", "prox", huber),
}


@pytest.mark.parametrize("kind", REGULARIZERS)
def test_regularized_layer_minimises_the_sum(kind: str) -> None:
    """OptEq, Theorem 4: gradient steps give phi + gamma R.

    The proximal map gives phi plus the Moreau envelope of gamma R.
    """
    regularizer, operation, function = REGULARIZERS[kind]
    plain, x = opteq(6, 6, "tanh", mu=MU, alpha=1.0)
    layer = around(Regularized(plain.layers, regularizer, GAMMA, operation))
    (W, c), z, problem = arrays(plain, x), layer(x).detach(), objective(layer, x)
    assert isinstance(problem, Objective)
    for row in range(3):
        own = Explicit("tanh", W, c[row], MU)
        assert np.abs(smallest(own, function) - z[row].numpy()).max() <= 1e-6
        q = np.linalg.solve(W.T, MU * z[row].numpy())
        assert problem.value(z)[row] == pytest.approx(
            own.phi(q) + function(z[row].numpy())[0], abs=1e-9
        )
    assert problem.merit(z) == pytest.approx(problem.value(z), abs=1e-9)
    y = normal(3, 6)
    assert problem.on_step(y) == pytest.approx(problem.value(problem.step(y)), abs=1e-9)
    assert problem.step(y) == pytest.approx(layer.map(x)(y).detach(), abs=1e-12)
    assert (problem.merit(y) >= problem.merit(z) - 1e-12).all()
    assert problem.minimizer() == pytest.approx(z, abs=1e-9)


def test_erratum_a_proximal_map_does_not_add_the_regulariser_itself() -> None:
    """OptEq v3, after Theorem 4, offers prox_(gamma R) for the gradient step's sum.

    The minimiser is another one.
    """
    plain, x = opteq(6, 6, "tanh", mu=MU, alpha=1.0)
    layer = around(Regularized(plain.layers, "l2", GAMMA, "prox"))
    (W, c), z = arrays(plain, x), layer(x).detach().numpy()
    for row in range(3):
        own = Explicit("tanh", W, c[row], MU)
        assert np.abs(smallest(own, envelope_of_squares) - z[row]).max() <= 1e-6
        assert np.abs(smallest(own, squares) - z[row]).max() >= 1e-3
    layer = around(Regularized(plain.layers, "l1", GAMMA, "prox"))
    z = layer(x).detach().numpy()
    for row in range(3):
        own = Explicit("tanh", W, c[row], MU)
        downhill = (
            huber(z[row])[1] - absolute(z[row])[1]
        )  # of phi + gamma |z|_1, which has its corners elsewhere

        def total(length: float, own=own, start=z[row], downhill=downhill) -> float:
            state = start + length * downhill
            return own.phi(np.linalg.solve(W.T, MU * state)) + absolute(state)[0]

        assert total(1e-6) < total(0) - 0.1e-6 * downhill @ downhill


def test_erratum_a_gradient_step_after_the_network_does_not_end_at_the_minimiser() -> None:
    """OptEq v1, section 4.1, has `z = T_R o T(z)`, v3 `z = T o T_R(z)`.

    With `T_R = I - gamma grad R` the first one ends one gradient step away from the minimiser.
    """
    plain, x = opteq(6, 6, "tanh", mu=MU, alpha=1.0)
    step = plain.map(x)
    z = torch.zeros(len(x), 6, dtype=x.dtype)
    for _ in range(500):
        z = (1 - GAMMA) * step(z).detach()  # grad R(u) = u
    W, c = arrays(plain, x)
    for row in range(3):
        wanted = smallest(Explicit("tanh", W, c[row], MU), squares)
        assert np.abs(wanted - z[row].numpy()).max() >= 1e-3
        assert np.abs(wanted - step(z)[row].detach().numpy()).max() <= 1e-6


@pytest.mark.parametrize("kind", ["squares, gradient", "absolute, prox"])
def test_regularizer_outside_of_a_skip_sees_the_envelope(kind: str) -> None:
    """With alpha < 1 the sum is alpha M_phi^(1 - alpha) + gamma R.

    SciPy minimises it over the state and the envelope's own.
    """
    regularizer, operation, function = REGULARIZERS[kind]
    plain, x = opteq(5, 5, "tanh", mu=MU, alpha=0.9)
    W, c = arrays(plain, x)
    alpha = 0.9 * 0.7
    layer = around(Regularized(Skip(plain.layers, 0.7), regularizer, GAMMA, operation))
    z, problem = layer(x).detach(), objective(layer, x)
    for row in range(3):
        own = Explicit("tanh", W, c[row], MU)

        def total(both: np.ndarray, own=own) -> tuple[float, np.ndarray]:
            q, state = both[:5], both[5:]
            gap = (own.state(q) - state) / (1 - alpha)
            value, slope = function(state)
            return (
                alpha * (own.phi(q) + (1 - alpha) * gap @ gap / 2) + value,
                np.concatenate([alpha * (own.slope(q) + own.pull(gap)), slope - alpha * gap]),
            )

        found = minimize(
            total,
            np.zeros(10),
            jac=True,
            bounds=[*own.bounds(), *[(None, None)] * 5],
            method="L-BFGS-B",
            options={"ftol": 1e-16, "gtol": 1e-10, "maxiter": 5000},
        )
        assert np.abs(found.x[5:] - z[row].numpy()).max() <= 1e-6
        assert problem.value(z)[row] == pytest.approx(found.fun, abs=1e-9)
        assert (
            np.abs(smallest(own, function) - z[row].numpy()).max() >= 1e-3
        )  # it is not phi + gamma R
    y = normal(3, 5)
    assert problem.on_step(y) == pytest.approx(problem.value(problem.step(y)), abs=1e-9)
    assert problem.step(y) == pytest.approx(layer.map(x)(y).detach(), abs=1e-12)
    assert problem.merit(z) == pytest.approx(problem.value(z), abs=1e-9)


def test_default_opteq_with_a_regulariser_is_read_with_its_skip_connection() -> None:
    layer = OptEq(
        4, 6, 8, "relu", regularizer="l1", strength=0.05, tolerance=1e-12, solver="newton"
    ).double()
    x = normal(3, 4)
    problem = objective(layer, x)
    z = layer(x).detach()
    assert problem.minimizer_gap(z).max() <= 1e-10
    assert (problem.value(z + 1e-3 * normal(3, 6)) > problem.value(z)).all()
    assert "0.8 M_phi^0.2(z) + the Moreau envelope of 0.05 |z|_1" in problem.describe()


def test_skip_keeps_the_minimisers_and_is_the_proximal_map_of_the_envelope() -> None:
    """OptEq, Table 1, row 2: y - F(y) is the gradient of alpha M_phi^(1 - alpha) at F(y)."""
    plain, x = opteq(9, 6, "softplus", alpha=1.0)
    layer = around(Skip(plain.layers, 0.4))
    assert layer(x).detach() == pytest.approx(plain(x).detach(), abs=1e-10)
    problem, y = objective(layer, x), 2 * normal(3, 6)
    assert problem.value(plain(x)) == pytest.approx(objective(plain, x).value(plain(x)), abs=1e-12)
    F = layer.map(x)(y).detach()
    step = 1e-5
    for place in range(6):
        d = step * torch.eye(6, dtype=torch.float64)[place]
        slope = 0.4 * (problem.envelope(F + d, 0.6) - problem.envelope(F - d, 0.6)) / (2 * step)
        assert slope == pytest.approx((y - F)[:, place], abs=1e-8)


@pytest.mark.parametrize(
    "change",
    [
        {"scale": -2.0},
        {"shift": 0.75},
        {"matrix": "rotation"},
        {"matrix": "stretch", "scale": 0.5, "shift": -1.0},
    ],
    ids=str,
)
def test_change_of_variable_minimises_the_composed_function(change: dict) -> None:
    """OptEq, Table 1, row 3, with SciPy on h(A(z)) written out."""
    matrix = {"rotation": rotation(6), "stretch": normal(6, 6) + 3 * torch.eye(6).double()}.get(
        str(change.get("matrix"))
    )
    plain, x = opteq(8, 6, "tanh", alpha=1.0)
    layer = around(ChangeOfVariable(plain.layers, **(change | {"matrix": matrix})))
    z, problem = layer(x).detach(), objective(layer, x)
    M = change.get("scale", 1.0) * (np.eye(6) if matrix is None else matrix.numpy())
    W, c = arrays(plain, x)
    inner = objective(plain, x)
    for row in range(3):

        def h(point: np.ndarray, own=c[row]) -> tuple[float, np.ndarray]:
            w = M @ point + change.get("shift", 0.0)
            a = W @ w + own
            return w @ w / 2 - np.log(np.cosh(a)).sum(), M.T @ (w - W.T @ np.tanh(a))

        found = minimize(h, np.zeros(6), jac=True, method="BFGS", options={"gtol": 1e-11})
        assert np.abs(found.x - z[row].numpy()).max() <= 1e-6
        assert problem.merit(z)[row] == pytest.approx(found.fun, abs=1e-10)
    there = z @ torch.from_numpy(M.T) + change.get("shift", 0.0)
    assert problem.value(z) == pytest.approx(inner.value(there), abs=1e-9)
    assert there == pytest.approx(plain(x).detach(), abs=1e-9)
    assert problem.step(z) == pytest.approx(z, abs=1e-9)
    assert problem.minimizer(z + 1) == pytest.approx(z, abs=1e-8)
    assert "phi(A(z))" in problem.describe()


def test_regularizer_outside_of_a_conformal_change_is_multiplied_by_the_square_of_its_scale() -> (
    None
):
    plain, x = opteq(6, 6, "tanh", mu=MU, alpha=1.0)
    scale, Q, shift = -1.7, rotation(6), 0.5
    layer = around(
        Regularized(
            ChangeOfVariable(plain.layers, matrix=Q, scale=scale, shift=shift),
            "l2",
            GAMMA,
            "gradient",
        )
    )
    (W, c), z, problem = arrays(plain, x), layer(x).detach(), objective(layer, x)
    for row in range(3):
        own = Explicit("tanh", W, c[row], MU)

        def term(w: np.ndarray) -> tuple[float, np.ndarray]:
            point = Q.numpy().T @ (w - shift) / scale
            value, slope = squares(point)
            return scale**2 * value, scale**2 * Q.numpy() @ slope / scale

        w = smallest(own, term)
        assert np.abs(Q.numpy().T @ (w - shift) / scale - z[row].numpy()).max() <= 1e-6
        assert problem.value(z)[row] == pytest.approx(
            own.phi(np.linalg.solve(W.T, MU * w)) + term(w)[0], abs=1e-8
        )
    y = normal(3, 6)
    assert problem.on_step(y) == pytest.approx(problem.value(problem.step(y)), abs=1e-9)
    assert problem.step(y) == pytest.approx(layer.map(x)(y).detach(), abs=1e-12)


def test_changes_outside_of_a_regulariser_are_read() -> None:
    plain, x = opteq(6, 6, "tanh", alpha=1.0)
    inner = Regularized(plain.layers, "l2", GAMMA, "gradient")
    layer = around(
        Skip(
            ChangeOfVariable(inner, matrix=normal(6, 6) + 3 * torch.eye(6).double(), shift=1.0), 0.3
        )
    )
    z, problem = layer(x).detach(), objective(layer, x)
    there = objective(around(inner), x)
    w = layer.cell.cell.change(z)
    assert problem.value(z) == pytest.approx(there.value(w), abs=1e-9)
    assert there.minimizer_gap(w).max() <= 1e-9
    assert problem.minimizer_gap(z).max() <= 1e-9


def test_several_changes_of_variable_apply_from_the_outside_in() -> None:
    plain, x = opteq(6, 6, "tanh", mu=MU, alpha=1.0)
    Q, M = rotation(6), normal(6, 6) + 3 * torch.eye(6).double()
    inner = ChangeOfVariable(ChangeOfVariable(plain.layers, shift=0.5), matrix=Q, scale=1.5)
    layer = around(
        ChangeOfVariable(
            ChangeOfVariable(Regularized(inner, "l2", GAMMA, "gradient"), shift=-1.0), matrix=M
        )
    )
    (W, c), z, problem = arrays(plain, x), layer(x).detach(), objective(layer, x)
    for row in range(3):
        point = M.numpy() @ z[row].numpy() - 1  # where the regulariser is
        w = 1.5 * Q.numpy() @ point + 0.5  # where phi is
        value = (
            Explicit("tanh", W, c[row], MU).phi(np.linalg.solve(W.T, MU * w))
            + 1.5**2 * GAMMA * point @ point / 2
        )
        assert problem.value(z)[row] == pytest.approx(value, abs=1e-9)
    y = normal(3, 6)
    assert problem.step(y) == pytest.approx(layer.map(x)(y).detach(), abs=1e-12)
    assert problem.minimizer_gap(z).max() <= 1e-9
    assert (problem.value(z + 1e-3 * y) > problem.value(z)).all()


def test_coupled_regulariser_makes_one_number_for_the_batch() -> None:
    """SciPy minimises over the whole batch at once."""

    def centre(z: Tensor) -> Tensor:
        return z.sum(dim=0).square().sum() / 2

    plain, x = opteq(4, 4, "tanh", mu=MU, alpha=1.0)
    layer = around(Regularized(plain.layers, Custom(centre, coupled=True, convex=True), 0.2))
    (W, c), z, problem = arrays(plain, x), layer(x).detach(), objective(layer, x)
    samples = [Explicit("tanh", W, own, MU) for own in c]

    def total(flat: np.ndarray) -> tuple[float, np.ndarray]:
        rows = flat.reshape(3, 4)
        middle = sum(own.state(q) for own, q in zip(samples, rows, strict=True))
        value = (
            sum(own.phi(q) for own, q in zip(samples, rows, strict=True))
            + 0.2 * middle @ middle / 2
        )
        return value, np.concatenate(
            [own.slope(q) + own.pull(0.2 * middle) for own, q in zip(samples, rows, strict=True)]
        )

    found = minimize(
        total,
        np.zeros(12),
        jac=True,
        bounds=samples[0].bounds() * 3,
        method="L-BFGS-B",
        options={"ftol": 1e-16, "gtol": 1e-10},
    )
    expected = np.stack(
        [own.state(q) for own, q in zip(samples, found.x.reshape(3, 4), strict=True)]
    )
    assert np.abs(expected - z.numpy()).max() <= 1e-6
    for value in (problem.value(z), problem.merit(z), problem.on_step(z)):
        assert value.shape == ()
        assert value == pytest.approx(found.fun, abs=1e-9)
    assert problem.minimizer() == pytest.approx(z, abs=1e-8)
    along = problem.along([z, z])
    assert along.value.shape == along.merit.shape == (2, 1)
    assert along.residual.shape == (2, 3)


def test_describe_does_not_claim_minimisers_of_functions_that_are_not_convex() -> None:
    plain, x = opteq(6, 6, "tanh")
    text = objective(around(Regularized(plain.layers, "incay", 0.1)), x).describe()
    assert "the regulariser is not convex, so that an equilibrium is a stationary point" in text
    text = objective(
        around(Regularized(plain.layers, lambda z: z.square().flatten(1).sum(dim=1), 0.1)), x
    ).describe()
    assert "may not be convex" in text


def test_unknown_nestings_are_refused_with_a_way_out() -> None:
    plain, x = opteq(6, 6, "tanh")
    once = Regularized(plain.layers, "l2")
    with pytest.raises(
        ValueError,
        match=(
            r"got a second Regularized outside of a first; add the two functions to one "
            r"regulariser"
        ),
    ):
        objective(around(Regularized(once, "l1")), x)
    stretched = ChangeOfVariable(plain.layers, matrix=torch.diag(torch.arange(1.0, 7).double()))
    with pytest.raises(
        ValueError,
        match=r"Regularized outside of a ChangeOfVariable that is no multiple of an orthogonal map",
    ):
        objective(around(Regularized(stretched, "l2")), x)
    deep, x = opteq([6, 5], 6, "tanh")
    with pytest.raises(
        ValueError, match=r"Regularized outside of a Skip around several layers; put it inside"
    ):
        objective(around(Regularized(Skip(deep.layers, 0.5), "l2")), x)
    problem = objective(around(Regularized(opteq(6, 6)[0].layers, "l2")), x)
    with pytest.raises(
        ValueError,
        match=(
            r"quadratic_program must be asked of a layer without a regulariser; got one "
            r"that adds"
        ),
    ):
        problem.quadratic_program()


def test_describe_names_the_factor_and_the_place_of_a_term_among_changes_of_variable() -> None:
    plain = OptEq(6, 4, 5, alpha=1.0).double()
    x = torch.randn(3, 6, dtype=torch.float64)
    Q = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0]
    outside = around(Regularized(ChangeOfVariable(plain.layers, matrix=Q, scale=3.0), "l2", 0.2))
    assert (
        "phi(A(z)) + 9 times the Moreau envelope of 0.2 |z|^2/2 over z"
        in objective(outside, x).describe()
    )
    inside = around(ChangeOfVariable(Regularized(plain.layers, "l2", 0.2), matrix=Q, scale=3.0))
    assert (
        "the Moreau envelope of 0.2 |z|^2/2, taken at the changed variable"
        in objective(inside, x).describe()
    )
