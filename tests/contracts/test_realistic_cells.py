"""The cells that users write keep the library's promises: exact derivatives, threads, processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from realistic_cells import REALISTIC
from torch import Tensor, multiprocessing, nn
from torch import distributed as dist

from equipoise import Cell, Equilibrium, Stop
from equipoise.testing import check_cell
from equipoise.testing.gradient_case import unroll
from equipoise.testing.trees import convert, leaves, rows

STOP = Stop(tolerance=1e-13, max_steps=500)
SOLVERS = ("auto", "fixed_point", "anderson", "broyden", "newton")
# Not the graph: DistributedDataParallel itself has no support for sparse buffers.
DISTRIBUTED = ("gated", "attention", "resolutions", "spectral_norm", "fourier")


@pytest.fixture(autouse=True)
def _float64() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make(name: str, samples: int = 4) -> tuple[Cell, Any]:
    torch.manual_seed(0)
    cell, x = REALISTIC[name].make(), REALISTIC[name].draw(samples)
    return cell, convert(x, lambda t: t.requires_grad_(t.is_floating_point()), lambda t: t)


def layer_of(cell: Cell, solver: str = "auto") -> Equilibrium:
    return Equilibrium(cell, solver, on_failure="raise", stop=STOP)


def trainable(cell: Cell, x: Any) -> list[Tensor]:
    return [*(leaf for leaf in leaves(x) if leaf.requires_grad), *cell.parameters()]


def loss(z: Tensor) -> Tensor:
    weight = torch.linspace(-1, 1, z.shape[1])
    return (z * weight).square().sum() + (z * weight).sum()


def derivatives(z: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Gradients of a loss, and the product of its Hessian with a direction."""
    first = torch.autograd.grad(loss(z), tensors, create_graph=True)
    source = torch.Generator().manual_seed(5)
    directions = [torch.randn(t.shape, dtype=t.dtype, generator=source) for t in tensors]
    along = sum((g * d.conj()).real.sum() for g, d in zip(first, directions, strict=True))
    return [*first, *torch.autograd.grad(along, tensors)]


def close(found: list[Tensor], expected: list[Tensor], tolerance: float, what: str) -> None:
    for a, b in zip(found, expected, strict=True):
        size = max(1.0, float(b.detach().abs().max()))
        gap = float((a - b).detach().abs().max()) / size
        assert gap < tolerance, f"{what}: off by {gap:.1e}"


@pytest.mark.parametrize("name", REALISTIC)
def test_realistic_cell_has_the_derivatives_of_a_long_unroll(name: str) -> None:
    cell, x = make(name)
    tensors, damping = trainable(cell, x), REALISTIC[name].damping
    torch.manual_seed(1)  # a mask is drawn in `inject`
    expected_z = rows(unroll(cell, x, round(100 / damping), damping))
    expected = derivatives(expected_z, tensors)
    for solver in SOLVERS:
        if solver == "fixed_point" and damping != 1:
            continue
        torch.manual_seed(1)
        z = rows(layer_of(cell, solver)(x))
        close([z], [expected_z], 1e-10, f"{solver}, value")
        # First derivatives alone take another way than those that are differentiated again.
        once = torch.autograd.grad(loss(z), tensors, retain_graph=True)
        close(list(once), expected[: len(once)], 1e-9, f"{solver}, gradients")
        close(derivatives(z, tensors), expected, 1e-8, f"{solver}, Hessian products")


@pytest.mark.parametrize("name", REALISTIC)
def test_realistic_cell_keeps_the_promises_of_cells(name: str) -> None:
    cell, x = make(name)
    check_cell(cell if name != "dropout" else cell.eval(), x, second=False)


@pytest.mark.parametrize("name", REALISTIC)
def test_realistic_cell_gives_two_threads_what_it_gives_one(name: str) -> None:
    cell, _ = make(name)
    layer = layer_of(cell if name != "dropout" else cell.eval())
    inputs = [REALISTIC[name].draw(samples) for samples in (2, 3, 4)]
    parameters = list(layer.parameters())

    def gradients(x: Any) -> list[Tensor]:
        return list(torch.autograd.grad(loss(rows(layer(x))), parameters))

    alone = [gradients(x) for x in inputs]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(gradients, inputs * 3))
    for found, expected in zip(together, alone * 3, strict=True):
        close(found, expected, 1e-9, name)
    assert all(a is b for a, b in zip(layer.parameters(), parameters, strict=True))


def _gradients_of_half(rank: int, folder: str) -> None:
    """One of two processes: the gradients of its half of each cell's batch, averaged by torch."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    for name in DISTRIBUTED:
        cell, x = make(name)
        half = convert(x, lambda t: t[2 * rank : 2 * rank + 2].detach(), lambda t: t)
        module = nn.parallel.DistributedDataParallel(layer_of(cell))
        (loss(rows(module(half))) / 2).backward()
        if rank == 0:
            torch.save([p.grad for p in cell.parameters()], f"{folder}/{name}")
    dist.destroy_process_group()


def test_realistic_cells_have_the_gradients_of_the_whole_batch_in_two_processes(
    tmp_path: Path,
) -> None:
    multiprocessing.spawn(_gradients_of_half, (str(tmp_path),), nprocs=2)
    for name in DISTRIBUTED:
        cell, x = make(name)
        (loss(rows(layer_of(cell)(x))) / 4).backward()
        found = torch.load(tmp_path / name)
        close(found, [p.grad for p in cell.parameters()], 1e-9, name)
