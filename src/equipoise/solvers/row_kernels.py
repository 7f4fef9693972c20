"""Steps of solvers as compiled loops over the rows of a state; importing it needs Numba.

A row and what is remembered of it are read once, while they lie in the processor's nearest cache,
where array operations pass over the whole state many times. Sums may be taken in any order, which
vectorising needs; NaN and infinity are what they are elsewhere. Rows are independent, so that any
split of a batch gives equal numbers.

With `halves`, rows are coordinates whose inner product is that of the first half of one with the
second half of the other.
"""

from __future__ import annotations

import numpy as np
from numba import types

from equipoise.core.compiled import compiled

__all__ = ["compile_for", "measure", "mix", "move_along", "turn"]

BLOCK = 1024
"""Columns handled at once, so that what is summed up stays near."""


@compiled
def measure(z, f, halves, factor, size, length):  # type: ignore[no-untyped-def]
    """Write the lengths of `f - z` and of `f`, for each row."""
    rows, width = z.shape
    half = width // 2
    for r in range(rows):
        a, b = z[r], f[r]
        gaps = values = a.dtype.type(0)
        if halves:
            for i in range(half):
                gaps += (b[i] - a[i]) * (b[half + i] - a[half + i])
                values += b[i] * b[half + i]
        else:
            for i in range(width):
                gap = b[i] - a[i]
                gaps += gap * gap
                values += b[i] * b[i]
        # Rounding may make a product of nearly equal rows negative; NaN stays.
        gaps, values = gaps * factor, values * factor
        size[r] = 0 if gaps < 0 else np.sqrt(gaps)
        length[r] = 0 if values < 0 else np.sqrt(values)


@compiled
def subtract(a, b, out):  # type: ignore[no-untyped-def]
    for i in range(len(out)):
        out[i] = a[i] - b[i]


@compiled
def dot(a, b):  # type: ignore[no-untyped-def]
    found = a.dtype.type(0)
    for i in range(len(a)):
        found += a[i] * b[i]
    return found


@compiled
def put_multiple(factor, a, out):  # type: ignore[no-untyped-def]
    for i in range(len(out)):
        out[i] = factor * a[i]


@compiled
def add_multiple(factor, a, out):  # type: ignore[no-untyped-def]
    for i in range(len(out)):
        out[i] += factor * a[i]


@compiled
def solve_small(gram, right, matrix, found):  # type: ignore[no-untyped-def]
    """Write `gram^-1 right`, or `right` where rounding made the matrix singular.

    Elimination with pivots, as LAPACK's.
    """
    n = len(right)
    for i in range(n):
        found[i] = right[i]
        for j in range(n):
            matrix[i, j] = gram[i, j]
    for k in range(n):
        pivot = k
        for i in range(k + 1, n):
            if abs(matrix[i, k]) > abs(matrix[pivot, k]):
                pivot = i
        if matrix[pivot, k] == 0:
            for i in range(n):
                found[i] = right[i]
            return
        if pivot != k:
            for j in range(n):
                matrix[k, j], matrix[pivot, j] = matrix[pivot, j], matrix[k, j]
            found[k], found[pivot] = found[pivot], found[k]
        for i in range(k + 1, n):
            factor = matrix[i, k] / matrix[k, k]
            for j in range(k + 1, n):
                matrix[i, j] -= factor * matrix[k, j]
            found[i] -= factor * found[k]
    for k in range(n - 1, -1, -1):
        for j in range(k + 1, n):
            found[k] -= matrix[k, j] * found[j]
        found[k] /= matrix[k, k]


