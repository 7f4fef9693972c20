"""What the step read in forward is what backward uses, whatever happens to the cell in between."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cells import TanhCell, unroll
from torch import Tensor, nn

from equipoise import Cell, Equilibrium, Implicit, JacobianFree, Phantom, Unrolled

FLOAT = torch.float64


class SettingsCell(TanhCell):
    """Reads a plain number, a mask, a buffer, a container and the mode of a child."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 0.5
        self.mask = torch.ones(4, dtype=FLOAT)
        self.register_buffer("offset", torch.zeros(4, dtype=FLOAT))
        self.settings = {"shifts": [0.0]}
        self.foreign = SimpleNamespace(scale=torch.ones(4, dtype=FLOAT))
        self.child = nn.Identity()

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        value = self.factor * self.mask * self.foreign.scale * (z @ self.W.T)
        value = value + context + self.offset + self.settings["shifts"][0]
        return torch.tanh(value if self.child.training else value / 3)


def rebind_factor(cell: SettingsCell) -> None:
    cell.factor = -0.9


def rebind_mask(cell: SettingsCell) -> None:
    cell.mask = torch.tensor([1.0, -1.0, 0.0, 1.0], dtype=FLOAT)


def rebind_buffer(cell: SettingsCell) -> None:
    cell.offset = torch.full((4,), 2.0, dtype=FLOAT)


def write_to_a_list(cell: SettingsCell) -> None:
    cell.settings["shifts"][0] = 1.5


def switch_the_mode(cell: SettingsCell) -> None:
    cell.eval()


def replace_a_weight(cell: SettingsCell) -> None:
    cell.W = nn.Parameter(-cell.W.detach())


def replace_a_child(cell: SettingsCell) -> None:
    cell.child = nn.Identity().eval()


def replace_the_step(cell: SettingsCell) -> None:
    cell.step = lambda z, context: 0.1 * z + context


CHANGES = [
    rebind_factor,
    rebind_mask,
    rebind_buffer,
    write_to_a_list,
    switch_the_mode,
    replace_a_weight,
    replace_a_child,
    replace_the_step,
]


def first_order(layer: Equilibrium, x: Tensor, change: Callable[[Any], None]) -> list[Tensor]:
    inputs = [x, *layer.parameters()]
    z = layer(x)
    change(layer.cell)
    layer(x)
    return list(torch.autograd.grad(z.square().sum(), inputs))


def second_order(layer: Equilibrium, x: Tensor, change: Callable[[Any], None]) -> list[Tensor]:
    inputs = [x, *layer.parameters()]
    z = layer(x)
    change(layer.cell)
    first = torch.autograd.grad(z.square().sum(), inputs, create_graph=True)
    return list(torch.autograd.grad(sum(g.square().sum() for g in first), inputs))


@pytest.mark.parametrize("solver", ["anderson", "newton"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("differentiate", [first_order, second_order])
def test_backward_uses_the_cell_of_its_forward(
    differentiate: Callable[..., list[Tensor]], change: Callable[[Any], None], solver: str
) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 3, dtype=FLOAT, requires_grad=True)
    layer = Equilibrium(SettingsCell(), solver, tolerance=1e-12)
    wanted = differentiate(layer, x, lambda _: None)
    found = differentiate(layer, x, change)
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)


def write_to_a_buffer(cell: SettingsCell) -> None:
    cell.offset.add_(1.0)


def write_to_a_mask(cell: SettingsCell) -> None:
    cell.mask[0] = -1.0


def write_behind_autograd(cell: SettingsCell) -> None:
    cell.W.data.mul_(-1.0)


def write_to_a_foreign_object(cell: SettingsCell) -> None:
    cell.foreign.scale = torch.full((4,), -1.0, dtype=FLOAT)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (write_to_a_buffer, "'offset' changed in place in between"),
        (write_to_a_mask, "'mask' changed in place in between"),
        (write_behind_autograd, "Something that it reads changed in between"),
        (write_to_a_foreign_object, "Something that it reads changed in between"),
    ],
)
@pytest.mark.parametrize("differentiate", [first_order, second_order])
def test_changes_that_no_copy_can_keep_are_refused(
    differentiate: Callable[..., list[Tensor]], change: Callable[[Any], None], named: str
) -> None:
    x = torch.randn(5, 3, dtype=FLOAT, requires_grad=True)
    layer = Equilibrium(SettingsCell(), tolerance=1e-8)
    sentence = (
        r"^The step must read in backward what it read in forward; got a residual of .* at a "
        rf"solution that had converged to 1e-08\. {named}"
    )
    with pytest.raises(RuntimeError, match=sentence):
        differentiate(layer, x, change)


def test_undeclared_coupling_is_refused_in_backward_when_samples_have_left() -> None:
    """Samples that left the batch were solved without the others, which backward puts back."""

    class Coupled(TanhCell):
        def inject(self, x: Tensor) -> Tensor:
            return x

        def step(self, z: Tensor, context: Tensor) -> Tensor:
            rate = torch.linspace(0.1, 0.99, len(z), dtype=FLOAT)[:, None] * 0.5
            return rate * z + context + 0.3 * z.mean(dim=0)

    x = torch.randn(16, 4, dtype=FLOAT, requires_grad=True)
    layer = Equilibrium(Coupled(), "fixed_point", tolerance=1e-6, on_failure="ignore")
    with pytest.raises((RuntimeError, ValueError), match="coupled"):
        layer(x).sum().backward()


