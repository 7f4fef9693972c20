"""Several layers: blocks, inclusion, the pair, the wide limit (OptEq, Lemma 3 to Theorem 3)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from samples import ACTIVATION, POTENTIAL, Explicit, arrays, opteq, reference
from scipy.linalg import block_diag
from scipy.optimize import minimize
from torch import Tensor

from equipoise.analysis import objective
from equipoise.families.opteq import DeepObjective, OptEqConv2d
from equipoise.layers import ChangeOfVariable, Equilibrium, Regularized, Skip


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def around(cell, **more) -> Equilibrium:
    more = {"solver": "newton", "tolerance": 1e-13, "max_steps": 2000, "on_failure": "raise"} | more
    return Equilibrium(cell, **more)


def perturbed(blocks: list[Tensor], place: int, size: float = 1e-3) -> list[Tensor]:
    return [
        block + size * torch.randn_like(block) if own == place else block
        for own, block in enumerate(blocks)
    ]


SHARES = [0.8, [0.9, 0.3, 0.6]]


@pytest.mark.parametrize("alpha", SHARES, ids=str)
@pytest.mark.parametrize("name", ["relu", "tanh", "softplus", "elu"])
def test_inclusion_holds_at_the_equilibrium_and_nowhere_near(name: str, alpha) -> None:
    """OptEq, Theorem 2."""
    layer, x = opteq([7, 12, 5], 8, name, alpha=alpha, mu=1.2)
    problem = objective(layer, x)
    assert isinstance(problem, DeepObjective)
    blocks = problem.blocks(layer(x).detach())
    assert problem.inclusion(blocks).shape == (3,)
    assert problem.inclusion(blocks).max() <= 1e-10
    for place in range(3):
        assert problem.inclusion(perturbed(blocks, place)).min() >= 1e-4
    # The blocks of another state are consistent with each other, but the last row, z_0 =
    # F_L(z_(L-1)), fails.
    assert problem.inclusion(problem.blocks(blocks[-1] + 0.01 * normal(3, 8))).min() >= 1e-4


@pytest.mark.parametrize("name", ["relu", "tanh", "softplus"])
def test_inclusion_for_layers_without_skip_connection(name: str) -> None:
    """alpha = 1: the subdifferential is a set, whose nearest element counts.

    It is empty where a layer cannot reach a block.
    """
    layer, x = opteq([7, 12, 5], 8, name, alpha=[1.0, 1.0, 0.5])
    problem = objective(layer, x)
    blocks = problem.blocks(layer(x).detach())
    assert problem.inclusion(blocks).max() <= 1e-5
    assert problem.inclusion(perturbed(blocks, 2)).min() >= 1e-4
    assert (
        problem.inclusion(perturbed(blocks, 0, 1.0)).isinf().all()
    )  # 7 hidden units do not reach 8 dimensions


@pytest.mark.parametrize("alpha", SHARES, ids=str)
def test_gradient_of_phi_is_the_inverse_of_each_layer(alpha) -> None:
    """By finite differences of the value: dPhi_l = F_l^-1 - I, so at F_l(y) it is y - F_l(y)."""
    layer, x = opteq([7, 12, 5], 6, "tanh", alpha=alpha, mu=1.2)
    problem = objective(layer, x)
    before = [normal(3, 6) for _ in range(3)]
    blocks = [own.step(y) for own, y in zip(reference(layer, x), before, strict=True)]
    step = 1e-5
    for place in range(3):
        for axis in range(6):
            d = step * torch.eye(6, dtype=torch.float64)[axis]
            moved = [
                [b + sign * d if own == place else b for own, b in enumerate(blocks)]
                for sign in (1, -1)
            ]
            slope = (problem.value(moved[0]) - problem.value(moved[1])) / (2 * step)
            assert slope == pytest.approx((before[place] - blocks[place])[:, axis], abs=1e-7)


def test_value_is_the_sum_of_the_envelopes_that_scipy_finds() -> None:
    alphas, mu = [0.8, 0.3, 1.0], 1.2
    layer, x = opteq([5, 6, 4], 6, "sigmoid", alpha=alphas, mu=mu)
    problem = objective(layer, x)
    reachable = reference(layer, x)[2].prox(normal(3, 6)).detach()
    blocks = [normal(3, 6), normal(3, 6), reachable]
    for row in range(3):
        total = 0.0
        for place, alpha in enumerate(alphas):
            W, c = arrays(layer, x, place)
            own, near = Explicit("sigmoid", W, c[row], mu), blocks[place][row].numpy()
            if alpha == 1:
                total += own.phi(np.linalg.lstsq(W.T, mu * near, rcond=None)[0])
                continue

            def function(
                q: np.ndarray, own=own, near=near, t=1 - alpha
            ) -> tuple[float, np.ndarray]:
                gap = (own.state(q) - near) / t
                return own.phi(q) + t * gap @ gap / 2, own.slope(q) + own.pull(gap)

            options = {"ftol": 1e-16, "gtol": 1e-10}
            total += (
                alpha
                * minimize(
                    function,
                    own.start(),
                    jac=True,
                    bounds=own.bounds(),
                    method="L-BFGS-B",
                    options=options,
                ).fun
            )
        assert problem.value(blocks)[row] == pytest.approx(total, abs=1e-8)


@pytest.mark.parametrize("alpha", [0.7, [0.9, 0.4]], ids=str)
@pytest.mark.parametrize("name", ["tanh", "sigmoid"])
def test_two_blocks_of_an_equilibrium_are_the_pair_that_scipy_finds(name: str, alpha) -> None:
    """OptEq, Corollary 1, with the envelopes written as minima.

    SciPy minimises over q_1, q_2, z_1 and z_0 at once.
    """
    mu = 1.2
    layer, x = opteq([4, 5], 5, name, alpha=alpha, mu=mu)
    problem = objective(layer, x)
    z1, z0 = problem.blocks(layer(x).detach())
    shares = problem.alphas
    for row in range(3):
        own = [Explicit(name, W, c[row], mu) for W, c in (arrays(layer, x, 0), arrays(layer, x, 1))]

        def total(flat: np.ndarray, own=own) -> tuple[float, np.ndarray]:
            hidden, states = (flat[:4], flat[4:9]), (flat[9:14], flat[14:])
            apart = states[0] - states[1]
            value, slopes, pulls = apart @ apart / 2, [], [apart, -apart]
            for place in range(2):
                a, q = shares[place], hidden[place]
                gap = (own[place].state(q) - states[place]) / (1 - a)
                value += a * (own[place].phi(q) + (1 - a) * gap @ gap / 2)
                slopes.append(a * (own[place].slope(q) + own[place].pull(gap)))
                pulls[place] = pulls[place] - a * gap
            return value, np.concatenate([*slopes, *pulls])

        start = np.concatenate([own[0].start(), own[1].start(), np.zeros(10)])
        bounds = [*own[0].bounds(), *own[1].bounds(), *[(None, None)] * 10]
        options = {"ftol": 1e-16, "gtol": 1e-10, "maxiter": 10000, "maxfun": 100000}
        found = minimize(total, start, jac=True, bounds=bounds, method="L-BFGS-B", options=options)
        assert np.abs(found.x[9:14] - z1[row].numpy()).max() <= 1e-6
        assert np.abs(found.x[14:] - z0[row].numpy()).max() <= 1e-6
        assert problem.two_blocks(z1, z0)[row] == pytest.approx(found.fun, abs=1e-9)


def test_two_blocks_is_least_at_the_equilibrium_of_relu_layers() -> None:
    layer, x = opteq([14, 6], 8, "relu", alpha=[0.5, 1.0], batch=50)
    problem = objective(layer, x)
    z1, z0 = problem.blocks(layer(x).detach())
    least = problem.two_blocks(z1, z0)
    domain = reference(layer, x)[1].prox(normal(50, 8)).detach()
    for other in (
        (z1 + 0.01 * normal(50, 8), z0),
        (z1, 0.99 * z0 + 0.01 * domain),
        (normal(50, 8), domain),
    ):
        assert (problem.two_blocks(*other) >= least - 1e-12).all()
        assert (
            problem.two_blocks(*other) > least + 1e-9
        ).sum() >= 40  # a state of zeros may be among the others, too


def test_two_blocks_refuses_other_numbers_of_layers() -> None:
    layer, x = opteq([3, 4, 5], 6)
    with pytest.raises(
        ValueError,
        match=(
            r"must be asked of two layers without a regulariser; got 3 layers, whose blocks "
            r"minimise no"
        ),
    ):
        objective(layer, x).two_blocks(normal(3, 6), normal(3, 6))
    layer, x = opteq([3, 4], 6)
    with pytest.raises(ValueError, match="got 2 layers and a regulariser"):
        objective(around(Regularized(layer.layers, "l2")), x).two_blocks(normal(3, 6), normal(3, 6))


@pytest.mark.parametrize("name", ["relu", "tanh"])
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [1.0, 0.3, 0.6]], ids=str)
def test_blocks_tend_to_the_wide_limit_at_first_order_in_alpha(
    name: str, weights: list[float]
) -> None:
    """OptEq, Theorem 3, with the wide network solved by SciPy.

    Fractions that differ enter with their weights.
    """
    sizes = np.array([0.1, 0.03, 0.01, 0.003, 0.001])
    layer, x = opteq([7, 9, 5], 6, name, norm=0.8, alpha=0.5)
    mean = np.mean(weights)
    limits = []
    for row in range(3):

        def h(y: np.ndarray, row=row) -> tuple[float, np.ndarray]:
            value, slope = 0.0, np.zeros(6)
            for place, weight in enumerate(weights):
                W, c = arrays(layer, x, place)
                a = W @ y + c[row]
                value += weight / mean * (y @ y / 2 - POTENTIAL[name](a).sum())
                slope = slope + weight / mean * (y - W.T @ ACTIVATION[name](a))
            return value, slope

        found = minimize(h, np.zeros(6), jac=True, method="BFGS", options={"gtol": 1e-11})
        limits.append((found.x, found.fun))
    y = torch.from_numpy(np.stack([point for point, _ in limits]))
    distances = []
    for size in sizes:
        layer.layers.fixed_alpha, layer.layers.shared_alpha = (
            tuple(size * weight for weight in weights),
            False,
        )
        problem = objective(layer, x)
        blocks = problem.blocks(layer(x).detach())
        assert problem.inclusion(blocks).max() <= 1e-9
        distances.append(max(float((block - y).norm()) for block in blocks))
        limit = problem.wide_limit(y)
        assert limit.residual.max() <= 1e-6
        assert limit.value == pytest.approx([value for _, value in limits], abs=1e-9)
    slope = np.polyfit(np.log(sizes), np.log(distances), 1)[0]
    assert 0.93 <= slope <= 1.07
    assert distances[-1] <= 1e-2


def test_wide_limit_is_the_joint_minimum_of_theorem_3() -> None:
    """sum_l phi_l(x_l) + |x_l - y|^2/2 over all x_l, by SciPy at a fixed y."""
    mu = 1.2
    layer, x = opteq([4, 5], 6, "tanh", mu=mu, alpha=0.2)
    problem, y = objective(layer, x), normal(3, 6)
    for row in range(3):
        total = 0.0
        for place in range(2):
            W, c = arrays(layer, x, place)
            own, near = Explicit("tanh", W, c[row], mu), y[row].numpy()

            def function(q: np.ndarray, own=own, near=near) -> tuple[float, np.ndarray]:
                gap = own.state(q) - near
                return own.phi(q) + gap @ gap / 2, own.slope(q) + own.pull(gap)

            options = {"ftol": 1e-16, "gtol": 1e-10}
            total += minimize(
                function,
                own.start(),
                jac=True,
                bounds=own.bounds(),
                method="L-BFGS-B",
                options=options,
            ).fun
        assert problem.wide_limit(y).value[row] == pytest.approx(total, abs=1e-9)


def big(layer, x: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """W~, c~ of the first sample and P of Lemma 3, as matrices."""
    pairs = [arrays(layer, x, place) for place in range(3)]
    m = pairs[0][0].shape[1]
    return (
        block_diag(*[W for W, _ in pairs]),
        np.concatenate([c[0] for _, c in pairs]),
        np.roll(np.eye(3 * m), m, axis=0),
    )


def test_blocks_solve_the_one_layer_equation() -> None:
    """OptEq v1, eq. 6 and 13, with the block matrices written out."""
    layer, x = opteq([7, 12, 5], 6, "relu", alpha=0.7)
    problem = objective(layer, x)
    blocks = problem.blocks(layer(x).detach())
    W, c, P = big(layer, x)
    flat = torch.cat([block[0] for block in blocks]).numpy()
    assert np.array_equal((P @ flat)[:6], blocks[-1][0].numpy())
    right = 0.7 * W.T @ np.maximum(W @ P @ flat + c, 0) + 0.3 * P @ flat
    assert np.abs(right - flat).max() <= 1e-11
    assert torch.cat([block[0] for block in problem.blockwise(blocks)]).numpy() == pytest.approx(
        right, abs=1e-12
    )
    other = [normal(3, 6) for _ in range(3)]
    flat = torch.cat([block[0] for block in other]).numpy()
    right = 0.7 * W.T @ np.maximum(W @ P @ flat + c, 0) + 0.3 * P @ flat
    assert torch.cat([block[0] for block in problem.blockwise(other)]).numpy() == pytest.approx(
        right, abs=1e-12
    )


def test_erratum_lemma_3_of_the_journal_version_lacks_the_permutation() -> None:
    """OptEq v3, eq. 7, prints s(W~ z~ + ...) for s(W~ P z~ + ...), which blocks do not solve."""
    layer, x = opteq([7, 12, 5], 6, "relu", alpha=0.7)
    flat = torch.cat([block[0] for block in objective(layer, x).blocks(layer(x).detach())]).numpy()
    W, c, P = big(layer, x)
    printed = 0.7 * W.T @ np.maximum(W @ flat + c, 0) + 0.3 * P @ flat
    right = 0.7 * W.T @ np.maximum(W @ P @ flat + c, 0) + 0.3 * P @ flat
    assert np.abs(printed - flat).max() >= 1e-2
    assert np.abs(right - flat).max() <= 1e-11


@pytest.mark.parametrize("operation", ["gradient", "prox"])
def test_erratum_a_regulariser_joins_the_first_row_of_the_inclusion_not_the_last(
    operation: str,
) -> None:
    """OptEq v3, after Theorem 4, has T o T_R minimise with Phi + R(z_L).

    Then grad R would stand in the row of the last block.

    The rows are written out with autograd's gradient of R or of its envelope, and inverses of the
    layers by SciPy's root finder.
    """
    from scipy.optimize import root

    plain, x = opteq([7, 6, 8], 5, "tanh", alpha=0.6)
    layer = around(Regularized(plain.layers, "l2", 0.5, operation))
    problem = objective(layer, x)
    z = layer(x).detach()
    blocks = problem.blocks(z)
    gradient = (0.5 if operation == "gradient" else 0.5 / 1.5) * z.numpy()[
        0
    ]  # of gamma R, or of its Moreau envelope
    rows = []
    for place in range(3):
        W, c = arrays(plain, x, place)
        own, before = blocks[place][0].numpy(), blocks[place - 1][0].numpy()

        def F(y: np.ndarray, W=W, c=c[0], own=own) -> np.ndarray:  # noqa: N802
            return 0.6 * W.T @ np.tanh(W @ y + c) + 0.4 * y - own

        inverse = root(F, own, tol=1e-13).x
        rows.append(inverse - own + (own - before))  # dPhi_l(z_l) + ((I - P) z~)_l
    assert np.abs(rows[0] + gradient).max() <= 1e-9
    assert np.abs(rows[1]).max() <= 1e-9
    assert np.abs(rows[2]).max() <= 1e-9
    assert np.abs(rows[2] + gradient).max() >= 1e-2
    assert problem.inclusion(blocks).max() <= 1e-10
    assert problem.inclusion(perturbed(blocks, 1)).min() >= 1e-4
    assert objective(plain, x).inclusion(blocks).min() >= 1e-2
    expected = (
        0.25 * z.square().sum(dim=1)
        if operation == "gradient"
        else 0.5 / 1.5 / 2 * z.square().sum(dim=1)
    )
    assert problem.regularization(z) == pytest.approx(expected)


def test_a_proximal_map_is_one_more_layer_with_a_block_of_its_own() -> None:
    """gamma R joins Phi at the block T_R(z_0).

    Its row z_R - z_0 + gamma grad R(z_R) vanishes, with R = |z|_1 smooth off zero.
    """
    plain, x = opteq([7, 6], 5, "tanh", alpha=0.6)
    layer = around(Regularized(plain.layers, "l1", 0.01, "prox"))
    z = layer(x).detach()
    own = z - z.clamp(-0.01, 0.01)
    there = own != 0
    assert there.any()
    assert (own - z + 0.01 * own.sign())[there].abs().max() <= 1e-12
    first = reference(plain, x)[0].step(own).detach()
    assert objective(layer, x).blocks(z)[0] == pytest.approx(first, abs=1e-12)


def test_deep_changes_of_variable_and_skips_are_read() -> None:
    plain, x = opteq([7, 6, 8], 5, "tanh", alpha=0.6)
    layer = around(
        Skip(
            ChangeOfVariable(
                plain.layers, matrix=normal(5, 5) + 3 * torch.eye(5).double(), shift=0.5
            ),
            0.5,
        )
    )
    problem = objective(layer, x)
    z = layer(x).detach()
    blocks = problem.blocks(z)
    assert blocks[-1] == pytest.approx(plain(x).detach(), abs=1e-9)
    assert problem.inclusion(blocks).max() <= 1e-9


def test_inclusion_of_convolutions() -> None:
    layer = OptEqConv2d(
        2, 3, [4, 5], 3, "relu", [0.8, 0.5], solver="newton", tolerance=1e-12, max_steps=500
    ).double()
    x = normal(2, 2, 5, 4)
    problem = objective(layer, x)
    blocks = problem.blocks(layer(x).detach())
    assert [block.shape for block in blocks] == [(2, 3, 5, 4)] * 2
    assert problem.inclusion(blocks).max() <= 1e-10
    assert problem.inclusion(perturbed(blocks, 0)).min() >= 1e-4
    least = problem.two_blocks(*blocks)
    assert (problem.two_blocks(*perturbed(blocks, 1)) > least).all()


def test_deep_objective_refuses_what_does_not_fit() -> None:
    layer, x = opteq([3, 4, 5], 6)
    problem = objective(layer, x)
    with pytest.raises(
        ValueError, match=r"DeepObjective\.blocks must be 3, one for each layer; got 2"
    ):
        problem.value([normal(3, 6)] * 2)
    with pytest.raises(ValueError, match=r"states of shape \(3, 6\); got \(3, 5\)"):
        problem.inclusion([normal(3, 6), normal(3, 5), normal(3, 6)])
    with pytest.raises(ValueError, match=r"without a regulariser, whose step would not shrink"):
        objective(around(Regularized(layer.layers, "l2")), x).wide_limit(normal(3, 6))
    assert problem.regularization(normal(3, 6)).tolist() == [0, 0, 0]


def test_describe_says_which_problem_the_blocks_solve() -> None:
    layer, x = opteq([3, 4], 6, norm=0.9, alpha=[0.5, 0.6])
    text = objective(layer, x).describe()
    assert "The 2 blocks" in text
    assert "alpha = 0.5, 0.6" in text
    assert "the pair (z_1, z_0) minimises Phi + |z_1 - z_0|^2/2" in text
    assert (
        "contract by a factor of 0.802: the equilibrium is unique" in text
    )  # (0.5 0.81 + 0.5) (0.6 0.81 + 0.4)
    text = objective(around(Regularized(layer.layers, "l1", 0.2)), x).describe()
    assert "The proximal map of 0.2 |z|_1 stands before the first layer." in text
