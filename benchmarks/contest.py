"""How contestants are timed side by side, in one run, at equal error.

Times are medians of interleaved repetitions, so that a slow moment of the machine hits all
contestants. Each torchdeq solver runs at the stated tolerance; the fastest one is the peer. Ours is
then tightened until its true residual and its gradient error, both against a float64 reference, are
no larger than the peer's.

A problem is a module with its parameters: a `cell` for Equipoise; `start(x)` and `function(x)`, the
map, for torchdeq.
"""

from __future__ import annotations

import copy
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from textwrap import fill
from types import MappingProxyType

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from equipoise import Equilibrium, Implicit, Stop

PEERS = ("fixed_point_iter", "anderson", "broyden")
TIGHTER = 0.8
NOTES = "## Notes"
"""The heading of a results page below which text is written by hand and kept."""
Input = Tensor | tuple[Tensor, Tensor]
Function = Callable[[Input], Callable[[Tensor], Tensor]]


@dataclass
class Contestant:
    """One way to compute an equilibrium and its gradients."""

    name: str
    run: Callable[[], Tensor]
    residual: float = 0.0
    error: float = 0.0
    milliseconds: float = 0.0
    tolerance: float = 0.0


def peer(
    cell: torch.nn.Module,
    x: Input,
    solver: str,
    tolerance: float,
    max_steps: int,
    *,
    function: Function | None = None,
    note: str = "",
) -> Contestant:
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

    start = cell.start(x)

    def run() -> Tensor:
        states, _ = deq((function or cell.function)(x), start)
        states[-1].square().sum().backward()
        return states[-1].detach()

    return Contestant(f"torchdeq {solver}{note}", run, tolerance=tolerance)


def ours(
    layer: Equilibrium,
    x: Input,
    name: str,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Contestant:
    def run() -> Tensor:
        with around():
            z = layer(x)
            z.square().sum().backward()
        return z.detach()

    return Contestant(name, run)


class Referee:
    """Knows the exact answer, and measures how far a contestant is from it."""

    def __init__(self, cell: torch.nn.Module, x: Input) -> None:
        self.cell, self.x = cell, x
        self.exact = copy.deepcopy(cell).double()
        layer = Equilibrium(
            self.exact.cell, "fixed_point", Implicit("neumann"), stop=Stop(1e-11, max_steps=10_000)
        )
        layer(self._double()).square().sum().backward()

    def _double(self) -> Input:
        return (
            tuple(part.double() for part in self.x)
            if isinstance(self.x, tuple)
            else self.x.double()
        )

    def judge(self, contestant: Contestant) -> None:
        self.cell.zero_grad()
        z = contestant.run().double()
        with torch.no_grad():
            f = self.exact.function(self._double())(z)
        contestant.residual = (
            ((f - z).flatten(1).norm(dim=1) / f.flatten(1).norm(dim=1)).max().item()
        )
        errors = []
        for mine, true in zip(self.cell.parameters(), self.exact.parameters(), strict=True):
            if true.grad is not None and mine.grad is not None:
                errors.append(((mine.grad.double() - true.grad).norm() / true.grad.norm()).item())
        contestant.error = max(errors)
        self.cell.zero_grad()


LOOSEST = [round(0.3 * 0.6**power, 12) for power in range(26)]
"""Tolerances from loose to tight."""


def loosest(
    make: Callable[[float], Contestant], referee: Referee, residual: float, error: float
) -> Contestant | None:
    """Return a contestant at its loosest tolerance that keeps residual and gradient error small."""
    for tolerance in LOOSEST:
        contestant = make(tolerance)
        referee.judge(contestant)
        if contestant.residual <= residual and contestant.error <= error:
            return contestant
    return None


def duel(
    title: str,
    problem: torch.nn.Module,
    x: Input,
    challengers: dict[str, Build],
    *,
    residual: float,
    error: float,
    goal: float,
    repetitions: int,
    contexts: Mapping[str, Callable[[], AbstractContextManager[None]]] = MappingProxyType({}),
) -> list[str]:
    """Time each at its own loosest tolerance that meets the limits of residual and error.

    Challengers that are named in `contexts` run in these.
    """
    referee = Referee(problem, x)
    able, written = [], []
    for solver in PEERS:
        found = loosest(
            lambda tolerance, solver=solver: peer(problem, x, solver, tolerance, 300),
            referee,
            residual,
            error,
        )
        if found is not None:
            able.append(found)
            note = ", injection in the step"
            written.append(
                peer(problem, x, solver, found.tolerance, 300, function=problem.written, note=note)
            )
            referee.judge(written[-1])
    mine = [
        loosest(
            lambda tolerance, build=build, name=name: ours(
                build(tolerance, tolerance), x, name, contexts.get(name, nullcontext)
            ),
            referee,
            residual,
            error,
        )
        for name, build in challengers.items()
    ]
    ready = [contestant for contestant in mine if contestant is not None]
    interleave([*able, *written, *ready], repetitions)
    best, plain = (
        min(contestant.milliseconds for contestant in group) for group in (able, written)
    )
    lines = []
    for contestant in [*able, *written, *ready]:
        note = f" (goal {goal:g})" if contestant in ready else ""
        lines.append(
            f"| {title} | {contestant.name} | {contestant.milliseconds:.1f} | "
            f"{contestant.residual:.1e} | {contestant.error:.1e} | "
            f"{best / contestant.milliseconds:.2f}{note} | {plain / contestant.milliseconds:.2f} |"
        )
        print(lines[-1], flush=True)
    return lines


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


def match(
    build: Build, referee: Referee, best: Contestant, tolerance: float, name: str
) -> Contestant:
    """Find the loosest tolerances, first forward, then adjoint, at which we match the peer."""
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
            f"| {title} | {contestant.name} | {contestant.milliseconds:.2f} | "
            f"{contestant.residual:.1e} | {contestant.error:.1e} | "
            f"{ratio:.2f}{f' (goal {goal:g})' if contestant in mine else ''} |"
        )
        print(lines[-1], flush=True)
    return lines


def peak_of(step: Callable[[], object]) -> float:
    """Return the peak memory in MB of the tensors made in a call, as torch's profiler counts it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak / 2**20


def layer_for(
    cell: torch.nn.Module,
    forward: str = "auto",
    adjoint: str = "auto",
    check_every: int | None = None,
) -> Build:
    def build(tolerance: float, adjoint_tolerance: float) -> Equilibrium:
        stop = Stop(tolerance, max_steps=5000, check_every=check_every)
        return Equilibrium(cell, forward, Implicit(adjoint, tolerance=adjoint_tolerance), stop=stop)

    return build


def write(path: Path, title: str, program: str, repetitions: int, body: list[str]) -> None:
    """Write a results page, keeping the notes that follow its tables."""
    old = path.read_text() if path.exists() else ""
    notes = old[old.index(NOTES) :] if NOTES in old else f"{NOTES}\n"
    header = (
        f"`make bench`, {date.today().isoformat()}, medians of {repetitions}, torch "
        f"{torch.__version__}, "
        f"{torch.get_num_threads()} threads, {platform.machine()} CPU. Written by "
        f"`{program}`; what the columns mean stands there."
    )
    # Rows of tables cannot be broken.
    lines = [
        line if line.startswith("|") or len(line) <= 100 else fill(line, 100)
        for line in (header, "", *body)
    ]
    path.write_text("\n".join([f"# {title}", "", *lines, "", notes]))
