"""Times the closed-form tangent kernel of a monotone network beside stacked torch.func Jacobians.

Run: python benchmarks/kernel.py [--samples 256] [--units 512] [--stacked 256]

Both in float64 on one thread, equilibria solved to 1e-13 by each. If the stacked Jacobians of all
samples would not fit into memory, fewer are stacked (--stacked), and the time is scaled by the
number of samples, which leaves out the growth of J J^T and so favours the contestant.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch.func import functional_call, jacrev, vmap

from equipoise.families.monotone import MonotoneRegression, monotone_forms


def stacked(network, x):
    """The obvious way: all Jacobians by torch.func, then J J^T."""
    parameters = {name: one.detach() for name, one in network.named_parameters()}

    def output(values, sample):
        return functional_call(network, values, (sample[None],))[0, 0]

    found = vmap(jacrev(output), in_dims=(None, 0))(parameters, x)
    return sum(one.flatten(1) @ one.flatten(1).T for one in found.values())


def clock(function, repeats):
    """Return the least processor time and the least wall time of some calls, and the value."""
    used = wall = float("inf")
    for _ in range(repeats):
        begin = time.process_time(), time.perf_counter()
        value = function()
        used = min(used, time.process_time() - begin[0])
        wall = min(wall, time.perf_counter() - begin[1])
    return used, wall, value


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--units", type=int, default=512)
    parser.add_argument("--inputs", type=int, default=64)
    parser.add_argument("--stacked", type=int, default=256)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = MonotoneRegression(arguments.inputs, arguments.units).double()
    x = torch.randn(arguments.samples, arguments.inputs, dtype=torch.float64)
    ours, wall, kernel = clock(lambda: monotone_forms(network, x).kernel(), 9)
    some = x[: arguments.stacked]
    theirs, their_wall, other = clock(lambda: stacked(network, some), 1)
    difference = float((kernel[: len(some), : len(some)] - other).norm() / other.norm())
    scale = len(x) / len(some)
    print(f"closed form: {ours:.3f} s of processor time, {wall:.3f} s of wall time")
    print(f"stacked, {len(some)} samples: {theirs:.2f} s, {their_wall:.2f} s")
    print(f"ratio {scale * theirs / ours:.1f}, of wall times {scale * their_wall / wall:.1f}")
    print(f"relative difference {difference:.1e}")


if __name__ == "__main__":
    main()