def test_mask_that_the_first_step_draws_is_kept() -> None:
    class Dropping(TanhCell):
        mask: Tensor | None = None

        def inject(self, x: Tensor) -> Tensor:
            self.mask = None
            return super().inject(x)

        def step(self, z: Tensor, context: Tensor) -> Tensor:
            if self.mask is None:
                self.mask = torch.bernoulli(torch.full((4,), 0.5, dtype=FLOAT))
            return torch.tanh((self.mask * z) @ self.W.T + context)

    x = torch.randn(5, 3, dtype=FLOAT, requires_grad=True)
    for gradient in (Implicit(), Phantom(steps=60, damping=1.0), JacobianFree(), Unrolled(60)):
        layer = Equilibrium(Dropping(), gradient=gradient, tolerance=1e-12)
        for _ in range(4):
            z = layer(x)
            mask, inputs = layer.cell.mask, [x, layer.cell.W]
            layer(x)
            found = torch.autograd.grad(z.square().sum(), inputs)
            state = torch.zeros(5, 4, dtype=FLOAT)
            steps = 1 if gradient == JacobianFree() else 80
            if steps == 1:
                state = z.detach()
            for _ in range(steps):
                state = torch.tanh((mask * state) @ layer.cell.W.T + layer.cell.U(x))
            wanted = torch.autograd.grad(state.square().sum(), inputs)
            torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)


class BatchNormCell(TanhCell):
    coupled = True

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, dtype=FLOAT)

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return torch.tanh(self.norm(0.3 * z @ self.W.T + context))


def test_running_statistics_may_move_between_forward_and_backward() -> None:
    layer = Equilibrium(BatchNormCell(), tolerance=1e-10)
    x = torch.randn(8, 3, dtype=FLOAT, requires_grad=True)
    first, second = layer(x), layer(3 * x + 1)
    statistics = layer.cell.norm.running_mean.clone()
    tracked = int(layer.cell.norm.num_batches_tracked)
    (found,) = torch.autograd.grad(first.square().sum() + second.square().sum(), x)
    exact = unroll(layer.cell, x).square().sum() + unroll(layer.cell, 3 * x + 1).square().sum()
    (wanted,) = torch.autograd.grad(exact, x)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)
    assert tracked > 0
    layer = Equilibrium(BatchNormCell(), tolerance=1e-10)
    z = layer(x)
    statistics = layer.cell.norm.running_mean.clone()
    z.sum().backward()  # evaluates the step, and counts nothing
    assert torch.equal(layer.cell.norm.running_mean, statistics)


def test_mode_of_a_batch_norm_is_that_of_the_forward() -> None:
    layer = Equilibrium(BatchNormCell(), tolerance=1e-10)
    x = torch.randn(8, 3, dtype=FLOAT, requires_grad=True)
    (wanted,) = torch.autograd.grad(unroll(layer.cell, x).square().sum(), x)
    z = layer(x)
    layer.eval()
    (found,) = torch.autograd.grad(z.square().sum(), x)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("tolerance", "dtype"), [(1e-3, torch.float32), (1e-6, torch.float64), (1e-10, torch.float64)]
)
def test_spectral_norm_in_training_mode_is_no_change(tolerance: float, dtype: torch.dtype) -> None:
    class Normed(Cell):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16, dtype=dtype))

        def inject(self, x: Tensor) -> Tensor:
            return x

        def step(self, z: Tensor, context: Tensor) -> Tensor:
            return torch.tanh(0.8 * self.inner(z) + context)

    for seed in range(3):
        torch.manual_seed(seed)
        layer = Equilibrium(Normed(), tolerance=tolerance, on_failure="ignore")
        x = torch.randn(8, 16, dtype=dtype, requires_grad=True)
        first, second = layer(x), layer(2 * x)
        (first.sum() + second.sum()).backward()
        z = layer(x)
        for _ in range(2):
            torch.autograd.grad(z.sum(), x, retain_graph=True)


