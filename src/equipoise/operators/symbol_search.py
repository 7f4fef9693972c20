"""Where on a grid of frequencies the norm of a convolution's symbol is largest."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.core.kernels import find_compiled
from equipoise.operators.norms import MARGIN, at_most, start_vector
from equipoise.operators.symbol import FEW, STRIDE, Symbol

__all__ = ["find_worst", "is_below"]

POWER = 4  # double power iterations that tell which matrix of many may be the largest
SCREEN = 1e-3  # well above the relative rounding errors of a Cholesky factorisation in float32
MAX_ENTRIES = (
    2**16
)  # of the matrices that are looked at together; with more, the time goes into getting memory
KERNELS = "equipoise.operators.symbol_kernels"
# What compiled kernels are for: small matrices, all of them at once. Up to this side the rounding
# errors of a factorisation are below SCREEN even if all add up: 2 n (n + 2) units of float32.
MAX_SIDE, MAX_COLUMNS = 64, 2**22
LANES = 64  # matrices that kernels factorise at once
CLIMB = 0.02  # by which levels first rise that tell which matrix is the largest


def find_worst(symbol: Symbol) -> tuple[int, NDArray[np.float64]]:
    """Return the group and the frequency of the grid where `|K(w)|` is largest.

    Cholesky factorisations prove of all others that they are not larger, in float32 where that is
    enough.
    """
    if symbol.size == 0 or not math.isfinite(symbol.size):
        return 0, symbol.frequencies[0]  # all are equal, or the bound is NaN anyway
    numbers, worst = torch.arange(len(symbol), device=symbol.device), 0
    if symbol.side == 1:
        worst = int(symbol.grams(numbers, torch.float64).real.argmax())
    else:
        error = symbol.error()
        largest, worst, rest = _narrow(symbol, numbers, error)
        for index in _chunks(symbol, rest):
            grams = symbol.grams(index, torch.float32)
            left = _screen(grams, largest, error)
            grams, index = grams[left], index[left]
            while len(index):
                pick = _pick(grams, first=largest == 0)
                value = _largest(symbol, int(index[pick]))
                rises = value > (1 + SCREEN) * largest
                largest, worst = max((largest, worst), (value, int(index[pick])))
                left = _screen(grams, largest, error)
                left[pick] = False
                grams, index = grams[left], index[left]
                if len(index) and not rises:  # float32 tells no more
                    left = _unproven(symbol, index, largest)
                    grams, index = grams[left], index[left]
    return worst % symbol.groups, symbol.frequencies[worst // symbol.groups]


def is_below(symbol: Symbol, level: float) -> bool:
    """Return whether `|K(w)| <= level` is proven at all frequencies of the grid."""
    if symbol.size == 0 or not math.isfinite(symbol.size):
        return symbol.size == 0
    # Far above any norm of matrices of entries up to 1; its square is a number of float32.
    ratio = min(level / symbol.size, 1e18)
    square, error = ratio**2 * (1 - 2 * MARGIN), symbol.error()
    numbers = torch.arange(len(symbol), device=symbol.device)
    columns = _Columns.of(symbol)
    if columns is not None:
        columns.prove(_reduced(square, error))
        left = numbers[columns.left(_reduced(square, error))]
        return not len(left) or not bool(_unproven(symbol, left, square).any())
    for index in _chunks(symbol, numbers):
        left = index[_screen(symbol.grams(index, torch.float32), square, error)]
        if len(left) and bool(_unproven(symbol, left, square).any()):
            return False
    return True


def _narrow(symbol: Symbol, numbers: Tensor, error: float) -> tuple[float, int, Tensor]:
    """The largest eigenvalue that compiled kernels find, its matrix, and which may be larger."""
    columns = _Columns.of(symbol)
    if columns is None:
        return 0.0, 0, numbers
    worst = columns.guess()
    largest = _largest(symbol, worst)
    columns.prove(_reduced(largest, error))
    columns.climb(_reduced(largest, error))
    looked = {worst, columns.highest()}
    for number in looked - {worst}:
        largest, worst = max((largest, worst), (_largest(symbol, number), number))
    columns.prove(_reduced(largest, error))
    rest = numbers[
        [number for number in columns.left(_reduced(largest, error)) if number not in looked]
    ]
    if len(rest):  # else each of many that are about as large would be looked at for itself
        rest = rest[_unproven(symbol, rest, largest)]
    if len(rest) <= FEW:
        for number in rest.tolist():
            largest, worst = max((largest, worst), (_largest(symbol, number), number))
        rest = rest[:0]
    return largest, worst, rest


class _Columns:
    """All matrices of a symbol side by side, as compiled kernels want them.

    For each the lowest level that it was proven to be below is kept.
    """

    def __init__(self, kernels: Any, side: int, real: Tensor, imaginary: Tensor) -> None:
        self._kernels, self._side = kernels, side
        self._parts = real.numpy(), imaginary.numpy()
        self._proven = np.full(real.shape[1], np.inf, dtype=np.float64)

    @classmethod
    def of(cls, symbol: Symbol) -> _Columns | None:
        """The matrices of a symbol, if kernels are to work on them."""
        entries = symbol.side * (symbol.side + 1) // 2
        if symbol.side > MAX_SIDE or entries * len(symbol) > MAX_COLUMNS:
            return None
        like = torch.empty(entries, len(symbol), dtype=torch.float32, device=symbol.device)
        kernels = find_compiled(like, KERNELS)
        columns = kernels and symbol.columns(kernels)
        return columns and cls(kernels, symbol.side, *columns)

    def guess(self) -> int:
        """The largest one by the lengths of their entries."""
        sizes = np.empty(len(self._proven), dtype=np.float32)
        self._kernels.measure(*self._parts, sizes)
        return int(sizes.argmax())

    def highest(self) -> int:
        """The one that no level or the highest one was proven for."""
        return int(self._proven.argmax())

    def left(self, level: float) -> NDArray[np.int64]:
        """Those that are not yet proven to be below a level."""
        return np.flatnonzero(~(self._proven <= level))

    def prove(self, level: float) -> None:
        """Prove of all that are left that they are below a level, where that succeeds."""
        if level > 0:
            self._find_above(self.left(level), np.array([level]))

    def climb(self, level: float) -> None:
        """Prove that they are below higher levels, until one is left or all are about as large."""
        left, step = self.left(level), CLIMB
        while len(left) > 1 and step > SCREEN and level > 0:
            # As many levels as fit into what is factorised at once.
            count = max(1, LANES // len(left))
            levels = level * (1 + step * np.arange(1, count + 1, dtype=np.float64))
            above = self._find_above(left, levels)
            passed = int(above.any(axis=0).sum())
            if passed:
                level, left = float(levels[passed - 1]), left[above[:, passed - 1]]
            step = 2 * step if passed == count else step / (1 + count)

    def _find_above(
        self, numbers: NDArray[np.int64], levels: NDArray[np.float64]
    ) -> NDArray[np.bool_]:
        """Which matrices are not proven to be below each of some levels."""
        above = np.empty((len(numbers), len(levels)), dtype=np.bool_)
        pairs = numbers.repeat(len(levels)), np.tile(levels.astype(np.float32), len(numbers))
        self._kernels.find_unproven(*self._parts, self._side, *pairs, above.reshape(-1))
        lowest = np.where(above, np.inf, levels).min(axis=1)
        self._proven[numbers] = np.minimum(self._proven[numbers], lowest)
        return above


def _chunks(symbol: Symbol, numbers: Tensor) -> tuple[Tensor, ...]:
    rows = max(4, MAX_ENTRIES // (symbol.groups * symbol.side**2))
    chunk = min(math.ceil(len(symbol.frequencies) / STRIDE), rows)
    return torch.split(numbers, chunk * symbol.groups) if len(numbers) else ()


def _reduced(level: float, error: float) -> float:
    """What float32 must prove, so that true eigenvalues are below a level despite its rounding."""
    return (1 - SCREEN) * level - error


def _screen(grams: Tensor, level: float, error: float) -> Tensor:
    """Whether matrices in float32 may have eigenvalues above a level."""
    level = _reduced(level, error)
    if level <= 0:
        return torch.ones(len(grams), dtype=torch.bool, device=grams.device)
    return ~at_most(grams, level)


def _largest(symbol: Symbol, number: int) -> float:
    """The largest eigenvalue of one matrix."""
    index = torch.tensor([number], device=symbol.device)
    return float(torch.linalg.eigvalsh(symbol.grams(index, torch.float64)[0])[-1])


def _unproven(symbol: Symbol, index: Tensor, level: float) -> Tensor:
    """Whether matrices have eigenvalues above a level, to the accuracy of float64."""
    return ~at_most(symbol.grams(index, torch.float64), (1 + MARGIN) * level)


def _pick(grams: Tensor, *, first: bool) -> int:
    """A matrix that is likely to have the largest eigenvalue: roughly at first, then by power."""
    if first or len(grams) <= FEW:
        return int(_lengths(grams).argmax())
    v = start_vector(grams).view(1, -1, 1).expand(len(grams), -1, 1)
    length = torch.ones(len(grams), dtype=torch.float32, device=grams.device)
    for _ in range(POWER):
        v = grams @ (grams @ (v / length.view(-1, 1, 1)))
        length = _lengths(v).clamp_min(1e-30)  # a matrix may be zero
    return int(length.argmax())


def _lengths(values: Tensor) -> Tensor:
    # Norms of complex tensors are several times slower than those of their parts.
    real = torch.view_as_real(values) if values.is_complex() else values
    lengths: Tensor = torch.linalg.vector_norm(real.flatten(1), dim=1)
    return lengths
