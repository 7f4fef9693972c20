"""Proofs about many small Hermitian matrices at once, as compiled loops; importing it needs Numba.

Of each matrix the lower triangle is given, row by row, real and imaginary parts apart: arrays of
shape (side (side + 1) / 2, matrices). The innermost loops run over matrices, so that they fill the
processor's vectors whatever the side, where LAPACK pays for each matrix anew.
"""

from __future__ import annotations

import numpy as np
from numba import types

from equipoise.core.compiled import compiled

__all__ = ["add_lags", "compile_for", "find_unproven", "measure"]

LANES = 64
"""Matrices handled at once; a constant, because the compiler then sees what cannot overlap."""


@compiled
def subtract_products(a, b, count, x):  # type: ignore[no-untyped-def]
    """Subtract `sum_k a_k conj(b_k)` from `x`: real parts of all lanes, then imaginary ones."""
    k = 0
    while k + 4 <= count:
        p, q = a[2 * LANES * k : 2 * LANES * (k + 4)], b[2 * LANES * k : 2 * LANES * (k + 4)]
        for i in range(LANES):
            x[i] -= (
                (p[i] * q[i] + p[LANES + i] * q[LANES + i])
                + (p[2 * LANES + i] * q[2 * LANES + i] + p[3 * LANES + i] * q[3 * LANES + i])
                + (p[4 * LANES + i] * q[4 * LANES + i] + p[5 * LANES + i] * q[5 * LANES + i])
                + (p[6 * LANES + i] * q[6 * LANES + i] + p[7 * LANES + i] * q[7 * LANES + i])
            )
            x[LANES + i] -= (
                (p[LANES + i] * q[i] - p[i] * q[LANES + i])
                + (p[3 * LANES + i] * q[2 * LANES + i] - p[2 * LANES + i] * q[3 * LANES + i])
                + (p[5 * LANES + i] * q[4 * LANES + i] - p[4 * LANES + i] * q[5 * LANES + i])
                + (p[7 * LANES + i] * q[6 * LANES + i] - p[6 * LANES + i] * q[7 * LANES + i])
            )
        k += 4
    while k < count:
        p, q = a[2 * LANES * k : 2 * LANES * (k + 1)], b[2 * LANES * k : 2 * LANES * (k + 1)]
        for i in range(LANES):
            x[i] -= p[i] * q[i] + p[LANES + i] * q[LANES + i]
            x[LANES + i] -= p[LANES + i] * q[i] - p[i] * q[LANES + i]
        k += 1


@compiled
def factorize(L, inverses, pivots, level, left):  # type: ignore[no-untyped-def]
    """Write which lanes' matrices `L + level I` have no Cholesky factorisation; `L` becomes it.

    A pivot that is not positive, or NaN, is one that proves nothing.
    """
    left[:] = False
    for row in range(len(inverses)):
        begin = LANES * row * (row + 1)
        a = L[begin : begin + 2 * LANES * (row + 1)]
        for column in range(row):
            before = LANES * column * (column + 1)
            x = a[2 * LANES * column : 2 * LANES * (column + 1)]
            subtract_products(a, L[before : before + 2 * LANES * column], column, x)
            inverse = inverses[column]
            for i in range(LANES):
                x[i] *= inverse[i]
                x[LANES + i] *= inverse[i]
        x = a[2 * LANES * row : 2 * LANES * row + LANES]
        for i in range(LANES):
            pivots[i] = level[i] + x[i]
        for column in range(row):
            x = a[2 * LANES * column : 2 * LANES * (column + 1)]
            for i in range(LANES):
                pivots[i] -= x[i] * x[i] + x[LANES + i] * x[LANES + i]
        inverse = inverses[row]
        for i in range(LANES):
            inverse[i] = 1 / np.sqrt(pivots[i]) if pivots[i] > 0 else np.float32(0)
        for i in range(LANES):
            left[i] |= not pivots[i] > 0


@compiled
def find_unproven(real, imaginary, side, numbers, levels, unproven):  # type: ignore[no-untyped-def]
    """Write which matrices are not proven to be below levels, for pairs of a number and a level."""
    entries = len(real)
    L = np.zeros(2 * LANES * entries, dtype=np.float32)
    inverses = np.empty((side, LANES), dtype=np.float32)
    level, pivots = np.ones((2, LANES), dtype=np.float32)
    left = np.empty(LANES, dtype=np.bool_)
    for start in range(0, len(numbers), LANES):
        lanes = numbers[start : start + LANES]
        level[: len(lanes)] = levels[start : start + LANES]
        for entry in range(entries):
            x = L[2 * LANES * entry : 2 * LANES * (entry + 1)]
            a, b = real[entry], imaginary[entry]
            for i in range(len(lanes)):
                x[i] = -a[lanes[i]]
                x[LANES + i] = -b[lanes[i]]
        factorize(L, inverses, pivots, level, left)
        unproven[start : start + LANES] = left[: len(lanes)]


@compiled
def measure(real, imaginary, sizes):  # type: ignore[no-untyped-def]
    """Write the sums of the squares of the triangles' entries."""
    sizes[:] = 0
    for entry in range(len(real)):
        a, b = real[entry], imaginary[entry]
        for i in range(len(sizes)):
            sizes[i] += a[i] * a[i] + b[i] * b[i]


@compiled
def add_lags(products, side, width, even, odd):  # type: ignore[no-untyped-def]
    """Add the products of one row of taps with it and later rows to the coefficients of their lags.

    Args:
        products: `K_t^T K_u` in blocks, `t` downwards.
        side: The side of the blocks.
        width: Taps in a row.
        even: Lower triangles of `C_s + C_s^T`, shape (lags, side (side + 1) / 2).
        odd: Lower triangles of `C_s - C_s^T`.
    """
    for t in range(width):
        for u in range(t, products.shape[1] // side):
            lag = u // width * (2 * width - 1) + u % width - t
            a, b, entry = even[lag], odd[lag], 0
            for i in range(side):
                for j in range(i + 1):
                    p = products[t * side + i, u * side + j]
                    q = products[t * side + j, u * side + i]
                    a[entry] += p + q
                    b[entry] += p - q
                    entry += 1


def compile_for(_dtype: np.dtype) -> bool:
    """Compile every kernel, or load what was compiled before.

    Return whether something had to be compiled.
    """
    row, table, whole = types.float32[::1], types.float32[:, ::1], types.int64
    find_unproven.compile((table, table, whole, types.int64[::1], row, types.boolean[::1]))
    measure.compile((table, table, row))
    add_lags.compile((table, whole, whole, table, table))
    return any(kernel.stats.cache_misses for kernel in (find_unproven, measure, add_lags))
