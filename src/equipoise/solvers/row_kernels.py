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

__all__ = [
    "compile_for",
    "end_rows",
    "go_on",
    "measure",
    "mix",
    "mix_on",
    "move_along",
    "on_their_way",
    "turn",
]

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
def take_row(  # type: ignore[no-untyped-def]
    a, b, halves, damping, values, gaps, gram, inverse, slot, used, diagonal, smallest, work
):
    """Put a point of one row into a slot; return the squares of its gap and of its value.

    `values`, `gaps`, `gram` and `inverse` are what is remembered of the row.
    """
    memory, width = values.shape
    second, products = work
    columns = width // 2 if halves else width
    value, gap = values[slot], gaps[slot]
    if damping == 1:
        for i in range(width):
            value[i] = b[i]
    else:
        part = a.dtype.type(damping)
        for i in range(width):
            value[i] = a[i] + part * (b[i] - a[i])
    for j in range(memory):
        products[j] = 0.0
    square = a.dtype.type(0)
    for start in range(0, columns, BLOCK):
        stop = min(start + BLOCK, columns)
        first = gap[start:stop]
        subtract(b[start:stop], a[start:stop], first)
        other, mirror = first, b[start:stop]
        if halves:
            other = second[: stop - start]
            left, right_end = columns + start, columns + stop
            subtract(b[left:right_end], a[left:right_end], other)
            mirror = b[left:right_end]
        square += dot(b[start:stop], mirror)
        for j in range(used):
            products[j] += dot(gaps[j, start:stop], other)
    own = products[slot]
    inverse[slot] = 1 / np.sqrt(smallest if own < smallest else own)
    for j in range(memory):
        products[j] *= inverse[j] * inverse[slot]
    products[slot] = diagonal
    for j in range(memory):
        gram[slot, j] = gram[j, slot] = products[j]
    return own, square


@compiled
def combine_row(values, gram, inverse, used, work, out):  # type: ignore[no-untyped-def]
    """Write the values of one row that are remembered, mixed."""
    memory, width = values.shape
    right, weight, matrix = work
    largest = inverse[0]
    for j in range(1, memory):
        # A NaN among them stays, as it does in numpy.max.
        if not inverse[j] <= largest:
            largest = inverse[j]
    for j in range(memory):
        right[j] = inverse[j] / largest
    solve_small(gram, right, matrix, weight)
    total = 0.0
    for j in range(memory):
        weight[j] *= right[j]
        total += weight[j]
    for start in range(0, width, BLOCK):
        stop = min(start + BLOCK, width)
        for j in range(used):
            factor = values.dtype.type(weight[j] / total)
            if j == 0:
                put_multiple(factor, values[j, start:stop], out[start:stop])
            else:
                add_multiple(factor, values[j, start:stop], out[start:stop])


@compiled
def mix(  # type: ignore[no-untyped-def]
    z, f, halves, damping, values, gaps, places, gram, inverse, slot, count, diagonal, smallest, out
):
    """Make one step of Anderson acceleration; `anderson.py` says what the arguments are.

    `count` is the number of this step, from 1, and row `r` of the state has its memory at
    `places[r]` of `values` and `gaps`. The next iterate is written to `out`.
    """
    memory = values.shape[1]
    used = min(count, memory)
    taking = np.empty(BLOCK, z.dtype), np.empty(memory)
    mixing = np.empty(memory), np.empty(memory), np.empty((memory, memory))
    for r in range(len(z)):
        place = places[r]
        take_row(
            z[r], f[r], halves, damping, values[place], gaps[place], gram[r], inverse[r], slot,
            used, diagonal, smallest, taking,
        )  # fmt: skip
        if count == 1:
            out[r] = values[place, slot]
        else:
            combine_row(values[place], gram[r], inverse[r], used, mixing, out[r])


@compiled
def on_their_way(size, scale, best, guard, tolerance, progress):  # type: ignore[no-untyped-def]
    """Return whether each residual has fallen and none has reached its target."""
    for r in range(len(size)):
        if not (guard[r] + tolerance * scale[r] < size[r] < progress * best[r]):
            return False
    return True


