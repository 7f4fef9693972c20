"""Every mistake is answered by one clear sentence."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from cells import AffineCell, CoupledCell, TanhCell
from torch import Tensor, nn

from equipoise import (
    GMRES,
    Anderson,
    BiCGStab,
    Broyden,
    Cell,
    ConjugateGradient,
    ConvergenceError,
    ConvergenceWarning,
    Equilibrium,
    FixedPoint,
    Implicit,
    Neumann,
    Newton,
    Phantom,
    Shared,
    Status,
    Stop,
    Unrolled,
    solve,
)

FLOAT = torch.float64


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 3, dtype=FLOAT)


class Stepping(TanhCell):
    """A cell whose step is given."""

    def __init__(self, step: Any) -> None:
        super().__init__()
        self.made = step

    def step(self, z: Tensor, context: Any) -> Any:
        return self.made(z)


# steps that return the wrong thing

SHAPE = r"Cell.step must return the shape of its state; got {} for a state of shape \(batch, 4\)\."
TREE = r"Cell.step must return the tree of its state; got another nesting or number of tensors\."


@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        pytest.param(lambda z: z[:, :2], SHAPE.format(r"\(5, 2\)"), id="narrow"),
        pytest.param(lambda z: z[:, :, None], SHAPE.format(r"\(5, 4, 1\)"), id="deep"),
        pytest.param(lambda z: z.sum(dim=1), SHAPE.format(r"\(5,\)"), id="flat"),
        pytest.param(lambda z: z.sum(), SHAPE.format(r"\(\)"), id="scalar"),
        pytest.param(
            lambda z: z.mean(dim=0, keepdim=True) + 1, r"Cell.step must .*; got .*1", id="one row"
        ),
        pytest.param(lambda z: z[:2] + 1, r"Cell.step must .*; got .*2", id="few rows"),
        pytest.param(
            lambda z: torch.cat([z, z]) + 1, r"Cell.step must .*; got .*10", id="more rows"
        ),
        pytest.param(
            lambda z: z.float(),
            r"Cell.step must keep the dtype of its state; got torch.float32 for a state",
            id="dtype",
        ),
        pytest.param(
            lambda z: z.to("meta"),
            r"Cell.step must stay on the device of its state; got meta for",
            id="device",
        ),
        pytest.param(lambda z: (z, z), TREE, id="tuple"),
        pytest.param(lambda z: {"z": z}, TREE, id="dict"),
        pytest.param(lambda _: None, TREE, id="none"),
        pytest.param(
            lambda _: 3.0,
            r"Cell.step must be a tensor or a tuple, list or dict of tensors; got a float",
            id="number",
        ),
    ],
)
@pytest.mark.parametrize("solver", ["fixed_point", "anderson", "newton"])
def test_step_that_changes_the_state_is_refused(
    step: Any, sentence: str, solver: str, x: Tensor
) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}"):
        Equilibrium(Stepping(step), solver)(x)


def test_step_that_changes_a_tree_is_refused() -> None:
    z0 = (torch.zeros(4, 3), torch.zeros(4, 2))
    with pytest.raises(
        ValueError, match=r"^step must return the shape of its state; got \(4, 2\) for a state of"
    ):
        solve(lambda z: (z[1], z[0]), z0)
    with pytest.raises(ValueError, match=r"^step must return the tree of its state"):
        solve(lambda z: [z[0], z[1]], z0)


def test_coupled_step_that_drops_samples_is_refused(x: Tensor) -> None:
    class Dropping(CoupledCell):
        def step(self, z: Tensor, context: Tensor) -> Tensor:
            return z[:3]

    with pytest.raises(
        ValueError, match=r"^Cell.step must keep the batch size of a coupled state; got 3 for 5\."
    ):
        Equilibrium(Dropping())(x)


def test_cell_without_step_or_injection_is_refused(x: Tensor) -> None:
    class NoInject(Cell):
        def step(self, z: Tensor, context: Tensor) -> Tensor:
            return z

    class NoStep(Cell):
        def inject(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises((TypeError, ValueError, NotImplementedError), match="inject"):
        Equilibrium(NoInject())(x)
    with pytest.raises((TypeError, ValueError, NotImplementedError), match="step"):
        Equilibrium(NoStep())(x)


# inputs that are not finite


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("solver", ["fixed_point", "anderson", "broyden", "newton"])
def test_nonfinite_input_fails_alone_and_is_reported(bad: float, solver: str) -> None:
    x = torch.randn(5, 4, dtype=FLOAT)
    x[2, 0] = bad
    cell = AffineCell(torch.diag(torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=FLOAT)))
    layer = Equilibrium(cell, solver, tolerance=1e-10)
    sentence = (
        r"^Equilibrium: 1 of 5 samples met NaN or infinity \(worst relative residual .* after "
        r"\d+ steps\): "
        r"look for NaN or infinity in the input and the weights, bound the cell's growth, or "
        r"lower the learning rate\.$"
    )
    with pytest.warns(ConvergenceWarning, match=sentence) as caught:
        z = layer(x)
    assert len(caught) == 1
    others = [0, 1, 3, 4]
    assert layer.last.status[2] == Status.NONFINITE
    assert layer.last.converged[others].all()
    torch.testing.assert_close(z[others], cell.exact(x[others]), rtol=1e-8, atol=1e-9)
    with pytest.raises(ConvergenceError, match=sentence):
        Equilibrium(cell, solver, tolerance=1e-10, on_failure="raise")(x)


def test_nonfinite_input_leaves_the_input_gradient_of_others_alone() -> None:
    x = torch.randn(3, 3, dtype=FLOAT)
    x[1] = torch.nan
    x.requires_grad_()
    layer = Equilibrium(TanhCell(), tolerance=1e-10, on_failure="ignore")
    (found,) = torch.autograd.grad(layer(x).sum(), x)
    (wanted,) = torch.autograd.grad(layer(x[[0, 2]]).sum(), x)
    torch.testing.assert_close(found[[0, 2]], wanted[[0, 2]], rtol=1e-8, atol=1e-10)
    assert found[1].isnan().all()


def test_nonfinite_start_is_reported(x: Tensor) -> None:
    z0 = torch.zeros(5, 4, dtype=FLOAT)
    z0[0] = torch.nan
    layer = Equilibrium(TanhCell())
    with pytest.warns(ConvergenceWarning, match="1 of 5 samples met NaN or infinity"):
        layer(x, z0)
    assert layer.last.status.tolist() == [4, 0, 0, 0, 0]


def test_nonfinite_weights_are_reported(x: Tensor) -> None:
    cell = TanhCell()
    with torch.no_grad():
        cell.W[0, 0] = torch.nan
    with pytest.warns(ConvergenceWarning, match="5 of 5 samples met NaN or infinity"):
        Equilibrium(cell)(x)


# settings


@pytest.mark.parametrize("tolerance", [0, 0.0, -1e-3, float("nan"), float("inf")])
def test_tolerance_must_be_positive(tolerance: float) -> None:
    with pytest.raises(ValueError, match=r"^Stop.tolerance must be a positive number; got"):
        Equilibrium(TanhCell(), tolerance=tolerance)
    with pytest.raises(ValueError, match=r"^Stop.tolerance must be a positive number; got"):
        Stop(tolerance=tolerance)
    with pytest.raises(ValueError, match=r"^Implicit.tolerance must be a positive number; got"):
        Implicit(tolerance=tolerance)


@pytest.mark.parametrize("tolerance", ["1e-3", None])
def test_tolerance_must_be_a_number(tolerance: object) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^Stop.tolerance must be"):
        Stop(tolerance=tolerance)


@pytest.mark.parametrize("count", [0, -1, 2.5, True, "3", None])
def test_counts_must_be_whole_numbers(count: object) -> None:
    def refused(owner: str):
        return pytest.raises(
            ValueError, match=rf"^{owner} must be a whole number of at least 1; got {count!r}\.$"
        )

    with refused("Stop.max_steps"):
        Equilibrium(TanhCell(), max_steps=count)
    with refused("Stop.patience"):
        Stop(patience=count)
    with refused("Anderson.memory"):
        Anderson(memory=count)
    with refused("Broyden.memory"):
        Broyden(memory=count)
    with refused("GMRES.memory"):
        GMRES(memory=count)
    with refused("Newton.inner_steps"):
        Newton(inner_steps=count)
    with refused("Newton.halvings"):
        Newton(halvings=count)
    with refused("Phantom.steps"):
        Phantom(steps=count)
    with refused("Unrolled.steps"):
        Unrolled(steps=count)
    if count is not None:
        with refused("Stop.check_every"):
            Stop(check_every=count)
        with refused("Implicit.max_steps"):
            Implicit(max_steps=count)


@pytest.mark.parametrize("damping", [0, -0.5, 1.5, float("nan")])
def test_damping_must_be_a_fraction(damping: float) -> None:
    for made in (FixedPoint, Anderson, Phantom, Unrolled):
        with pytest.raises(
            ValueError, match=rf"^{made.__name__}.damping must be in \(0, 1\]; got {damping}\.$"
        ):
            made(damping=damping)


@pytest.mark.parametrize("forcing", [0, 1, -0.1, float("nan")])
def test_newton_forcing_must_be_a_fraction(forcing: float) -> None:
    with pytest.raises(ValueError, match=rf"^Newton.forcing must be in \(0, 1\); got {forcing}\.$"):
        Newton(forcing=forcing)


def test_stop_refuses_other_nonsense() -> None:
    for absolute in (-1.0, float("nan"), float("inf")):
        with pytest.raises(
            ValueError,
            match=rf"^Stop.absolute must be zero or a positive number; got {absolute}\.$",
        ):
            Stop(absolute=absolute)
    for growth in (1, 0.5, float("nan")):
        with pytest.raises(
            ValueError, match=rf"^Stop.growth must be in \(1, inf\]; got {growth}\.$"
        ):
            Stop(growth=growth)


def test_stop_and_its_parts_are_not_given_together() -> None:
    with pytest.raises(ValueError, match="stop"):
        Equilibrium(TanhCell(), tolerance=1e-8, stop=Stop(max_steps=10))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"solver": "andersen"},
            r"^solver must be one of accelerated, .*, auto, .*; got 'andersen'\. Did you mean "
            r"'anderson'\?$",
        ),
        ({"solver": "autos"}, r"^solver must be one of .*; got 'autos'\. Did you mean 'auto'\?$"),
        ({"solver": ""}, r"^solver must be one of .*; got ''\.$"),
        ({"solver": 3}, r"^solver must be a name or a Solver; got int\.$"),
        ({"solver": None}, r"^solver must be a name or a Solver; got NoneType\.$"),
        (
            {"solver": Anderson},
            r"^solver must be a name or an object; got the class Anderson\. Write Anderson\(\)\.$",
        ),
        ({"solver": Implicit()}, r"^solver must be a name or a Solver; got Implicit\.$"),
        (
            {"gradient": "implict"},
            r"^gradient must be one of .*implicit, .*; got 'implict'\. Did you mean 'implicit'\?$",
        ),
        (
            {"gradient": Implicit},
            r"^gradient must be a name or an object; got the class Implicit\. Write "
            r"Implicit\(\)\.$",
        ),
        ({"gradient": Anderson()}, r"^gradient must be a name or a Gradient; got Anderson\.$"),
        (
            {"on_failure": "wran"},
            r"^on_failure must be one of ignore, raise, warn; got 'wran'\. Did you mean 'warn'\?$",
        ),
        ({"on_failure": None}, r"^on_failure must be one of ignore, raise, warn; got None\.$"),
    ],
)
def test_wrong_choices_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Equilibrium(TanhCell(), **options)


def test_wrong_adjoint_solver_is_refused_at_once() -> None:
    with pytest.raises(
        ValueError, match=r"^solver must be one of .*; got 'gmers'\. Did you mean 'gmres'\?$"
    ):
        Implicit(solver="gmers")
    with pytest.raises(ValueError, match=r"got the class GMRES\. Write GMRES\(\)\.$"):
        Implicit(solver=GMRES)


@pytest.mark.parametrize("name", ["tol", "max_iter", "b_solver", "f_solver", "kwargs"])
def test_unknown_keywords_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        Equilibrium(TanhCell(), **{name: 1})


@pytest.mark.parametrize("cell", [nn.Linear(3, 3), TanhCell, lambda z: z, None])
def test_cell_must_be_a_cell(cell: Any) -> None:
    sentence = (
        rf"^Equilibrium.cell must be a Cell; got {type(cell).__name__}\. (For a plain "
        rf"function|Write TanhCell\(...\)).*\.$"
    )
    with pytest.raises(ValueError, match=sentence):
        Equilibrium(cell)


# contexts and starts


def test_context_must_be_batch_first() -> None:
    class Turned(AffineCell):
        def inject(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, self.A

        def initial(self, x: Tensor, context: Any) -> Tensor:
            return torch.zeros_like(x)

    sentence = (
        r"^State and context must be batch first with one batch size; got a state of 5 "
        r"samples .* \(3, 3\)\. .* in Shared\.$"
    )
    with pytest.raises(ValueError, match=sentence):
        Equilibrium(Turned(torch.zeros(3, 3)))(torch.randn(5, 3))
    with pytest.raises(ValueError, match=r"a context of shape \(\)\."):
        solve(lambda z, c: z * c, torch.zeros(5, 3), context=torch.tensor(0.5))


def test_context_must_be_a_tree_of_tensors_and_constants() -> None:
    class Wrong(TanhCell):
        def inject(self, x: Tensor) -> Any:
            return (x, {1, 2})

    with pytest.raises(
        ValueError, match=r"^Cell.inject must be a tensor or a tuple, .*; got a set inside it\.$"
    ):
        Equilibrium(Wrong())(torch.randn(5, 3))


@pytest.mark.parametrize(
    "context", [lambda x: (x, x), lambda x: {"x": x}, lambda x: [x], lambda x: (x, Shared(x))]
)
def test_start_must_be_defined_for_a_tree_of_contexts(context: Any, x: Tensor) -> None:
    class Many(TanhCell):
        def inject(self, x: Tensor) -> Any:
            return context(x)

    with pytest.raises(
        ValueError,
        match=r"^Many.initial must be defined when inject returns more than one tensor\.$",
    ):
        Equilibrium(Many())(x)


def test_start_of_another_batch_is_refused(x: Tensor) -> None:
    with pytest.raises(
        ValueError,
        match=r"got a state of 4 samples and a context of shape \(5, 4\)\.",
    ):
        Equilibrium(TanhCell())(x, torch.zeros(4, 4, dtype=FLOAT))


def test_start_on_another_device_is_refused(x: Tensor) -> None:
    with pytest.raises(
        ValueError, match=r"^The state must be on the device of the context; got meta and cpu\.$"
    ):
        Equilibrium(TanhCell())(x, torch.zeros(5, 4, dtype=FLOAT, device="meta"))


def test_start_of_another_dtype_is_refused(x: Tensor) -> None:
    class Adding(TanhCell):
        def step(self, z: Tensor, context: Tensor) -> Tensor:
            return 0.5 * z + context

    with pytest.raises(
        ValueError,
        match=r"^Cell.step must keep the dtype of its state; got torch.float64 for a state",
    ):
        Equilibrium(Adding())(x, torch.zeros(5, 4))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_state_must_be_floating_point(dtype: torch.dtype, x: Tensor) -> None:
    sentence = rf"^The state must be float32, float64, complex64 or complex128; got {dtype}\."
    with pytest.raises(ValueError, match=sentence):
        Equilibrium(TanhCell())(x, torch.zeros(5, 4, dtype=dtype))
    with pytest.raises(ValueError, match=sentence):
        solve(lambda z: z, torch.zeros(5, 4, dtype=dtype))


@pytest.mark.parametrize("start", [None, (), "text", torch.tensor(1.0), 3.0])
def test_start_of_solve_must_be_a_batch(start: Any) -> None:
    with pytest.raises(ValueError, match=r"^The state must (hold at least one tensor|be)"):
        solve(lambda z: z, start)


# solvers in the wrong place


@pytest.mark.parametrize(
    "solver", [GMRES(), BiCGStab(), Neumann(), ConjugateGradient()], ids=lambda s: type(s).__name__
)
def test_linear_solver_is_refused_forward(solver: Any, x: Tensor) -> None:
    sentence = (
        rf"^solver {type(solver).__name__} solves linear equations only; got a nonlinear map\. "
        r"Use it for the adjoint, Implicit\(solver=\.\.\.\), and another one for the forward "
        r"solve\.$"
    )
    with pytest.raises(ValueError, match=sentence):
        Equilibrium(TanhCell(), solver)(x)


def test_symmetric_solvers_are_refused_for_other_cells(x: Tensor) -> None:
    def sentence(name: str) -> str:
        return (
            rf"^solver {name} needs a symmetric positive semidefinite Jacobian; the cell does "
            rf"not declare it\. "
            r"Set symmetric = True on the cell if it holds, or take another solver\.$"
        )

    with pytest.raises(ValueError, match=sentence("Accelerated")):
        Equilibrium(TanhCell(), "accelerated")(x)
    z = Equilibrium(TanhCell(), gradient=Implicit("conjugate_gradient"))(x)
    with pytest.raises(ValueError, match=sentence("ConjugateGradient")):
        z.sum().backward()


def test_refusals_come_without_warnings(x: Tensor) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(ValueError, match="Accelerated"):
            Equilibrium(TanhCell(), "accelerated")(x)
    assert caught == []


@pytest.mark.parametrize(
    "change", [lambda z, c: z.mul_(0.5).add_(c), lambda z, c: torch.tanh(0.5 * z + c.add_(0.1))]
)
def test_step_that_writes_in_place_is_refused(change) -> None:
    with pytest.raises(ValueError, match=r"^A step must not change its state or context in place"):
        solve(change, torch.zeros(3, 2), context=torch.ones(3, 2))

    class Writing(TanhCell):
        def step(self, z: Tensor, context: Tensor) -> Tensor:
            return change(z, context)

    with (
        pytest.raises(ValueError, match=r"^A step must not change its state or context in place"),
        torch.no_grad(),
    ):
        Equilibrium(Writing())(torch.randn(5, 3, dtype=FLOAT))


def test_batch_normalisation_needs_a_coupled_cell() -> None:
    class Normed(TanhCell):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(4, dtype=FLOAT)

        def step(self, z: Tensor, context: Tensor) -> Tensor:
            return 0.1 * self.norm(super().step(z, context))

    x = torch.randn(5, 3, dtype=FLOAT)
    layer = Equilibrium(Normed())
    with pytest.raises(
        ValueError, match=r"^Normed.coupled must be True for a step with batch normalisation in "
    ):
        layer(x)
    assert layer.eval()(x).shape == (5, 4)
    coupled = Normed()
    coupled.coupled = True
    assert Equilibrium(coupled)(x).shape == (5, 4)
