"""Many threads through one layer."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cells import TanhCell
from torch import Tensor, nn

from equipoise import Equilibrium
from equipoise.solvers.policy import SolveLog

FLOAT = torch.float64
WORKERS = 6


class NormedCell(TanhCell):
    """Parametrised weights, a buffer, and a normalisation within the step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4, dtype=FLOAT))
        self.norm = nn.LayerNorm(4, dtype=FLOAT)
        self.register_buffer("offset", torch.randn(4, dtype=FLOAT))

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return torch.tanh(0.2 * self.inner(self.norm(z)) + 0.5 * z @ self.W.T + context)


@pytest.fixture(autouse=True)
def _hasty_threads() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def first(layer: Equilibrium, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    z = layer(x)
    return [z.detach(), *torch.autograd.grad(z.square().sum(), [x, *layer.parameters()])]


def second(layer: Equilibrium, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    inputs = [x, *layer.parameters()]
    g = torch.autograd.grad(layer(x).square().sum(), inputs, create_graph=True)
    return list(torch.autograd.grad(sum(one.square().sum() for one in g), inputs))


def function(layer: Equilibrium, x: Tensor) -> list[Tensor]:
    return [torch.func.grad(lambda x: layer(x).square().sum())(x)]


def inference(layer: Equilibrium, x: Tensor) -> list[Tensor]:
    with torch.inference_mode():
        return [layer(x).clone()]


def mixed(layer: Equilibrium, x: Tensor) -> list[Tensor]:
    return [*first(layer, x), *inference(layer, x)]


@pytest.mark.parametrize(
    ("work", "cell", "solver", "calls"),
    [
        (mixed, TanhCell, "anderson", 20),
        (mixed, NormedCell, "anderson", 5),
        (mixed, TanhCell, "newton", 2),
        (second, TanhCell, "anderson", 2),
        (function, NormedCell, "anderson", 2),
    ],
)
def test_threads_get_what_one_thread_gets(
    work: Callable[[Equilibrium, Tensor], list[Tensor]],
    cell: type[TanhCell],
    solver: str,
    calls: int,
) -> None:
    torch.manual_seed(0)
    layer = Equilibrium(cell(), solver, tolerance=1e-11)
    held = dict(layer.named_parameters())
    values = {name: tensor.detach().clone() for name, tensor in layer.state_dict().items()}
    inputs = [torch.randn(3, 3, dtype=FLOAT) for _ in range(WORKERS)]
    alone = copy.deepcopy(layer)
    wanted = [work(alone, x) for x in inputs]
    with ThreadPoolExecutor(WORKERS) as pool:
        found = list(pool.map(lambda i: work(layer, inputs[i % WORKERS]), range(WORKERS * calls)))
    for i, results in enumerate(found):
        torch.testing.assert_close(results, wanted[i % WORKERS], rtol=1e-7, atol=1e-9)
    assert all(tensor is held[name] for name, tensor in layer.named_parameters())
    torch.testing.assert_close(dict(layer.state_dict()), values, rtol=0, atol=0)


def test_solves_of_many_threads_are_counted() -> None:
    layer = Equilibrium(TanhCell())
    x = torch.randn(2, 3, dtype=FLOAT)
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(lambda _: layer(x).sum().backward(), range(100)))
    assert layer.solves.forward.solves == layer.solves.backward.solves == 100
    assert sum(layer.solves.forward.counts.values()) == 200


def test_copies_of_a_log_have_a_lock_of_their_own() -> None:
    log = SolveLog("warn", "Equilibrium")
    assert copy.deepcopy(log)._lock is not log._lock
