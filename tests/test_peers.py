"""Failings seen in other libraries, each as a test that this one passes."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings

import pytest
import torch
from cells import AffineCell, GrowingCell, ScaledCell, TanhCell, bounded, unroll
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import equipoise
from equipoise import (
    GMRES,
    Accelerated,
    Anderson,
    BiCGStab,
    Broyden,
    Cell,
    ConjugateGradient,
    ConvergenceWarning,
    Equilibrium,
    FixedPoint,
    Implicit,
    JacobianFree,
    Neumann,
    Newton,
    Phantom,
    Shared,
    Status,
    Stop,
    Unrolled,
    flush_denormals,
    frobenius_penalty,
    solve,
    spectral_radius,
)
from equipoise.solvers import Solver

compiling = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 3, dtype=torch.float64, requires_grad=True)


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# second derivatives


@pytest.mark.parametrize("solver", ["fixed_point", "anderson", "broyden", "newton"])
def test_second_derivatives_are_right(solver: str, x: Tensor) -> None:
    layer = Equilibrium(TanhCell(), solver=solver, tolerance=1e-12)
    assert torch.autograd.gradgradcheck(layer, (x,))

    def hessian(function) -> Tensor:
        return torch.autograd.functional.hessian(
            lambda u: function(u[None]).square().sum(), x[0].detach()
        )

    torch.testing.assert_close(
        hessian(layer), hessian(lambda u: unroll(layer.cell, u)), rtol=1e-8, atol=1e-10
    )


def test_mixed_second_derivatives_reach_the_weights(x: Tensor) -> None:
    layer = Equilibrium(TanhCell(), tolerance=1e-12)
    weights = list(layer.parameters())

    def slope_of_the_input_gradient(z: Tensor) -> tuple[Tensor, ...]:
        (first,) = torch.autograd.grad(z.square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), weights)

    found = slope_of_the_input_gradient(layer(x))
    wanted = slope_of_the_input_gradient(unroll(layer.cell, x))
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)


# the gradient and the moment of stopping


def test_gradient_does_not_depend_on_when_the_solve_stops(x: Tensor) -> None:
    cell = TanhCell()
    exact = unroll(cell, x)
    wanted = torch.autograd.grad(exact.square().sum(), [x, *cell.parameters()])
    starts = [exact.detach(), torch.zeros_like(exact), 10 * torch.ones_like(exact)]
    steps = []
    for start in starts:
        for max_steps in (100, 1000):
            for solver in ("fixed_point", "anderson", "broyden", "newton"):
                layer = Equilibrium(cell, solver=solver, tolerance=1e-11, max_steps=max_steps)
                z = layer(x, start)
                steps.append(int(layer.last.steps.max()))
                found = torch.autograd.grad(z.square().sum(), [x, *cell.parameters()])
                torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-9)
    assert min(steps) == 0
    assert max(steps) > 10


def test_gradient_of_early_and_late_samples_is_equally_right() -> None:
    rates = torch.tensor([0.0, 0.1, 0.5, 0.95], dtype=torch.float64)
    x = torch.cat([torch.randn(4, 3, dtype=torch.float64), rates[:, None]], dim=1).requires_grad_()
    z = Equilibrium(ScaledCell(), solver="fixed_point", tolerance=1e-12, max_steps=1000)(x)
    (found,) = torch.autograd.grad(z.sum(), x)
    torch.testing.assert_close(found[:, :3], (1 / (1 - rates))[:, None].expand(4, 3))


# samples that are not finite


@pytest.mark.parametrize("solver", ["fixed_point", "anderson", "broyden", "newton"])
def test_nonfinite_sample_keeps_best_iterate_and_spares_its_batch_mates(solver: str) -> None:
    x = torch.full((4, 3), 0.5, dtype=torch.float64)
    x[2] = torch.inf
    x[0] *= 0.3
    z0 = torch.full_like(x, 0.2)
    layer = Equilibrium(GrowingCell(), solver=solver, tolerance=1e-10, on_failure="ignore")
    z = layer(x, z0)
    assert layer.last.status.tolist() == [
        Status.CONVERGED,
        Status.CONVERGED,
        Status.NONFINITE,
        Status.CONVERGED,
    ]
    assert z.isfinite().all()
    mates = [0, 1, 3]
    torch.testing.assert_close(z[mates], layer(x[mates], z0[mates]), rtol=1e-14, atol=0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_sample_that_turns_nonfinite_returns_its_best_finite_iterate(bad: float) -> None:
    edge = torch.tensor([[0.0], [0.2]], dtype=torch.float64)
    start = torch.tensor([[1.0], [1.0]], dtype=torch.float64)
    stop = Stop(tolerance=1e-6, absolute=1e-6)
    solution = solve(
        lambda z, c: torch.where(z > c, z / 2, bad), start, "fixed_point", stop, context=edge
    )
    assert solution.status.tolist() == [Status.CONVERGED, Status.NONFINITE]
    assert solution.value[1] == 0.25  # the map is finite there and not at the next iterate, 0.125
    assert solution.residual[1] == 1.0
    assert solution.value[0] < 1e-5


def test_nonfinite_sample_is_never_called_converged() -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = torch.tensor([[bad, 0.0], [1.0, 2.0]], dtype=torch.float64)
        for solver in ("fixed_point", "anderson", "broyden", "newton"):
            solution = solve(lambda z, c: 0.5 * z + c, torch.zeros_like(x), solver, context=x)
            assert solution.status.tolist() == [Status.NONFINITE, Status.CONVERGED]
            torch.testing.assert_close(solution.value[1], 2 * x[1], rtol=1e-3, atol=0)


# few steps


@pytest.mark.parametrize("solver", ["fixed_point", "anderson", "broyden", "newton"])
@pytest.mark.parametrize("max_steps", [1, 2, 3, 4, 7])
def test_anderson_and_all_others_run_for_every_max_steps(
    solver: str, max_steps: int, x: Tensor
) -> None:
    cell = TanhCell(norm=0.9)
    layer = Equilibrium(
        cell, solver=solver, tolerance=1e-15, max_steps=max_steps, on_failure="ignore"
    )
    z = layer(x)
    context = cell.inject(x)
    f = cell.step(z, context)
    residual = (f - z).norm(dim=1) / f.norm(dim=1)
    torch.testing.assert_close(layer.last.residual, residual.detach(), rtol=1e-6, atol=1e-12)
    assert layer.last.steps.max() <= max_steps
    assert (z != 0).any()
    assert residual.max() < 0.95  # at the start, z = 0, it is 1


def test_anderson_with_one_step_is_one_plain_step(x: Tensor) -> None:
    cell = TanhCell()
    layer = Equilibrium(cell, solver="anderson", tolerance=1e-15, max_steps=1, on_failure="ignore")
    torch.testing.assert_close(layer(x), unroll(cell, x, 1), rtol=0, atol=0)


# one slow sample


@pytest.mark.parametrize("solver", ["fixed_point", "anderson", "broyden"])
def test_straggler_does_not_make_others_run(solver: str) -> None:
    x = torch.randn(64, 4, dtype=torch.float64)
    x[:, -1] = 0.2
    x[7, -1] = 0.999
    cell = ScaledCell()
    layer = Equilibrium(cell, solver=solver, tolerance=1e-8, max_steps=20000)
    layer(x)
    steps = layer.last.steps
    others = torch.arange(64) != 7
    assert layer.last.converged.all()
    assert steps[others].max() <= 20
    # The 64 are a last look at the whole batch.
    assert cell.rows <= 64 * (int(steps[others].max()) + 1) + int(steps[7]) + 1 + 64
    if solver == "fixed_point":
        assert steps[7] > 1000


def test_straggler_leaves_the_adjoint_solve_of_others_alone() -> None:
    x = torch.randn(64, 4, dtype=torch.float64)
    x[:, -1] = 0.2
    x[7, -1] = 0.999
    x.requires_grad_()
    layer = Equilibrium(
        ScaledCell(), solver="newton", gradient=Implicit("neumann"), tolerance=1e-8, max_steps=20000
    )
    layer(x).sum().backward()
    steps = layer.last.adjoint.steps
    assert steps[7] > 1000
    assert steps[torch.arange(64) != 7].max() <= 20


# memory


def peak_elements(solver: Solver, max_steps: int, shape: tuple[int, int]) -> int:
    """The most elements held at once in tensors of the solve's size, seen from within the map."""
    seen = []
    calls = 0

    def step(z: Tensor) -> Tensor:
        nonlocal calls
        if calls == 0 or calls > max_steps - 25:  # more than one cycle of each solver's memory
            stores = [
                t.untyped_storage()
                for t in gc.get_objects()
                if type(t) is Tensor and t.layout is torch.strided
            ]
            seen.append(sum({store.data_ptr(): store.nbytes() for store in stores}.values()) // 8)
        calls += 1
        return 3 * torch.cos(5 * z)  # chaotic: it never settles

    stop = Stop(tolerance=1e-15, max_steps=max_steps, patience=10**6, growth=1e300)
    gc.freeze()  # what is there already need not be looked at
    try:
        solution = solve(step, torch.rand(shape, dtype=torch.float64), solver, stop)
    finally:
        gc.unfreeze()
    assert solution.steps.max() == max_steps
    return max(seen) - seen[0]


@pytest.mark.parametrize(
    "solver", [FixedPoint(), Anderson(), Broyden(), Broyden(memory=5)], ids=str
)
def test_memory_does_not_grow_with_max_steps(solver: Solver) -> None:
    shape = (4, 500)
    long = peak_elements(solver, 160, shape)
    assert long <= peak_elements(solver, 40, shape) + 2 * 4 * 500
    kept = 2 * getattr(solver, "memory", 0) * 4 * 500
    assert long <= kept + 12 * 4 * 500


def test_implicit_memory_does_not_grow_with_steps(x: Tensor) -> None:
    def saved(max_steps: int) -> int:
        sizes = []

        def pack(tensor: Tensor) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        layer = Equilibrium(
            TanhCell(),
            solver="fixed_point",
            tolerance=1e-15,
            max_steps=max_steps,
            on_failure="ignore",
        )
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            layer(x)
        return sum(sizes)

    assert saved(2) == saved(30) > 0


# operations


class OpCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def extra_operations_per_step(solver: str, batch: int) -> float:
    matrix = bounded(8, 8, 3.0)
    context = torch.randn(batch, 8, dtype=torch.float64)

    def count(max_steps: int) -> int:
        stop = Stop(tolerance=1e-300, absolute=0.0, max_steps=max_steps, patience=10**6)
        with OpCounter() as counter:
            solve(
                lambda z, c: 3 * torch.tanh(torch.addmm(c, z, matrix)),
                torch.zeros_like(context),
                solver,
                stop,
                context=context,
            )
        return counter.count

    return (count(70) - count(10)) / 60 - 3  # the map itself is three operations


@pytest.mark.parametrize(
    ("solver", "most"), [("fixed_point", 12), ("anderson", 45), ("broyden", 115)]
)
def test_few_operations_per_step(solver: str, most: int) -> None:
    small, large = extra_operations_per_step(solver, 2), extra_operations_per_step(solver, 64)
    assert small <= most
    assert large <= most
    # No loop over samples. Some sample of many updates Broyden's model carefully in more steps.
    assert large <= small + (15 if solver == "broyden" else 5)


# what is reported, what is refused


def test_status_and_counts_are_reported_and_unknown_options_refused(x: Tensor) -> None:
    cell = ScaledCell()
    data = torch.tensor([[1.0, 0.1], [1.0, 0.9], [1.0, 1.0], [torch.nan, 0.5]], dtype=torch.float64)
    layer = Equilibrium(
        cell, solver="fixed_point", tolerance=1e-6, max_steps=30, on_failure="ignore"
    )
    layer(data)
    last = layer.last
    assert last.status.tolist() == [
        Status.CONVERGED,
        Status.MAX_STEPS,
        Status.MAX_STEPS,
        Status.NONFINITE,
    ]
    assert last.converged.tolist() == [True, False, False, False]
    assert last.counts() == {Status.CONVERGED: 1, Status.MAX_STEPS: 2, Status.NONFINITE: 1}
    assert last.steps.tolist()[1:] == [30, 30, 0]
    assert last.evaluations.tolist()[1] == 32
    assert layer.solves.forward.counts[Status.MAX_STEPS] == 2
    assert "1 CONVERGED, 2 MAX_STEPS, 1 NONFINITE" in repr(last)
    with pytest.raises(TypeError, match="stop_mode"):
        Equilibrium(cell, stop_mode="rel")
    for made in (Stop, Anderson, Broyden, FixedPoint, Newton, Implicit, Phantom, Unrolled, GMRES):
        with pytest.raises(TypeError, match="unexpected"):
            made(unexpected=1)
    with pytest.raises(TypeError, match="tol"):
        solve(lambda z: z, x, tol=1e-3)
    with pytest.raises(ValueError, match="training"):
        layer(data, training=True)


# every documented call


class Easy(TanhCell):
    def lipschitz(self) -> float:
        return 0.2


DOCUMENTED = {
    "solver auto": lambda cell: Equilibrium(cell, solver="auto"),
    "solver by name": lambda cell: Equilibrium(cell, solver="anderson"),
    "solver object": lambda cell: Equilibrium(cell, solver=Anderson(memory=3, damping=0.9)),
    "damping": lambda cell: Equilibrium(cell, solver=FixedPoint(damping=0.5)),
    "broyden memory": lambda cell: Equilibrium(cell, solver=Broyden(memory=2)),
    "newton settings": lambda cell: Equilibrium(
        cell, solver=Newton(forcing=0.01, inner_steps=10, halvings=3)
    ),
    "tolerance and steps": lambda cell: Equilibrium(cell, tolerance=1e-3, max_steps=50),
    "stop in full": lambda cell: Equilibrium(
        cell, stop=Stop(1e-3, 1e-12, max_steps=50, patience=5, growth=10.0, check_every=3)
    ),
    "on_failure raise": lambda cell: Equilibrium(cell, on_failure="raise"),
    "on_failure ignore": lambda cell: Equilibrium(cell, on_failure="ignore"),
    "implicit by name": lambda cell: Equilibrium(cell, gradient="implicit"),
    "adjoint by name": lambda cell: Equilibrium(cell, gradient=Implicit(solver="neumann")),
    "adjoint auto": lambda cell: Equilibrium(
        cell, gradient=Implicit(solver="auto", tolerance=1e-6, max_steps=40)
    ),
    "adjoint gmres": lambda cell: Equilibrium(cell, gradient=Implicit(solver=GMRES(memory=3))),
    "adjoint bicgstab": lambda cell: Equilibrium(cell, gradient=Implicit(BiCGStab())),
    "adjoint neumann": lambda cell: Equilibrium(cell, gradient=Implicit(Neumann())),
    "adjoint fixed point": lambda cell: Equilibrium(cell, gradient=Implicit(FixedPoint())),
    "phantom": lambda cell: Equilibrium(cell, gradient=Phantom(steps=3, damping=0.7)),
    "phantom by name": lambda cell: Equilibrium(cell, gradient="phantom"),
    "jacobian free": lambda cell: Equilibrium(cell, gradient=JacobianFree()),
    "unrolled": lambda cell: Equilibrium(cell, gradient=Unrolled(steps=30, damping=0.9)),
    "unrolled by name": lambda cell: Equilibrium(cell, gradient="unrolled"),
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_documented_layer_calls_work(name: str, x: Tensor) -> None:
    layer = DOCUMENTED[name](TanhCell())
    z = layer(x)
    z.sum().backward()
    torch.testing.assert_close(z, unroll(layer.cell, x), rtol=1e-2, atol=1e-2)
    assert layer.cell.W.grad.abs().max() > 0


def test_documented_calls_of_solve_work() -> None:
    c = torch.randn(4, 3, dtype=torch.float64)
    half = {"plain": lambda z: 0.5 * z + c, "context": lambda z, context: 0.5 * z + context}
    z0 = torch.zeros_like(c)
    found = [
        solve(half["plain"], z0),
        solve(half["plain"], z0, "broyden", Stop()),
        solve(half["context"], z0, context=c),
        solve(lambda z, _: 0.5 * z + 1, z0, context=()),
        solve(half["context"], z0, Accelerated(), context=c, symmetric=True),
        solve(lambda z: 0.5 * z + c + 0.1 * (z.mean() - z), z0, coupled=True),
        solve(
            lambda z, context: 0.5 * z + context[0] * context[1],
            z0,
            context=(c, Shared(torch.ones(3, dtype=c.dtype))),
        ),
    ]
    for index in (0, 1, 2, 4, 6):
        torch.testing.assert_close(found[index].value, 2 * c, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found[3].value, torch.full_like(c, 2.0), rtol=1e-3, atol=1e-3)
    assert found[5].status.shape == (1,)
    traced = solve(half["plain"], z0, trace=True).trace
    assert traced.residual.shape == (len(traced.state), 4)


def test_documented_diagnostics_work(x: Tensor) -> None:
    layer = Equilibrium(TanhCell())
    z = layer(x)
    assert frobenius_penalty(layer.map(x), z, samples=2).shape == (5,)
    assert spectral_radius(layer.map(x), z).value.shape == (5,)
    with flush_denormals() as supported:
        assert isinstance(supported, bool)


def test_every_registered_name_gives_a_working_object(x: Tensor) -> None:
    for name in equipoise.SOLVERS:
        made = equipoise.SOLVERS[name]()
        symmetric = AffineCell(0.5 * torch.eye(3, dtype=torch.float64), symmetric=True)
        layer = (
            Equilibrium(symmetric, gradient=Implicit(solver=name))
            if made.linear
            else Equilibrium(symmetric, solver=name)
        )
        (found,) = torch.autograd.grad(layer(x).sum(), x)
        torch.testing.assert_close(found, torch.full_like(found, 2.0), rtol=1e-3, atol=1e-3)
    assert {"anderson", "newton", "gmres"} <= set(equipoise.SOLVERS)
    assert {"implicit", "jacobian_free", "phantom", "unrolled"} <= set(equipoise.GRADIENTS)


def test_auto_solver_picks_conjugate_gradient_for_symmetric_cells(x: Tensor) -> None:
    layer = Equilibrium(
        AffineCell(0.5 * torch.eye(3, dtype=torch.float64), symmetric=True),
        gradient=Implicit(ConjugateGradient()),
    )
    (found,) = torch.autograd.grad(layer(x).sum(), x)
    torch.testing.assert_close(found, torch.full_like(found, 2.0))
    assert layer.last.adjoint.steps.max() <= 1


# spectral radius


def test_spectral_radius_of_a_scaled_rotation_is_its_scale() -> None:
    for angle in (0.3, 1.0, torch.pi / 2, 3.0):
        c, s = torch.cos(torch.tensor(angle)), torch.sin(torch.tensor(angle))
        rotation = 0.9 * torch.stack([torch.stack([c, -s]), torch.stack([s, c])])
        radius = spectral_radius(lambda z, rotation=rotation: z @ rotation.T, torch.zeros(3, 2))
        torch.testing.assert_close(radius.value, torch.full((3,), 0.9), rtol=1e-4, atol=0)


# an ordinary module


def test_gradients_flow_in_eval_mode(x: Tensor) -> None:
    layer = Equilibrium(TanhCell(), tolerance=1e-10)
    wanted = torch.autograd.grad(layer.train()(x).sum(), [x, *layer.parameters()])
    found = torch.autograd.grad(layer.eval()(x).sum(), [x, *layer.parameters()])
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert found[0].abs().max() > 0


def test_layer_is_deepcopied_and_pickled_with_normalised_weights(x: Tensor) -> None:
    cell = TanhCell()
    cell.U = nn.utils.parametrizations.weight_norm(cell.U)
    layer = Equilibrium(cell, tolerance=1e-10)
    z = layer(x)
    z.sum().backward()
    twin = copy.deepcopy(layer)
    torch.testing.assert_close(twin(x), z, rtol=0, atol=0)
    plain = Equilibrium(TanhCell(), tolerance=1e-10)
    plain(x).sum().backward()
    again = pickle.loads(pickle.dumps(plain))
    torch.testing.assert_close(again(x), plain(x), rtol=0, atol=0)
    with torch.no_grad():
        again.cell.W.zero_()
    assert plain.cell.W.abs().max() > 0


class DictCell(Cell):
    def inject(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        return x

    def initial(self, x: dict[str, Tensor], context: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"slow": torch.zeros_like(x["a"]), "fast": torch.zeros_like(x["b"])}

    def step(self, z: dict[str, Tensor], context: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"slow": 0.5 * z["fast"] + context["a"], "fast": 0.1 * z["slow"] + context["b"]}


def test_callers_dicts_and_tensors_are_not_mutated() -> None:
    given = {"a": torch.ones(3, 2), "b": 2 * torch.ones(3, 2)}
    start = {"slow": torch.full((3, 2), 5.0), "fast": torch.full((3, 2), -5.0)}
    before = copy.deepcopy((given, start))
    for solver in ("fixed_point", "anderson", "broyden", "newton"):
        Equilibrium(DictCell(), solver=solver)(given, start)
        solve(
            lambda z, c: {"slow": 0.5 * z["fast"] + c["a"], "fast": c["b"]},
            start,
            solver,
            context=given,
        )
    assert list(given) == ["a", "b"]
    assert list(start) == ["slow", "fast"]
    torch.testing.assert_close((given, start), before, rtol=0, atol=0)


# compilers and transforms


@compiling
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("wrap", ["in place", "wrapped step"])
def test_compiled_cell_gives_the_same_result_and_gradients(wrap: str, x: Tensor) -> None:
    layer = Equilibrium(TanhCell(), tolerance=1e-10)
    z = layer(x)
    wanted = torch.autograd.grad(z.square().sum(), [x, *layer.parameters()])
    if wrap == "in place":
        layer.cell.compile(backend="aot_eager")
    else:
        layer.cell.step = torch.compile(layer.cell.step, backend="aot_eager")
    again = layer(x)
    found = torch.autograd.grad(again.square().sum(), [x, *layer.parameters()])
    torch.testing.assert_close(again, z, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@compiling
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_cell_runs_with_newton(x: Tensor) -> None:
    layer = Equilibrium(TanhCell(), solver="newton", tolerance=1e-10)
    z = layer(x)
    layer.cell.compile(backend="aot_eager")
    torch.testing.assert_close(layer(x), z, rtol=1e-9, atol=1e-12)


@compiling
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_model_gives_the_same_result_and_gradients(x: Tensor) -> None:
    layer = Equilibrium(TanhCell(norm=0.9), tolerance=1e-10)
    model = nn.Sequential(layer, nn.Linear(4, 2, dtype=torch.float64))
    wanted = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    compiled = torch.compile(model, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch in (x, x[:3], 2 * x):
            torch.testing.assert_close(compiled(batch), model(batch), rtol=1e-9, atol=1e-12)
        found = torch.autograd.grad(compiled(x).square().sum(), list(model.parameters()))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@compiling
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_model_keeps_the_solve_out_of_its_graphs(x: Tensor) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    before, layer = (
        nn.Linear(3, 3, dtype=torch.float64),
        Equilibrium(TanhCell(norm=0.9), tolerance=1e-10),
    )

    def model(x: Tensor) -> Tensor:
        return torch.sin(layer(torch.relu(before(x))))

    compiled = torch.compile(model, backend=backend)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), model(x))
    assert len(graphs) == 2  # what comes before the layer, and what comes after it


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strict", [True, False])
def test_export_works_or_is_refused_in_a_clear_sentence(strict: bool, x: Tensor) -> None:
    layer = Equilibrium(TanhCell(), tolerance=1e-10)
    try:
        program = torch.export.export(layer, (x.detach(),), strict=strict)
    except Exception as error:
        assert "Equilibrium" in str(error)  # noqa: PT017  either outcome is right
        assert "export" in str(error)  # noqa: PT017
    else:
        torch.testing.assert_close(program.module()(x.detach()), layer(x).detach())


def test_vmap_and_function_transforms_work(x: Tensor) -> None:
    layer = Equilibrium(TanhCell(), tolerance=1e-12)

    def one(sample: Tensor) -> Tensor:
        return layer(sample[None])[0]

    data = x.detach()
    torch.testing.assert_close(
        torch.func.vmap(one)(data), layer(data).detach(), rtol=1e-9, atol=1e-11
    )
    wanted = torch.stack(
        [
            torch.autograd.functional.jacobian(lambda u: unroll(layer.cell, u[None])[0], row)
            for row in data
        ]
    )
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(
            torch.func.vmap(transform(one))(data), wanted, rtol=1e-8, atol=1e-10
        )
    hessian = torch.func.hessian(lambda u: one(u).sum())(data[0])
    exact = torch.autograd.functional.hessian(lambda u: unroll(layer.cell, u[None]).sum(), data[0])
    torch.testing.assert_close(hessian, exact, rtol=1e-8, atol=1e-10)
    value, tangent = torch.func.jvp(one, (data[0],), (torch.ones(3, dtype=torch.float64),))
    torch.testing.assert_close(value, layer(data[:1])[0].detach(), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(tangent, wanted[0].sum(dim=1), rtol=1e-8, atol=1e-10)


# a failed backward solve


@pytest.mark.parametrize("solver", list(equipoise.SOLVERS))
def test_failed_backward_solve_never_gives_a_zero_gradient(solver: str) -> None:
    A = torch.diag(
        torch.tensor([1.0, 0.5, 0.2], dtype=torch.float64)
    )  # I - A is singular along the first axis
    x = torch.tensor([[0.0, 1.0, 1.0], [0.0, 2.0, 1.0]], dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], dtype=torch.float64)
    layer = Equilibrium(
        AffineCell(A, symmetric=True), gradient=Implicit(solver=solver), tolerance=1e-8
    )
    z = layer(x)
    with pytest.warns(ConvergenceWarning, match="backward solve: 1 of 2 samples"):
        (found,) = torch.autograd.grad((weight * z).sum(), x)
    assert layer.last.adjoint.converged.tolist() == [False, True]
    assert found[0].abs().max() > 0.5
    torch.testing.assert_close(
        found[1], torch.tensor([0.0, 2.0, 0.0], dtype=torch.float64), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize(
    "solver",
    [
        *("gmres", "bicgstab", "neumann", "anderson", "broyden", "fixed_point"),
        Newton(inner="krylov"),  # elimination needs one step only
    ],
)
def test_truncated_backward_solve_never_gives_a_zero_gradient(
    solver: str | Newton, x: Tensor
) -> None:
    layer = Equilibrium(
        TanhCell(norm=0.95),
        gradient=Implicit(solver=solver, tolerance=1e-14, max_steps=1),
        on_failure="ignore",
    )
    (found,) = torch.autograd.grad(layer(x).sum(), x)
    assert (found.abs().amax(dim=1) > 1e-3).all()
    assert not layer.last.adjoint.converged.all()


@pytest.mark.parametrize("scale", [1e-10, 1e-25, 1e-30])
def test_small_gradients_are_not_rounded_to_zero(scale: float) -> None:
    layer = Equilibrium(TanhCell(dtype=torch.float32), tolerance=1e-5)
    x = torch.randn(5, 3, requires_grad=True)
    (wanted,) = torch.autograd.grad(layer(x).sum(), x)
    (found,) = torch.autograd.grad(scale * layer(x).sum(), x)
    torch.testing.assert_close(found / scale, wanted, rtol=1e-2, atol=1e-3)


def test_nonfinite_backward_solve_gives_nan_and_not_zero() -> None:
    class Root(AffineCell):
        def step(self, z: Tensor, context: Tensor) -> Tensor:
            return 0.5 * z.abs().sqrt() * context

    x = torch.tensor([[0.0], [1.0]], dtype=torch.float64, requires_grad=True)
    layer = Equilibrium(Root(torch.eye(1, dtype=torch.float64)), on_failure="warn")
    z = layer(x, torch.tensor([[0.0], [0.5]], dtype=torch.float64))
    with pytest.warns(
        ConvergenceWarning, match="backward solve: 1 of 2 samples met NaN or infinity"
    ):
        (found,) = torch.autograd.grad(z.sum(), x)
    assert layer.last.adjoint.status.tolist() == [Status.NONFINITE, Status.CONVERGED]
    assert found[0].isnan().all()
    assert found[1].isfinite().all()


# a truncated solve


@pytest.mark.parametrize("solver", ["fixed_point", "anderson", "broyden", "newton"])
def test_truncated_solve_is_not_silent(solver: str, x: Tensor) -> None:
    layer = Equilibrium(TanhCell(norm=0.99), solver=solver, tolerance=1e-12, max_steps=2)
    with pytest.warns(
        ConvergenceWarning,
        match=r"5 of 5 samples did not converge \(worst relative residual .* after 2 steps\)",
    ):
        layer(x)
    assert (layer.last.status == Status.MAX_STEPS).all()


def test_small_step_does_not_pass_for_a_small_residual() -> None:
    x = torch.ones(1, 2, dtype=torch.float64)
    layer = Equilibrium(
        AffineCell(torch.zeros(2, 2, dtype=torch.float64)),
        solver=FixedPoint(damping=1e-5),
        max_steps=20,
    )
    with pytest.warns(ConvergenceWarning, match="1 of 1 samples did not converge"):
        z = layer(x)
    assert z.abs().max() < 1e-3
    assert layer.last.residual > 0.99


def test_convolution_bound_bounds_the_true_operator() -> None:
    kernel = torch.ones(3, 3, 3, 3, dtype=torch.float64)
    images = torch.eye(3 * 8 * 8, dtype=torch.float64).view(-1, 3, 8, 8)

    def norm(weight: Tensor) -> float:
        return torch.linalg.matrix_norm(
            torch.nn.functional.conv2d(images, weight, padding=1).flatten(1), 2
        ).item()

    assert (
        norm(kernel / torch.linalg.matrix_norm(kernel.flatten(1), 2)) > 1.6
    )  # what normalising the reshaped kernel leaves
    assert norm(kernel / equipoise.convolution_bound(kernel)) <= 1
