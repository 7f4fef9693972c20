"""Equipoise's core beside torchdeq: time at equal error, loop overhead, peak memory.

Run: make bench   (writes docs/results/core.md; needs torchdeq 0.1.0, which `make bench` installs)
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from cells import Hidden, Straggler, Symmetric, Tanh
from contest import PEERS, contest, layer_for, peak_of, write

from equipoise import Equilibrium, Implicit, Stop, Unrolled, solve


def overhead(batch: int, repetitions: int) -> list[str]:
    """Wall time of a solve, without its layer, over that of the bare cell evaluations it made."""
    cell = Symmetric()
    with torch.no_grad():
        context = cell.inject(torch.randn(batch, 784))
        start = torch.zeros(batch, 512)
        lines = []
        runs = [
            ("fixed_point", 1),
            ("fixed_point", 3),
            ("accelerated", 1),
            ("anderson", 1),
            ("broyden", 1),
        ]
        for solver, every in runs:
            stop = Stop(1e-5, max_steps=300, check_every=every)

            # Without a context no sample leaves, so that each evaluation is of the whole batch.
            def run(solver: str = solver, stop: Stop = stop) -> int:
                solution = solve(
                    lambda z: cell.step(z, context), start, solver, stop, symmetric=True
                )
                return int(solution.evaluations.max())

            evaluations = run()

            def bare(evaluations: int = evaluations) -> None:
                z = start
                for _ in range(evaluations):
                    z = cell.step(z, context)

            ratios = []
            for _ in range(repetitions):
                t0 = time.perf_counter()
                run()
                t1 = time.perf_counter()
                bare()
                ratios.append((t1 - t0) / (time.perf_counter() - t1))
            name = solver if every == 1 else f"{solver}, check_every={every}"
            note = f" (goal {1.1 if batch > 1 else 1.5:g})" if solver == "fixed_point" else ""
            lines.append(
                f"| {batch} | {name} | {evaluations} | {statistics.median(ratios):.2f}{note} |"
            )
            print(lines[-1], flush=True)
    return lines


def peak_memory(solver: str, steps: int) -> float:
    """Return the peak memory in MB of the tensors made in one training step."""
    torch.manual_seed(0)
    gradient = Unrolled(steps) if solver == "unrolled" else Implicit(max_steps=steps)
    stop = Stop(1e-30, max_steps=steps, patience=10**6)
    layer = Equilibrium(
        Symmetric(width=1024),
        "auto" if solver == "unrolled" else solver,
        gradient,
        stop=stop,
        on_failure="ignore",
    )
    x = torch.randn(4096, 784)
    layer(x[:2]).square().sum().backward()
    return peak_of(lambda: layer(x).square().sum().backward())


def memory() -> list[str]:
    lines = []
    for solver, steps in (
        ("accelerated", 10),
        ("accelerated", 200),
        ("anderson", 10),
        ("anderson", 200),
        ("unrolled", 50),
    ):
        kind = "Unrolled" if solver == "unrolled" else f"Implicit, {solver} forward"
        lines.append(f"| {kind} | {steps} | {peak_memory(solver, steps):.0f} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("docs/results/core.md"))
    parser.add_argument("--repetitions", type=int, default=15)
    options = parser.parse_args()

    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    speed = []
    for batch in (1, 128):
        x = torch.randn(batch, 784)
        cell = Symmetric()
        hidden = Hidden()
        hidden.W, hidden.U, hidden.b = cell.W, cell.U, cell.b
        challengers = {"equipoise": layer_for(cell)}
        if batch > 1:
            challengers["equipoise, hidden form"] = layer_for(hidden)
        title = f"symmetric, norm 0.99, batch {batch}"
        speed += contest(
            title, cell, x, challengers, tolerance=1e-5, goal=5, repetitions=options.repetitions
        )
        cell = Tanh()
        title = f"tanh, radius 0.9, batch {batch}"
        challengers = {
            "equipoise": layer_for(cell),
            "equipoise, fixed_point and neumann, check_every=3": layer_for(
                cell, "fixed_point", "neumann", check_every=3
            ),
        }
        speed += contest(
            title, cell, x, challengers, tolerance=1e-5, goal=2, repetitions=options.repetitions
        )
    cell = Straggler()
    speed += contest(
        "convolution, one straggler in 64",
        cell,
        Straggler.batch(),
        {
            "equipoise": layer_for(cell),
            "equipoise, fixed_point and neumann": layer_for(cell, "fixed_point", "neumann"),
        },
        tolerance=1e-4,
        goal=10,
        repetitions=3,
        max_steps=3000,
        solvers=PEERS[:2],  # Broyden would allocate 13 GB here, for 3,000 steps in advance
    )
    loop = overhead(1, 3 * options.repetitions) + overhead(128, options.repetitions)
    peak = memory()
    body = [
        "## Forward and backward, against torchdeq 0.1.0",
        "",
        "| cell (512 units, 784 inputs) | contestant | ms | worst residual | gradient error | "
        "times torchdeq's best |",
        "|---|---|---|---|---|---|",
        *speed,
        "",
        "## Wall time of a solve over that of the bare cell evaluations it made",
        "",
        "| batch | solver | evaluations | ratio |",
        "|---|---|---|---|",
        *loop,
        "",
        "## Peak memory of a training step (4,096 samples, 1,024 units; a state is 16 MB)",
        "",
        "| gradient | steps | MB |",
        "|---|---|---|",
        *peak,
    ]
    write(options.output, "The core, measured", "benchmarks/core.py", options.repetitions, body)


if __name__ == "__main__":
    main()
