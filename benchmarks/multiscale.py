"""The multiscale cell beside the same cell under torchdeq; ratios in one run.

Run: python benchmarks/multiscale.py   (one thread; prints two tables)

Both run the same step from zeros, with contexts made once, by the same method and a tolerance that
nothing reaches, so that what they cost for the same work is compared. Evaluations of the step and
products with its transposed Jacobian are counted inside the step, and the limits are set so that
the counts are equal. Rounds alternate; times are minima of processor time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from contest import peak_of
from torch import Tensor
from torchdeq import get_deq

from equipoise import Implicit, Stop
from equipoise.families.multiscale import Multiscale, MultiscaleCell
from equipoise.solvers import Anderson, Broyden, FixedPoint

NEVER = 1e-30
OURS = {"fixed_point_iter": FixedPoint(), "anderson": Anderson(memory=6), "broyden": Broyden(30)}


class _Products(torch.autograd.Function):
    """The identity, whose backward passes are counted."""

    count = 0

    @staticmethod
    def forward(_, z: Tensor) -> Tensor:
        return z.view_as(z)

    @staticmethod
    def backward(_, g: Tensor) -> Tensor:
        _Products.count += 1
        return g


class CountedCell(MultiscaleCell):
    """The cell, with evaluations and products counted."""

    evaluations = 0

    def step(self, z, context):
        CountedCell.evaluations += 1
        return super().step((_Products.apply(z[0]), *z[1:]), context)


def counted(run: Callable[[], object]) -> tuple[int, int]:
    """Return how many evaluations and products a call makes."""
    CountedCell.evaluations = _Products.count = 0
    run()
    return CountedCell.evaluations, _Products.count


def make_layer(solver: str, steps: int, adjoint_steps: int) -> Multiscale:
    torch.manual_seed(0)
    layer = Multiscale(
        (8, 16, 32),
        solver=OURS[solver],
        gradient=Implicit(OURS[solver], max_steps=adjoint_steps),
        stop=Stop(NEVER, max_steps=steps, patience=10**6),
        on_failure="ignore",
    )
    layer.cell.__class__ = CountedCell
    return layer


def make_peer(layer: Multiscale, x: Tensor, solver: str, steps: int) -> Callable[[], None]:
    """Return a training step under torchdeq with the same cell."""
    deq = get_deq(
        ift=True,
        f_solver=solver,
        b_solver=solver,
        f_max_iter=steps,
        b_max_iter=steps,
        f_tol=NEVER,
        b_tol=NEVER,
    ).train()

    def run() -> None:
        step = layer.map(x)
        start = layer.cell.initial(x, layer.cell.inject(x))
        states, _ = deq(lambda *z: step(z), start)
        sum(one.square().sum() for one in states[-1]).backward()

    return run


def compare(solver: str, steps: int, x: Tensor, rounds: int) -> None:
    """Print the times of both."""
    layer = make_layer(solver, steps, steps)
    theirs = make_peer(layer, x, solver, steps)
    wanted = counted(theirs)

    def run() -> None:
        sum(one.square().sum() for one in layer(x)).backward()

    # Solvers differ in whether the first and the last evaluation count as steps.
    found = counted(run)
    changed = make_layer(solver, steps + wanted[0] - found[0], max(1, steps + wanted[1] - found[1]))
    layer.stop, layer.gradient = changed.stop, changed.gradient
    found = counted(run)
    best = {theirs: float("inf"), run: float("inf")}
    for _ in range(rounds):
        for one in best:
            layer.zero_grad()
            start = time.process_time()
            one()
            best[one] = min(best[one], time.process_time() - start)
    print(
        f"| {solver} | {wanted[0]} + {wanted[1]} | {found[0]} + {found[1]} "
        f"| {1e3 * best[theirs]:.0f} ms | {1e3 * best[run]:.0f} ms "
        f"| {best[run] / best[theirs]:.2f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.relu(torch.randn(arguments.batch, 8, 32, 32))
    print("| solver | torchdeq's evaluations | ours | torchdeq | ours | ratio |")
    print("|---|---|---|---|---|---|")
    for solver in OURS:
        compare(solver, arguments.steps, x, arguments.rounds)
    print("\n| solver | steps | peak memory of a training step |")
    print("|---|---|---|")
    for solver, steps in (("anderson", 10), ("anderson", 40), ("broyden", 40)):
        layer = make_layer(solver, steps, steps)

        def run(layer: Multiscale = layer) -> None:
            sum(one.square().sum() for one in layer(x[:8])).backward()

        print(f"| {solver} | {steps} | {peak_of(run):.0f} MB |", flush=True)


if __name__ == "__main__":
    main()
