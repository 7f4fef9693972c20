"""A training step of the Transformer DEQ beside the same cell under torchdeq, in one run.

    python benchmarks/transformer.py

Both solve by Anderson mixing with as many steps, forward and backward, and so evaluate the cell
equally often; minima of processor time over alternating rounds.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from equipoise import Equilibrium, Implicit, Stop
from equipoise.families.transformer import TransformerCell

FEATURES, HEADS, INNER, BATCH, LENGTH, MEMORY = 128, 4, 576, 8, 64, 64
ROUNDS = 7


def make(steps: int) -> tuple[Callable[[], None], Callable[[], None], dict[str, int]]:
    """Return a training step of ours, one of torchdeq, and counts of evaluations by name."""
    from torchdeq import get_deq

    torch.manual_seed(0)
    cell = TransformerCell(FEATURES, HEADS, INNER)
    x = torch.randn(BATCH, LENGTH, FEATURES), torch.randn(BATCH, MEMORY, 2 * FEATURES)
    counts = {"ours": 0, "torchdeq": 0}
    # A tolerance that is never reached, so that all steps are made.
    stop = Stop(tolerance=1e-12, max_steps=steps)
    solver = {"name": "anderson", "memory": 6}
    layer = Equilibrium(cell, solver, Implicit(solver), on_failure="ignore", stop=stop)
    deq = get_deq(
        core="sliced",
        ift=True,
        f_solver="anderson",
        b_solver="anderson",
        f_max_iter=steps,
        b_max_iter=steps,
        f_tol=1e-12,
        b_tol=1e-12,
    )
    deq.train()

    def ours() -> None:
        cell.zero_grad()
        handle = cell.register_forward_hook(lambda *_: count("ours"))
        layer(x).square().mean().backward()
        handle.remove()

    def count(name: str) -> None:
        counts[name] += 1

    def theirs() -> None:
        cell.zero_grad()
        context = cell.inject(x)
        context = context._replace(bias=context.bias.tensor)

        def function(z: Tensor) -> Tensor:
            count("torchdeq")
            return cell.step(z, context)

        states, _ = deq(function, torch.zeros_like(x[0]))
        states[-1].square().mean().backward()

    return ours, theirs, counts


def compare(steps: int) -> None:
    ours, theirs, counts = make(steps)
    best = {"ours": float("inf"), "torchdeq": float("inf")}
    for number in range(ROUNDS + 1):
        for name, step in (("ours", ours), ("torchdeq", theirs)):
            counts[name] = 0
            start = time.process_time()
            step()
            if number:  # the first round warms up
                best[name] = min(best[name], time.process_time() - start)
    print(
        f"{steps} steps: ours {1e3 * best['ours']:.0f} ms ({counts['ours']} evaluations of the "
        f"cell), torchdeq {1e3 * best['torchdeq']:.0f} ms ({counts['torchdeq']}), "
        f"ratio {best['ours'] / best['torchdeq']:.2f}",
        flush=True,
    )


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if len(sys.argv) > 1:  # in a process of its own: how much memory a training step takes
        ours, _, _ = make(int(sys.argv[1]))
        ours()
        print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f}")
        return
    for steps in (8, 16):
        compare(steps)
    for steps in (5, 20, 80):
        found = subprocess.run(
            [sys.executable, __file__, str(steps)], capture_output=True, text=True, check=True
        )
        print(f"peak memory of the process with {steps} steps: {found.stdout.strip()} MiB")


if __name__ == "__main__":
    main()
