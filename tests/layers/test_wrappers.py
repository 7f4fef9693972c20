import re

import pytest
import torch

from equipoise import Equilibrium, Stop
from equipoise.families.opteq import OptEq
from equipoise.layers import ChangeOfVariable, Regularized, Skip
from equipoise.prox import is_proximal

STOP = Stop(tolerance=1e-13, max_steps=1000)
X = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def cell(hidden=5, alpha=1.0, activation="relu"):
    torch.manual_seed(1)
    layer = OptEq(3, 4, hidden, activation, alpha).double()
    layer.layers.operators[0].scale_(1.6)
    return layer.layers


def solve(changed):
    return Equilibrium(changed, stop=STOP, on_failure="raise")(X)


def test_skip_keeps_the_equilibrium():
    assert torch.allclose(solve(Skip(cell(), 0.3)), solve(cell()), atol=1e-11)


def test_skip_is_a_proximal_map_again():
    layer = Equilibrium(Skip(cell(activation="tanh"), 0.3))
    f = layer.map(X[:1])
    assert is_proximal(f, torch.randn(5, 4, dtype=torch.float64)).proximal
    assert layer.cell.symmetric


def test_skip_makes_plain_iteration_of_a_nonexpansive_map_converge():
    class Turn(type(cell())):
        """A rotation by a quarter turn, on which plain iteration runs in circles."""

        def __init__(self):
            torch.nn.Module.__init__(self)

        def inject(self, x):
            return x

        def initial(self, x, context):
            return x

        def step(self, z, context):
            return torch.stack([-z[:, 1], z[:, 0]], dim=1)

        def lipschitz(self):
            return 1.0

        linearize = type(cell()).__mro__[1].linearize

    x = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    plain = Equilibrium(Turn(), "fixed_point", on_failure="ignore", max_steps=200)
    plain(x)
    assert not plain.last.converged.any()
    skipped = Equilibrium(
        Skip(Turn(), 0.5),
        "fixed_point",
        on_failure="raise",
        stop=Stop(1e-4, absolute=1e-8, max_steps=200),
    )
    assert skipped(x).norm() < 1e-7


def test_change_of_variable_moves_the_equilibrium_by_its_inverse():
    torch.manual_seed(2)
    Q = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0]
    A = torch.randn(4, 4, dtype=torch.float64) + 3 * torch.eye(4)
    shift = torch.randn(4, dtype=torch.float64)
    z = solve(cell())
    for options in (
        {"shift": shift},
        {"scale": -2.5},
        {"matrix": Q},
        {"matrix": Q, "scale": 0.5, "shift": shift},
        {"matrix": A},
    ):
        changed = ChangeOfVariable(cell(), **options)
        matrix = options.get("matrix", torch.eye(4, dtype=torch.float64))
        y = solve(changed)
        assert torch.allclose(
            options.get("scale", 1.0) * y @ matrix.T + options.get("shift", 0.0), z, atol=1e-10
        )
        assert torch.allclose(changed.invert(changed.change(y)), y)


def test_change_of_variable_declares_symmetry_for_rotations_only():
    torch.manual_seed(2)
    Q = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0]
    A = torch.randn(4, 4, dtype=torch.float64) + 3 * torch.eye(4)
    for matrix, symmetric in ((Q, True), (2 * Q, True), (A, False)):
        changed = ChangeOfVariable(cell(activation="tanh"), matrix=matrix, scale=1.5, shift=0.3)
        f = Equilibrium(changed).map(X[:1])
        jacobian = torch.autograd.functional.jacobian(
            f, torch.randn(1, 4, dtype=torch.float64)
        ).reshape(4, 4)
        assert changed.symmetric == symmetric == torch.allclose(jacobian, jacobian.T, atol=1e-10)
        assert torch.linalg.matrix_norm(jacobian, 2) <= changed.lipschitz() * (1 + 1e-9)


def test_change_of_variable_gives_gradients_to_the_cell():
    changed = ChangeOfVariable(cell(), scale=2.0, shift=0.3)
    solve(changed).sum().backward()
    gradients = [parameter.grad.clone() for parameter in changed.parameters()]
    changed.zero_grad()
    ((solve(changed.cell) - 0.3) / 2).sum().backward()
    for found, parameter in zip(gradients, changed.parameters(), strict=True):
        assert torch.allclose(found, parameter.grad, atol=1e-9)


def test_regularized_solves_the_changed_equation():
    for name, strength in (("l2", 0.5), ("l1", 0.05)):
        plain = cell()
        z = solve(Regularized(plain, name, strength))
        y = z / (1 + strength) if name == "l2" else z.sign() * (z.abs() - strength).clamp_min(0)
        assert torch.allclose(Equilibrium(plain).map(X)(y), z, atol=1e-11)
    z = solve(Regularized(plain, "l2", 0.5, "gradient"))
    assert torch.allclose(Equilibrium(plain).map(X)(z / 2), z, atol=1e-11)


