"""How many Krylov steps a dense solve costs; `equipoise.solvers.auto` is made from this table.

Run: python benchmarks/dense.py   (one thread; prints a Markdown table)
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from cells import Tanh
from torch import Tensor, nn

from equipoise import Cell
from equipoise.core.module_tensors import ModuleTensors
from equipoise.core.tree import Layout, Structure
from equipoise.layers.cell import CellEquation
from equipoise.solvers import GMRES, DenseLU, LinearProblem, MapProblem, Stop, run

WIDTHS = (8, 16, 32, 64, 128, 256, 512)
BATCHES = (1, 8, 32, 128)
STEPS = 8


class Undeclared(Tanh):
    """The same cell without a linearisation of its own."""

    def linearize(self, z: Tensor, c: Tensor) -> None:
        return None


class Convolution(Cell):
    """`tanh(conv(z) + x)` on 8 x 8 images, with as many channels as the width needs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shape = (max(width // 64, 1), 8, 8) if width >= 64 else (1, width // 4, 4)
        self.conv = nn.Conv2d(self.shape[0], self.shape[0], 3, padding=1)

    def inject(self, x: Tensor) -> Tensor:
        return x

    def step(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.conv(z) + x)


def problem_of(kind: str, width: int, batch: int, transpose: bool) -> LinearProblem:
    """Return the adjoint equation, or the Newton system, of a cell at a random state."""
    cell: Cell
    if kind == "convolution":
        cell = Convolution(width)
        context = torch.randn(batch, *cell.shape)
    else:
        cell = (Tanh if kind == "dense, declared" else Undeclared)(width, 4)
        context = torch.randn(batch, width)
    layout, weights = Layout(torch.zeros_like(context)), ModuleTensors(cell)
    structure = Structure(context, "context")
    equation = CellEquation(cell, layout, structure, weights)
    base = MapProblem(equation, [*structure.leaves, *weights.tensors])
    z, g = torch.randn(batch, width), torch.randn(batch, width)
    return LinearProblem(base, z, g, transpose=transpose, local=base.linearize(z))


def fastest(function: Callable[[], object], repetitions: int) -> float:
    """Return milliseconds, the least of several runs."""
    function()
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def row(kind: str, width: int, batch: int, transpose: bool, repetitions: int) -> str:
    problem = problem_of(kind, width, batch, transpose)
    start = torch.zeros_like(problem.g)
    few, many = (Stop(1e-30, absolute=0.0, max_steps=n) for n in (STEPS, 3 * STEPS))

    def krylov(stop: Stop) -> float:
        return fastest(lambda: run(problem, start, GMRES(), stop, f=problem.g), repetitions)

    base, slope = krylov(few), 0.0
    slope = (krylov(many) - base) / (2 * STEPS)
    once = Stop(1e-1, absolute=0.0, max_steps=3)
    dense = fastest(lambda: run(problem, start, DenseLU(), once, f=problem.g), repetitions)
    fixed = max(base - STEPS * slope, 0)
    equal = (dense - fixed) / slope
    name = "adjoint" if transpose else "Newton"
    return f"| {kind} | {name} | {width} | {batch} | {dense:.2f} | {slope:.3f} | {equal:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    repetitions = parser.parse_args().repetitions
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print("| cell | system | width | batch | dense, ms | GMRES step, ms | equal at steps |")
    print("|---|---|---|---|---|---|---|")
    for kind in ("dense, declared", "dense, recorded", "convolution"):
        for transpose in (True, False):
            for width in WIDTHS:
                for batch in BATCHES:
                    if width * width * batch <= 2**23:
                        print(row(kind, width, batch, transpose, repetitions), flush=True)


if __name__ == "__main__":
    main()