@compiled
def end_rows(  # type: ignore[no-untyped-def]
    residual, scale, going, mark, start, first, worst, samples, absolute, tolerance, progress,
    settled, fall, eps, low, high, growth, step, evaluations, z, unit, numbers, counts, starts,
    value,
):  # fmt: skip
    """Judge rows, and write down which have converged, if nothing else is to be seen.

    Return how many have, or -1 if a row at work has not fallen, or is in one of the rare cases;
    then nothing but `unit` is written. `Monitor` and `Measure` say what is judged, and how.

    `numbers` gets relative residuals and what they are relative to, `counts` steps and evaluations,
    `starts` sizes of the start and `value` iterates, each by sample.
    """
    most, ended = min(high, growth), 0
    for r in range(len(residual)):
        now, size, least = residual[r], scale[r], settled * start[r]
        unit[r] = least if size < least else size
        if not going[r]:
            continue
        if not (low < now < growth and size < most and start[r] < np.inf):
            return -1
        if not now < progress * mark[r]:
            return -1
        if now <= absolute + tolerance * unit[r]:
            ended += 1
            if size > start[r]:
                largest = worst[r] if worst[r] > start[r] else start[r]
                enough = max(absolute + tolerance * largest, fall * first[r])
                if now > enough or (size > 2 * start[r] and eps * size > enough):
                    return -1
    if ended:
        for r in range(len(residual)):
            if going[r] and residual[r] <= absolute + tolerance * unit[r]:
                sample, going[r] = samples[r], False
                numbers[0, sample], numbers[1, sample] = residual[r] / unit[r], unit[r]
                counts[0, sample], counts[1, sample] = step, evaluations
                starts[sample] = start[r]
                value[sample] = z[r]
    return ended


@compiled
def mix_on(  # type: ignore[no-untyped-def]
    z, f, halves, factor, damping, values, gaps, places, gram, inverse, count, diagonal, smallest,
    mark, tolerance, progress, guard, best, seen, size, scale, out,
):  # fmt: skip
    """Look at a point, and make a step of Anderson acceleration if the look decides nothing.

    `count` steps were made before. Return 0 if the look, unless `seen`, may decide something, 1 if
    a rest is due, and else 2. What is remembered has the point in any case; to put it there again
    changes nothing. Writes residuals and scales, `best`, and `mark`.
    """
    memory = values.shape[1]
    slot, used = count % memory, min(count + 1, memory)
    taking = np.empty(BLOCK, z.dtype), np.empty(memory)
    for r in range(len(z)):
        place = places[r]
        gaps_square, square = take_row(
            z[r], f[r], halves, damping, values[place], gaps[place], gram[r], inverse[r], slot,
            used, diagonal, smallest, taking,
        )  # fmt: skip
        # Rounding may make a product of nearly equal rows negative; NaN stays.
        size[r] = 0 if gaps_square < 0 else np.sqrt(gaps_square * factor)
        scale[r] = 0 if square < 0 else np.sqrt(square * factor)
    if not seen:
        if not on_their_way(size, scale, best, guard, tolerance, progress):
            return 0
        best[:] = size
    if slot == 0:
        for r in range(len(size)):
            if not size[r] < 0.9 * mark[r]:
                return 1
        mark[:] = size
    mixing = np.empty(memory), np.empty(memory), np.empty((memory, memory))
    for r in range(len(z)):
        place = places[r]
        if count == 0:
            out[r] = values[place, slot]
        else:
            combine_row(values[place], gram[r], inverse[r], used, mixing, out[r])
    return 2


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


@compiled
def go_on(  # type: ignore[no-untyped-def]
    z, gap, direction, product, size, floor, forcing, tolerance, progress, guard, best, next_z,
    next_size, length, scale,
):  # fmt: skip
    """Go along a direction of conjugate gradient, look, and turn if the look decides nothing.

    Return whether it does not. Writes as `move_along` and `turn` do, and scales and `best`.
    """
    move_along(z, gap, direction, product, size, next_z, next_size, length)
    for r in range(len(size)):
        scale[r] = floor[r] if forcing or length[r] < floor[r] else length[r]
    if not on_their_way(next_size, scale, best, guard, tolerance, progress):
        return False
    best[:] = next_size
    turn(gap, next_size, size, direction)
    return True


def compile_for(dtype: np.dtype) -> bool:
    """Compile every kernel for states of a dtype, or load what was compiled before.

    Return whether something had to be compiled.
    """
    number = types.float32 if dtype == np.float32 else types.float64
    row, table, cube = number[::1], number[:, ::1], number[:, :, ::1]
    small, smaller, line = types.float64[:, :, ::1], types.float64[:, ::1], types.float64[::1]
    yes, whole, real, places = types.boolean, types.int64, types.float64, types.int64[::1]
    flags, counts = types.boolean[::1], types.int64[:, ::1]
    # fmt: off
    measure.compile((table, table, yes, number, row, row))
    mix.compile((table, table, yes, real, cube, cube, places, small, smaller, whole, whole, real,
                 real, table))
    mix_on.compile((table, table, yes, real, real, cube, cube, places, small, smaller, whole, real,
                    real, line, real, real, line, line, yes, row, row, table))
    end_rows.compile((row, row, flags, line, line, line, line, places, real, real, real, real, real,
                      real, real, real, real, whole, whole, table, line, smaller, counts, line,
                      table))
    turn.compile((table, row, row, table))
    move_along.compile((table, table, table, table, row, table, row, row))
    go_on.compile((table, table, table, table, row, row, yes, real, real, line, line, table, row,
                   row, row))
    # fmt: on
    kernels = (measure, mix, end_rows, mix_on, turn, move_along, go_on)
    return any(kernel.stats.cache_misses for kernel in kernels)