def test_regularizers_shrink_features_as_their_strength_grows():
    sizes = [solve(Regularized(cell(), "l2", strength)).norm() for strength in (0.01, 1.0, 10.0)]
    assert sizes[0] > 1.05 * sizes[1] > 1.1 * sizes[2]
    # A layer's output lies in the range of W^T, so the l1 norm falls but exact zeros come out of
    # T_R, not of the layer.
    sizes = [
        solve(Regularized(cell(), "l1", strength)).abs().sum() for strength in (0.01, 0.15, 0.5)
    ]
    assert sizes[0] > sizes[1] > sizes[2]


def test_regularized_by_a_function_equals_the_regularizer_it_is():
    def half_square(z):
        return z.square().sum(dim=1) / 2

    own = solve(Regularized(cell(), half_square, 0.4))
    assert torch.allclose(own, solve(Regularized(cell(), "l2", 0.4, "gradient")), atol=1e-11)


def test_coupled_regularizers_make_the_batch_one_problem():
    changed = Regularized(cell(), "decorrelation", 0.05)
    assert changed.coupled
    layer = Equilibrium(changed, stop=STOP, on_failure="raise")
    z = layer(X)
    assert layer.last.status.shape == (1,)
    assert torch.allclose(layer.map(X)(z), z, atol=1e-11)
    assert not torch.allclose(layer(X[:3]), z[:3], atol=1e-6)


def test_changes_compose():
    layered = Regularized(Skip(ChangeOfVariable(cell(), scale=2.0, shift=0.1), 0.7), "l2", 0.3)
    z = solve(layered)
    y = z / 1.3
    inner = Equilibrium(cell()).map(X)
    assert torch.allclose(0.7 * (inner(2 * y + 0.1) - 0.1) / 2 + 0.3 * y, z, atol=1e-11)


def test_opteq_takes_a_regularizer_by_name_object_or_function():
    layer = OptEq(3, 4, [5, 6], regularizer="l2", strength=0.5)
    assert isinstance(layer.cell, Regularized)
    assert layer.layers is layer.cell.cell
    layer(torch.randn(2, 3)).sum().backward()
    assert layer.last.adjoint.converged.all()


def test_module_apply_still_initialises():
    seen = []
    ChangeOfVariable(cell(), scale=2.0).apply(seen.append)
    assert len(seen) > 2


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Skip(cell(), 0), "Skip.alpha must be in (0, 1]; got 0."),
        (lambda: Skip(torch.nn.Linear(2, 2), 0.5), "Skip.cell must be a Cell; got Linear."),
        (
            lambda: ChangeOfVariable(cell(), scale=0),
            "ChangeOfVariable.scale must not be 0; got 0.",
        ),
        (
            lambda: ChangeOfVariable(cell(), matrix=torch.ones(2, 3)),
            "ChangeOfVariable.matrix must be square; got shape (2, 3).",
        ),
        (
            lambda: ChangeOfVariable(cell(), matrix=torch.ones(2, 2)),
            "ChangeOfVariable.matrix must be invertible; got singular values from 2 down to ",
        ),
        (
            lambda: ChangeOfVariable(cell(), matrix=torch.full((2, 2), torch.nan)),
            "ChangeOfVariable.matrix must be a tensor of finite floating-point numbers; got ",
        ),
        (
            lambda: solve(ChangeOfVariable(cell(), matrix=torch.eye(3, dtype=torch.float64))),
            "ChangeOfVariable.matrix must fit states of shape (batch, m); got (3, 3) for a "
            "state of shape (6, 4).",
        ),
        (
            lambda: solve(ChangeOfVariable(cell(), shift=torch.ones(3, dtype=torch.float64))),
            "ChangeOfVariable.shift must have the shape of one state, (4,); got (3,).",
        ),
        (
            lambda: solve(Regularized(cell(), lambda z: (z - z.mean(0)).square().sum(1), 0.3)),
            "Custom.function must treat each sample for itself; got one whose gradient for a "
            "sample depends on the others. "
            "Use Custom(function, coupled=True), with one number for the whole batch.",
        ),
        (
            lambda: Regularized(cell(), "l2", 0),
            "Regularized.strength must be a positive number; got 0.",
        ),
        (
            lambda: Regularized(cell(), "decorrelation", 0.1, "prox"),
            "Regularized.operation must be 'gradient' for Decorrelation, which has no "
            "proximal map; got 'prox'.",
        ),
        (
            lambda: Regularized(cell(), "l3"),
            "regularizer must be one of decorrelation, hsic, incay, l1, l2, nuclear, tv; got 'l3'.",
        ),
    ],
)
def test_bad_changes_get_one_sentence(make, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        make()