@compiled
def mix(  # type: ignore[no-untyped-def]
    z, f, halves, damping, values, gaps, places, gram, inverse, slot, count, diagonal, smallest, out
):
    """Make one step of Anderson acceleration; `anderson.py` says what the arguments are.

    `count` is the number of this step, from 1, and row `r` of the state has its memory at
    `places[r]` of `values` and `gaps`. The next iterate is written to `out`.
    """
    rows, width = z.shape
    memory = values.shape[1]
    columns = width // 2 if halves else width
    used = min(count, memory)
    second = np.empty(BLOCK, z.dtype)
    products, row = np.empty(memory), np.empty(memory)
    right, weight = np.empty(memory), np.empty(memory)
    matrix = np.empty((memory, memory))
    part = z.dtype.type(damping)
    for r in range(rows):
        place = places[r]
        a, b, value, gap = z[r], f[r], values[place, slot], gaps[place, slot]
        if damping == 1:
            for i in range(width):
                value[i] = b[i]
        else:
            for i in range(width):
                value[i] = a[i] + part * (b[i] - a[i])
        for j in range(memory):
            products[j] = 0.0
        for start in range(0, columns, BLOCK):
            stop = min(start + BLOCK, columns)
            first = gap[start:stop]
            subtract(b[start:stop], a[start:stop], first)
            other = first
            if halves:
                other = second[: stop - start]
                left, right_end = columns + start, columns + stop
                subtract(b[left:right_end], a[left:right_end], other)
            for j in range(used):
                products[j] += dot(gaps[place, j, start:stop], other)
        square = products[slot]
        inverse[r, slot] = 1 / np.sqrt(smallest if square < smallest else square)
        for j in range(memory):
            row[j] = products[j] * inverse[r, j] * inverse[r, slot]
        row[slot] = diagonal
        for j in range(memory):
            gram[r, slot, j] = gram[r, j, slot] = row[j]
        if count == 1:
            for i in range(width):
                out[r, i] = value[i]
            continue
        largest = inverse[r, 0]
        for j in range(1, memory):
            # A NaN among them stays, as it does in numpy.max.
            if not inverse[r, j] <= largest:
                largest = inverse[r, j]
        for j in range(memory):
            right[j] = inverse[r, j] / largest
        solve_small(gram[r], right, matrix, weight)
        total = 0.0
        for j in range(memory):
            weight[j] *= right[j]
            total += weight[j]
        for start in range(0, width, BLOCK):
            stop = min(start + BLOCK, width)
            for j in range(used):
                factor = z.dtype.type(weight[j] / total)
                if j == 0:
                    put_multiple(factor, values[place, j, start:stop], out[r, start:stop])
                else:
                    add_multiple(factor, values[place, j, start:stop], out[r, start:stop])


@compiled
def turn(gap, size, last_size, direction):  # type: ignore[no-untyped-def]
    """Turn the direction of conjugate gradient, in place."""
    rows, width = gap.shape
    for r in range(rows):
        a, b = gap[r], direction[r]
        factor = size[r] * size[r] / (last_size[r] * last_size[r])
        for i in range(width):
            b[i] = a[i] + factor * b[i]


@compiled
def move_along(  # type: ignore[no-untyped-def]
    z, gap, direction, product, size, next_z, next_size, length
):
    """Go along a direction of conjugate gradient, whose product with the Jacobian is given.

    Write the iterate, its gap over the last one, and the lengths of the gap and of the iterate.
    """
    rows, width = z.shape
    for r in range(rows):
        d, image = direction[r], product[r]
        curvature = d.dtype.type(0)
        for i in range(width):
            curvature += d[i] * (d[i] - image[i])
        # Without positive curvature the system is singular or indefinite along this direction:
        # stand still, and stall.
        step = size[r] * size[r] / curvature if curvature > 0 else d.dtype.type(0)
        a, b, c = z[r], gap[r], next_z[r]
        gaps = values = d.dtype.type(0)
        for i in range(width):
            value = a[i] + step * d[i]
            left = b[i] - step * (d[i] - image[i])
            c[i], b[i] = value, left
            values += value * value
            gaps += left * left
        next_size[r] = np.sqrt(gaps)
        length[r] = np.sqrt(values)


def compile_for(dtype: np.dtype) -> bool:
    """Compile every kernel for states of a dtype, or load what was compiled before.

    Return whether something had to be compiled.
    """
    number = types.float32 if dtype == np.float32 else types.float64
    row, table, cube = number[::1], number[:, ::1], number[:, :, ::1]
    small, smaller = types.float64[:, :, ::1], types.float64[:, ::1]
    yes, whole, real, places = types.boolean, types.int64, types.float64, types.int64[::1]
    # fmt: off
    measure.compile((table, table, yes, number, row, row))
    mix.compile((table, table, yes, real, cube, cube, places, small, smaller, whole, whole, real,
                 real, table))
    turn.compile((table, row, row, table))
    move_along.compile((table, table, table, table, row, table, row, row))
    # fmt: on
    return any(kernel.stats.cache_misses for kernel in (measure, mix, turn, move_along))
