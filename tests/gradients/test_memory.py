"""What a training step holds at its peak, in states, as torch's profiler counts it."""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from equipoise import Cell, Equilibrium, Linearization
from equipoise.core.tree import Layout

SAMPLES, WIDTH = 1024, 64


class ReluCell(Cell):
    """`z = W^T relu(W z + x)`, whose linearisation keeps its masks."""

    symmetric = True

    def __init__(self) -> None:
        super().__init__()
        W = torch.randn(WIDTH, WIDTH)
        self.W = nn.Parameter(W * (0.99 / torch.linalg.matrix_norm(W, 2)))

    def inject(self, x: Tensor) -> Tensor:
        return x + 0.0

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return torch.addmm(context, z, self.W.T).relu() @ self.W

    def linearize(self, z: Tensor, context: Tensor) -> Linearization:
        u = torch.addmm(context, z, self.W.T)
        return self._masked(u.relu() @ self.W, (u > 0).to(u.dtype))

    def _masked(self, value: Tensor, mask: Tensor) -> Linearization:
        def product(v: Tensor) -> Tensor:
            return (v @ self.W.T).mul_(mask) @ self.W

        return Linearization(
            value, product, product, select_rows=lambda rows: self._masked(value[rows], mask[rows])
        )


def peak_in_states(step: Callable[[], object]) -> float:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak / (4 * SAMPLES * WIDTH)


def test_training_step_holds_no_more_when_samples_leave_the_batch() -> None:
    """What is left of the adjoint solve is copied after the rest is free, and only if used."""
    torch.manual_seed(0)
    layer = Equilibrium(ReluCell(), "accelerated", tolerance=1e-6, max_steps=100)
    x = torch.randn(SAMPLES, WIDTH) * torch.logspace(-3, 3, SAMPLES)[:, None]
    layer(x[:2]).square().sum().backward()
    assert peak_in_states(lambda: layer(x).square().sum().backward()) < 13
    assert layer.last is not None
    assert layer.last.adjoint is not None
    assert len(layer.last.adjoint.steps.unique()) > 2  # some did leave


def test_layout_does_not_hold_the_state_that_it_was_read_from() -> None:
    state = (torch.zeros(2, 3), {"a": torch.zeros(2, 1)})
    known = [weakref.ref(state[0]), weakref.ref(state[1]["a"])]
    layout = Layout(state)
    del state
    assert [tensor() for tensor in known] == [None, None]
    assert layout.unpack(torch.ones(2, 4))[1]["a"].shape == (2, 1)
