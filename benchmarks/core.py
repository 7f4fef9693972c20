"""Equipoise and torchdeq side by side, in one run: forward and backward time at equal error, loop overhead, peak memory.

Run: make bench   (writes docs/results/core.md; needs torchdeq 0.1.0, which `make bench` installs)

Times are medians of interleaved repetitions, so that a slow moment of the machine hits all contestants. Each torchdeq
solver runs at the stated tolerance; the fastest one is the peer. Ours is then tightened until its true residual and its
gradient error, both against a float64 reference, are no larger than the peer's.
"""

from __future__ import annotations

import argparse
import copy
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
from cells import Hidden, Straggler, Symmetric, Tanh
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from equipoise import Equilibrium, Implicit, Stop, Unrolled, solve

PEERS = ("fixed_point_iter", "anderson", "broyden")
TIGHTER = 0.8
NOTES = "## Notes"
"""What follows this heading in the results page is written by hand and kept."""
Input = Tensor | tuple[Tensor, Tensor]


@dataclass
class Contestant:
    """One way to compute an equilibrium and its gradients."""

    name: str
    run: Callable[[], Tensor]
    residual: float = 0.0
    error: float = 0.0
    milliseconds: float = 0.0


def peer(cell: torch.nn.Module, x: Input, solver: str, tolerance: float, max_steps: int) -> Contestant:
    from torchdeq import get_deq

    deq = get_deq(
        core="sliced",
        ift=True,
        f_solver=solver,
        b_solver=solver,
        f_max_iter=max_steps,
        b_max_iter=max_steps,
        f_tol=tolerance,
        b_tol=tolerance,
        f_stop_mode="rel",
        b_stop_mode="rel",
    )
    deq.train()

    start = torch.zeros_like(x[0]) if isinstance(x, tuple) else torch.zeros(x.shape[0], 512)

    def run() -> Tensor:
        states, _ = deq(lambda z: cell.plain(z, x), start)
        states[-1].square().sum().backward()
        return states[-1].detach()

    return Contestant(f"torchdeq {solver}", run)


def ours(layer: Equilibrium, x: Input, name: str) -> Contestant:
    def run() -> Tensor:
        z = layer(x)
        z.square().sum().backward()
        return z.detach()

    return Contestant(name, run)


class Referee:
    """Knows the exact answer, and measures how far a contestant is from it."""

    def __init__(self, cell: torch.nn.Module, x: Input) -> None:
        self.cell, self.x = cell, x
        self.exact = copy.deepcopy(cell).double()
        layer = Equilibrium(self.exact, "fixed_point", Implicit("neumann"), stop=Stop(1e-11, max_steps=10_000))
        layer(self._double()).square().sum().backward()

    def _double(self) -> Input:
        return tuple(part.double() for part in self.x) if isinstance(self.x, tuple) else self.x.double()

    def judge(self, contestant: Contestant) -> None:
        self.cell.zero_grad()
        z = contestant.run().double()
        f = self.exact.plain(z, self._double())
        contestant.residual = ((f - z).flatten(1).norm(dim=1) / f.flatten(1).norm(dim=1)).max().item()
        errors = []
        for mine, true in zip(self.cell.parameters(), self.exact.parameters(), strict=True):
            if true.grad is not None and mine.grad is not None:
                errors.append(((mine.grad.double() - true.grad).norm() / true.grad.norm()).item())
        contestant.error = max(errors)
        self.cell.zero_grad()


def interleave(contestants: list[Contestant], repetitions: int) -> None:
    times: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for _ in range(repetitions):
        for contestant in contestants:
            start = time.perf_counter()
            contestant.run()
            times[contestant.name].append(time.perf_counter() - start)
    for contestant in contestants:
        contestant.milliseconds = 1e3 * statistics.median(times[contestant.name])


Build = Callable[[float, float], Equilibrium]


def match(build: Build, referee: Referee, best: Contestant, tolerance: float, name: str) -> Contestant:
    """Find the loosest pair of forward and adjoint tolerances at which we are as accurate as the peer, one after the other."""
    forward = adjoint = tolerance
    contestant = ours(build(forward, adjoint), referee.x, name)
    referee.judge(contestant)
    while contestant.residual > best.residual and forward > 1e-7:
        forward *= TIGHTER
        contestant = ours(build(forward, adjoint), referee.x, name)
        referee.judge(contestant)
    adjoint *= 8
    while True:
        contestant = ours(build(forward, adjoint), referee.x, name)
        referee.judge(contestant)
        if contestant.error <= best.error or min(forward, adjoint) < 1e-7:
            return contestant
        if adjoint > forward / 2:
            adjoint *= TIGHTER
        else:
            forward *= TIGHTER


