"""Solves of one dense ReLU layer for a few samples, as compiled loops; importing it needs Numba.

`W^T relu(W z + c)` passes over `W` once in place of twice: a row of it that has been multiplied by
the state lies in the processor's nearest cache when its multiple is added to the value. Rows of
hidden units that are off are not read again, and in products with the Jacobian not at all.

What the loops may decide by themselves, `equipoise.solvers.ahead` says.
"""

from __future__ import annotations

import numpy as np
from numba import types

from equipoise.core.compiled import compiled
from equipoise.solvers.row_kernels import (
    add_multiple,
    dot,
    measure,
    mix,
    move_along,
    on_their_way,
    turn,
)

__all__ = ["compile_for", "run_anderson", "run_conjugate"]


@compiled
def layer_value(W, c, z, out):  # type: ignore[no-untyped-def]
    """Write `W^T relu(W z + c)`."""
    out[:] = 0
    for i in range(len(W)):
        for r in range(len(z)):
            a = dot(W[i], z[r]) + c[r, i]
            if not a <= 0:  # NaN passes
                add_multiple(a, W[i], out[r])


@compiled
def layer_product(W, slope, v, out):  # type: ignore[no-untyped-def]
    """Write `W^T D W v`."""
    out[:] = 0
    for i in range(len(W)):
        for r in range(len(v)):
            if slope[r, i] != 0:
                add_multiple(slope[r, i] * dot(W[i], v[r]), W[i], out[r])


@compiled
def run_anderson(  # type: ignore[no-untyped-def]
    W, c, z, f, size, damping, values, gaps, places, gram, inverse, count, diagonal, smallest,
    mark, tolerance, absolute, progress, guard, best, excess, limit, good, sizes, scales,
):  # fmt: skip
    """Make steps of Anderson acceleration; return looks passed, steps made, and if a rest is due.

    Writes `z`, and `f` where a rest is due; `good`, the iterate of the last look passed; `mark`;
    `best`; `excess`; and residuals and scales of all looks passed.
    """
    memory = values.shape[1]
    made = looks = 0
    following = np.empty_like(z)
    now, length = np.empty_like(size), np.empty_like(size)
    while True:
        slot = count % memory
        if slot == 0:
            for r in range(len(size)):
                if not size[r] < 0.9 * mark[r]:
                    return looks, made, True
            for r in range(len(size)):
                mark[r] = size[r]
        count += 1
        mix(
            z, f, False, damping, values, gaps, places, gram, inverse, slot, count, diagonal,
            smallest, following,
        )  # fmt: skip
        good[:] = z
        z[:] = following
        made += 1
        if made == limit or excess[0] * excess[0] / excess[1] <= 1:
            return looks, made, False
        layer_value(W, c, z, f)
        measure(z, f, False, z.dtype.type(1), now, length)
        if not on_their_way(now, length, best, guard, tolerance, progress):
            return looks, made, False
        for r in range(len(now)):
            best[r] = sizes[looks, r] = size[r] = now[r]
            scales[looks, r] = length[r]
        excess[1] = excess[0]
        excess[0] = now.max() / (absolute + tolerance * length.min())
        looks += 1


@compiled
def run_conjugate(  # type: ignore[no-untyped-def]
    W, slope, z, gap, direction, turned, size, last_size, length, floor, forcing, tolerance,
    progress, guard, best, limit, good, sizes, scales,
):  # fmt: skip
    """Make steps of conjugate gradient; return looks passed and steps made.

    Writes all that describes where it is, and as `run_anderson` does.
    """
    made = looks = 0
    product = np.empty_like(z)
    next_z, next_size, scale = np.empty_like(z), np.empty_like(size), np.empty_like(size)
    while True:
        if turned:
            turn(gap, size, last_size, direction)
        else:
            direction[:] = gap
        turned = True
        last_size[:] = size
        layer_product(W, slope, direction, product)
        good[:] = z
        move_along(z, gap, direction, product, size, next_z, next_size, length)
        z[:] = next_z
        size[:] = next_size
        made += 1
        for r in range(len(size)):
            scale[r] = floor[r] if forcing or length[r] < floor[r] else length[r]
        if made == limit or not on_their_way(size, scale, best, guard, tolerance, progress):
            return looks, made
        for r in range(len(size)):
            best[r] = sizes[looks, r] = size[r]
            scales[looks, r] = scale[r]
        looks += 1


def compile_for(dtype: np.dtype) -> bool:
    """Compile every kernel for weights of a dtype, or load what was compiled before.

    Return whether something had to be compiled.
    """
    number = types.float32 if dtype == np.float32 else types.float64
    row, table, cube = number[::1], number[:, ::1], number[:, :, ::1]
    real, whole, yes = types.float64, types.int64, types.boolean
    line, grid, block, places = real[::1], real[:, ::1], real[:, :, ::1], whole[::1]
    # fmt: off
    run_anderson.compile((
        table, table, table, table, row, real, cube, cube, places, block, grid, whole, real, real,
        line, real, real, real, line, line, line, whole, table, grid, grid,
    ))
    run_conjugate.compile((
        table, table, table, table, table, yes, row, row, row, row, yes, real,
        real, line, line, whole, table, grid, grid,
    ))
    # fmt: on
    return any(kernel.stats.cache_misses for kernel in (run_anderson, run_conjugate))