def test_solved_layer_without_gradients_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from equipoise.core import module_tensors

    layer = Equilibrium(SettingsCell())

    def refuse(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(module_tensors, "copy_modules", refuse)
    with torch.no_grad():
        layer(torch.randn(5, 3, dtype=FLOAT))


def test_what_a_step_keeps_on_itself_stays_after_a_solve() -> None:
    class Counting(TanhCell):
        steps = 0

        def step(self, z: Tensor, context: Tensor) -> Tensor:
            self.steps += 1
            return super().step(z, context)

    layer = Equilibrium(Counting())
    layer(torch.randn(5, 3, dtype=FLOAT, requires_grad=True)).sum().backward()
    assert layer.cell.steps == int(layer.last.evaluations.max())


# what a step may use


class InjectNormCell(TanhCell):
    """Normalises its input by the statistics of the batch, and its state not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, dtype=FLOAT)
        self.used = False

    def inject(self, x: Tensor) -> Tensor:
        return self.norm(super().inject(x))

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        z = super().step(z, context)
        return self.norm(z) if self.used else z


def test_batch_norm_in_the_injection_is_allowed() -> None:
    layer = Equilibrium(InjectNormCell(), tolerance=1e-12)
    x = torch.randn(8, 3, dtype=FLOAT, requires_grad=True)
    for mode in (True, False):
        layer.train(mode)
        weights = [x, *layer.parameters()]
        found = torch.autograd.grad(layer(x).square().sum(), weights)
        wanted = torch.autograd.grad(unroll(layer.cell, x).square().sum(), weights)
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)
    assert layer.cell.norm.num_batches_tracked == 2  # ours and the unrolled one's
    assert "forward" not in vars(layer.cell.norm)


def test_batch_norm_in_the_step_is_refused_in_training_mode_only() -> None:
    layer = Equilibrium(InjectNormCell(), on_failure="ignore")
    layer.cell.used = True
    x = torch.randn(8, 3, dtype=FLOAT)
    sentence = r"^InjectNormCell.coupled must be True for a step with batch normalisation"
    with pytest.raises(ValueError, match=sentence):
        layer(x)
    layer.eval()(x)


class AdaptedCell(TanhCell):
    """Has an adapter that it does not know as its own, and that can be switched on."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = [nn.Parameter(0.1 * torch.randn(4, dtype=FLOAT))]
        self.on = False

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return super().step(z, context + self.adapters[0] if self.on else context)


UNTRACKED = r"^AdaptedCell.step must use trainable tensors through its attributes or its context"


def test_adapter_that_is_switched_on_later_is_refused_in_backward() -> None:
    layer = Equilibrium(AdaptedCell())
    x = torch.randn(5, 3, dtype=FLOAT, requires_grad=True)
    layer(x).sum().backward()
    layer.cell.on = True
    z = layer(x)
    with pytest.raises(ValueError, match=UNTRACKED):
        z.sum().backward()


def test_adapter_of_a_frozen_cell_is_refused_in_forward() -> None:
    layer = Equilibrium(AdaptedCell())
    layer.requires_grad_(False)
    x = torch.randn(5, 3, dtype=FLOAT)
    assert not layer(x).requires_grad
    layer.cell.on = True
    with pytest.raises(ValueError, match=UNTRACKED):
        layer(x)
    with torch.no_grad():
        layer(x)
    layer.cell.adapters[0].requires_grad_(False)
    evaluations = layer(x) is not None and layer.last.evaluations
    with torch.no_grad():
        layer(x)
    assert torch.equal(layer.last.evaluations, evaluations)


def test_lazy_modules_get_their_sizes_from_the_first_solve() -> None:
    class Lazy(TanhCell):
        def __init__(self) -> None:
            super().__init__()
            self.U = nn.LazyLinear(4, dtype=FLOAT)
            self.inner = nn.LazyLinear(4, dtype=FLOAT)
            self.head = nn.LazyLinear(2, dtype=FLOAT)

        def step(self, z: Tensor, context: Tensor) -> Tensor:
            return torch.tanh(0.2 * self.inner(z) + context)

        def readout(self, z: Tensor, context: Tensor) -> Tensor:
            return self.head(z)

    layer = Equilibrium(Lazy(), tolerance=1e-12)
    x = torch.randn(5, 3, dtype=FLOAT, requires_grad=True)
    assert layer(x).shape == (5, 2)
    weights = [x, *layer.cell.inner.parameters(), *layer.cell.U.parameters()]
    found = torch.autograd.grad(layer(x).square().sum(), weights)
    exact = layer.cell.head(unroll(layer.cell, x)).square().sum()
    torch.testing.assert_close(found, torch.autograd.grad(exact, weights), rtol=1e-8, atol=1e-10)


def test_weights_written_to_while_a_step_runs_are_called_so() -> None:
    class Trained(TanhCell):
        def step(self, z: Tensor, context: Tensor) -> Tensor:
            with torch.no_grad():
                self.W.mul_(0.99)  # as another thread's optimiser would
            return super().step(z, context)

    with pytest.raises(ValueError, match=r"^Weights must not change while a step runs; got one"):
        Equilibrium(Trained())(torch.randn(5, 3, dtype=FLOAT))


def test_buffers_of_an_ensemble_are_solved_by_vmap() -> None:
    layers = [Equilibrium(SettingsCell(), tolerance=1e-12) for _ in range(3)]
    for number, layer in enumerate(layers):
        layer.cell.offset += number
    weights, buffers = torch.func.stack_module_state(layers)
    x = torch.randn(5, 3, dtype=FLOAT)

    def call(weights: Any, buffers: Any) -> Tensor:
        return torch.func.functional_call(layers[0], (weights, buffers), (x,))

    together = torch.func.vmap(call)(weights, buffers)
    apart = torch.stack([layer(x) for layer in layers])
    torch.testing.assert_close(together, apart, rtol=1e-9, atol=1e-11)