def contest(
    title: str,
    cell: torch.nn.Module,
    x: Input,
    challengers: dict[str, Build],
    *,
    tolerance: float,
    goal: float,
    repetitions: int,
    max_steps: int = 300,
    solvers: tuple[str, ...] = PEERS,
) -> list[str]:
    referee = Referee(cell, x)
    peers = [peer(cell, x, solver, tolerance, max_steps) for solver in solvers]
    for contestant in peers:
        referee.judge(contestant)
    able = [contestant for contestant in peers if contestant.residual <= 2 * tolerance]
    interleave(able, max(1, repetitions // 3))
    best = min(able, key=lambda contestant: contestant.milliseconds)
    mine = [match(build, referee, best, tolerance, name) for name, build in challengers.items()]
    interleave([*peers, *mine], repetitions)
    best = min(able, key=lambda contestant: contestant.milliseconds)
    lines = []
    for contestant in [*peers, *mine]:
        ratio = best.milliseconds / contestant.milliseconds
        lines.append(
            f"| {title} | {contestant.name} | {contestant.milliseconds:.2f} | {contestant.residual:.1e} | {contestant.error:.1e} | "
            f"{ratio:.2f}{f' (goal {goal:g})' if contestant in mine else ''} |"
        )
        print(lines[-1], flush=True)
    return lines


def overhead(batch: int, repetitions: int) -> list[str]:
    """Wall time of a solve over that of the bare cell evaluations it made, without the layer around it."""
    cell = Symmetric()
    with torch.no_grad():
        context = cell.inject(torch.randn(batch, 784))
        start = torch.zeros(batch, 512)
        lines = []
        runs = [("fixed_point", 1), ("fixed_point", 3), ("accelerated", 1), ("anderson", 1), ("broyden", 1)]
        for solver, every in runs:
            stop = Stop(1e-5, max_steps=300, check_every=every)

            # Without a context no sample leaves, so that each evaluation is of the whole batch.
            def run(solver: str = solver, stop: Stop = stop) -> int:
                solution = solve(lambda z: cell.step(z, context), start, solver, stop, symmetric=True)
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
            lines.append(f"| {batch} | {name} | {evaluations} | {statistics.median(ratios):.2f}{note} |")
            print(lines[-1], flush=True)
    return lines


def peak_memory(solver: str, steps: int) -> float:
    """Most MB that tensors made in one training step hold at a time, as torch's profiler counts them."""
    torch.manual_seed(0)
    gradient = Unrolled(steps) if solver == "unrolled" else Implicit(max_steps=steps)
    stop = Stop(1e-30, max_steps=steps, patience=10**6)
    layer = Equilibrium(Symmetric(width=1024), "auto" if solver == "unrolled" else solver, gradient, stop=stop, on_failure="ignore")
    x = torch.randn(4096, 784)
    layer(x[:2]).square().sum().backward()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        layer(x).square().sum().backward()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak / 2**20


def memory() -> list[str]:
    lines = []
    for solver, steps in (("accelerated", 10), ("accelerated", 200), ("anderson", 10), ("anderson", 200), ("unrolled", 50)):
        kind = "Unrolled" if solver == "unrolled" else f"Implicit, {solver} forward"
        lines.append(f"| {kind} | {steps} | {peak_memory(solver, steps):.0f} |")
        print(lines[-1], flush=True)
    return lines


def layer_for(cell: torch.nn.Module, forward: str = "auto", adjoint: str = "auto", check_every: int | None = None) -> Build:
    def build(tolerance: float, adjoint_tolerance: float) -> Equilibrium:
        stop = Stop(tolerance, max_steps=5000, check_every=check_every)
        return Equilibrium(cell, forward, Implicit(adjoint, tolerance=adjoint_tolerance), stop=stop)

    return build


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
        speed += contest(title, cell, x, challengers, tolerance=1e-5, goal=5, repetitions=options.repetitions)
        cell = Tanh()
        title = f"tanh, radius 0.9, batch {batch}"
        challengers = {
            "equipoise": layer_for(cell),
            "equipoise, fixed_point and neumann, check_every=3": layer_for(cell, "fixed_point", "neumann", check_every=3),
        }
        speed += contest(title, cell, x, challengers, tolerance=1e-5, goal=2, repetitions=options.repetitions)
    cell = Straggler()
    speed += contest(
        "convolution, one straggler in 64",
        cell,
        Straggler.batch(),
        {"equipoise": layer_for(cell), "equipoise, fixed_point and neumann": layer_for(cell, "fixed_point", "neumann")},
        tolerance=1e-4,
        goal=10,
        repetitions=3,
        max_steps=3000,
        solvers=PEERS[:2],  # Broyden would allocate 13 GB here, for 3,000 steps in advance
    )
    loop = overhead(1, 3 * options.repetitions) + overhead(128, options.repetitions)
    peak = memory()
    old = options.output.read_text() if options.output.exists() else ""
    notes = old[old.index(NOTES) :] if NOTES in old else f"{NOTES}\n"
    options.output.write_text(
        "\n".join(
            [
                "# The core, measured",
                "",
                f"`make bench`, {date.today().isoformat()}, medians of {options.repetitions}, "
                f"torch {torch.__version__}, {torch.get_num_threads()} threads, "
                f"{platform.machine()} CPU. Written by `benchmarks/core.py`; what the columns mean stands there.",
                "",
                "## Forward and backward, against torchdeq 0.1.0",
                "",
                "| cell (512 units, 784 inputs) | contestant | ms | worst residual | gradient error | times torchdeq's best |",
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
                "",
                notes,
            ]
        )
    )


if __name__ == "__main__":
    main()
