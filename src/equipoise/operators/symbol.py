"""The symbol of a convolution on a grid of frequencies, and where its norm is largest."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.operators.norms import MARGIN, at_most, start_vector

__all__ = ["KernelSymbol", "SeparableSymbol", "Symbol", "find_worst", "is_below"]

FEW = 4  # matrices that are cheaper looked at one by one
POWER = 4  # double power iterations that tell which matrix of many may be the largest
# Between the frequencies of a grid that are looked at first; prime to the length of its rows, hence
# spread evenly.
STRIDE = 5
SCREEN = 1e-3  # well above the relative rounding errors of a Cholesky factorisation in float32
MAX_ENTRIES = (
    2**16
)  # of the matrices that are looked at together; with more, the time goes into getting memory


class Symbol(ABC):
    """The matrices `K(w)` of a convolution, by frequencies `w` of a grid and groups of channels.

    They are numbered by `frequency * groups + group` and divided by `size`, so that squares neither
    overflow nor vanish.

    Attributes:
        frequencies: One of each pair `w` and `-w`, where a real kernel's matrices are conjugate.
        groups: Channel groups.
        side: The smaller side of the matrices.
        size: What the weights are divided by; not finite if they are not.
    """

    frequencies: NDArray[np.float64]
    groups: int
    side: int
    size: float
    device: torch.device

    def __len__(self) -> int:
        return len(self.frequencies) * self.groups

    @abstractmethod
    def grams(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Return matrices with the eigenvalues of `K(w)^H K(w)`, Hermitian, `side x side`.

        Args:
            index: The numbers of the matrices.
            dtype: The precision to work in, float32 or float64.
        """

    @abstractmethod
    def error(self) -> float:
        """Return how far, in norm, rounding may take the matrices of float32 from the true ones."""


class KernelSymbol(Symbol):
    """`K(w) = sum_t K_t exp(-i w t)`.

    `K(w)^H K(w) = sum_s A_s cos(w s) - i B_s sin(w s)`: with `C_s = sum_t K_t^T K_(t+s)` the
    coefficients are `A_s = C_s + C_s^T` and `B_s = C_s - C_s^T` over half of the lags, and
    `A_0 = C_0`.

    Args:
        taps: Shape (groups, out, in, h, w), float64.
        grid: Numbers of frequencies.
    """

    def __init__(self, taps: Tensor, grid: tuple[int, int]) -> None:
        self.grid, self.frequencies = grid, half_grid(grid)
        self.groups, self.device = len(taps), taps.device
        self.size = float(taps.abs().amax())
        self.side = min(taps.shape[1:3])
        self.extent = (taps.shape[3], taps.shape[4])
        tall = taps if taps.shape[1] >= taps.shape[2] else taps.transpose(1, 2)
        self._taps = tall.permute(0, 3, 4, 1, 2).flatten(1, 2) / (self.size or 1.0)
        self._known: dict[torch.dtype, tuple[Tensor, ...]] = {}

    def grams(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        if dtype == torch.float64 and len(index) <= FEW:
            return self._direct(index)
        if dtype not in self._known:
            self._known[dtype] = (
                *_correlate(self._taps.to(dtype), self.extent[1]),
                *(part.to(self.device, dtype) for part in _lag_waves(self.grid, self.extent)),
            )
        even, odd, cosines, sines = self._known[dtype]
        frequency = index // self.groups
        cosines, sines = cosines[frequency], sines[frequency]
        if self.groups == 1:
            parts = cosines @ even.flatten(1), sines @ odd.flatten(1)
        else:
            group = index % self.groups
            parts = (
                torch.einsum("nl,lnij->nij", cosines, even[:, group]),
                torch.einsum("nl,lnij->nij", sines, odd[:, group]),
            )
        return torch.complex(parts[0], -parts[1]).view(-1, self.side, self.side)

    def _direct(self, index: Tensor) -> Tensor:
        """The matrices of a few numbers, without the coefficients of all lags."""
        found = []
        for number in index.tolist():
            waves = torch.from_numpy(
                wave(self.frequencies[number // self.groups], *self.extent).reshape(-1)
            ).to(self.device)
            taps = self._taps[number % self.groups].flatten(1)
            parts = (torch.mv(taps.T, part) for part in (waves.real, waves.imag))
            K = torch.complex(*parts).view(-1, self.side)
            found.append(K.mH @ K)
        return torch.stack(found)

    def error(self) -> float:
        # Sums of `terms` products, each taken with a relative error of eps (Higham, 2002, 3.5).
        terms = self._taps.shape[2] + 3 * self._taps.shape[1] + 8
        lengths = torch.linalg.vector_norm(self._taps, dim=(2, 3)).sum(dim=1)
        return terms * torch.finfo(torch.float32).eps * float(lengths.amax()) ** 2


class SeparableSymbol(Symbol):
    """`K(w) = sum_j P_j diag(d_j(w))`: kernels for each channel, then a matrix over their results.

    `K(w)^H K(w)` has the entries `sum_jk (P_j^T P_k)_ab conj(d_ja) d_kb`. With one kernel for each
    channel it has the eigenvalues of the real matrix `diag(|d|) P^T P diag(|d|)`, because the
    phases of `d` are a unitary change of basis.

    Args:
        taps: Shape (channels, kernels for each, h, w), float64.
        mix: `P_j`, shape (out, channels, kernels for each), float64.
        grid: Numbers of frequencies.
    """

    groups = 1

    def __init__(self, taps: Tensor, mix: Tensor, grid: tuple[int, int]) -> None:
        self.frequencies, self.device = half_grid(grid), taps.device
        sizes = float(taps.abs().amax()), float(mix.abs().amax())
        self.size = sizes[0] * sizes[1] if min(sizes) > 0 else sum(sizes) * 0.0
        self.side = len(taps)
        phases = self.frequencies @ _lattice(*map(range, taps.shape[2:])).T
        waves = torch.from_numpy(np.exp(-1j * phases)).to(self.device)
        d = torch.einsum("ft,cjt->jfc", waves, (taps / (sizes[0] or 1.0)).flatten(2).to(waves))
        self._d = d.abs() if len(d) == 1 else d
        mix = (mix / (sizes[1] or 1.0)).permute(2, 0, 1)  # (kernels for each, out, channels)
        self._grams = mix[:, None].mT @ mix[None]

    def grams(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        d = self._d[:, index].to(dtype.to_complex() if self._d.is_complex() else dtype)
        parts = self._grams.to(dtype)
        total = torch.zeros((), dtype=d.dtype, device=self.device)
        for left, row in zip(d, parts, strict=True):
            for right, part in zip(d, row, strict=True):
                total = total + left.conj()[:, :, None] * part * right[:, None, :]
        return total

    def error(self) -> float:
        # The largest term's entries, each taken with a relative error of a few eps.
        terms = len(self._d) ** 2
        largest = float(self._grams.norm()) * float(self._d.abs().amax()) ** 2
        return (8 + terms) * terms * torch.finfo(torch.float32).eps * largest


def find_worst(symbol: Symbol) -> tuple[int, NDArray[np.float64]]:
    """Return the group and the frequency of the grid where `|K(w)|` is largest.

    Cholesky factorisations prove of all others that they are not larger, in float32 where that is
    enough.
    """
    if symbol.size == 0 or not math.isfinite(symbol.size):
        return 0, symbol.frequencies[0]  # all are equal, or the bound is NaN anyway
    worst = 0
    if symbol.side == 1:
        worst = int(symbol.grams(_numbers(symbol), torch.float64).real.argmax())
    else:
        largest, error = 0.0, symbol.error()
        for index in _chunks(symbol):
            grams = symbol.grams(index, torch.float32)
            left = _screen(grams, largest, error)
            grams, index = grams[left], index[left]
            while len(index):
                pick = _pick(grams, first=largest == 0)
                exact = symbol.grams(index[pick, None], torch.float64)[0]
                value = float(torch.linalg.eigvalsh(exact)[-1])
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
    square, error = (level / symbol.size) ** 2 * (1 - 2 * MARGIN), symbol.error()
    for index in _chunks(symbol):
        index = index[_screen(symbol.grams(index, torch.float32), square, error)]
        if len(index) and bool(_unproven(symbol, index, square).any()):
            return False
    return True


def _numbers(symbol: Symbol) -> Tensor:
    return torch.arange(len(symbol), device=symbol.device)


def _chunks(symbol: Symbol) -> tuple[Tensor, ...]:
    rows = max(4, MAX_ENTRIES // (symbol.groups * symbol.side**2))
    chunk = min(math.ceil(len(symbol.frequencies) / STRIDE), rows)
    return torch.split(_numbers(symbol), chunk * symbol.groups)


def _screen(grams: Tensor, level: float, error: float) -> Tensor:
    """Whether matrices in float32 may have eigenvalues above a level."""
    level = (1 - SCREEN) * level - error
    if level <= 0:
        return torch.ones(len(grams), dtype=torch.bool, device=grams.device)
    return ~at_most(grams, level)


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


@lru_cache(maxsize=16)
def half_grid(grid: tuple[int, int]) -> NDArray[np.float64]:
    """Return one of each pair `w` and `-w` of a grid's frequencies; a coarser grid first."""
    rows, columns = grid
    row, column = _lattice(range(rows), range(columns)).T
    first = row * columns + column <= (-row % rows) * columns + -column % columns
    half = 2 * math.pi * np.stack([row / rows, column / columns], axis=1)[first]
    return np.concatenate([half[start::STRIDE] for start in range(STRIDE)])


def wave(frequency: NDArray[np.float64], height: int, width: int) -> NDArray[np.complex128]:
    """Return `exp(-i w t)` over the taps `t` of a kernel."""
    phases = _lattice(range(height), range(width)) @ frequency
    waves: NDArray[np.complex128] = np.exp(-1j * phases).reshape(height, width)
    return waves


@lru_cache(maxsize=16)
def _lag_waves(grid: tuple[int, int], extent: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Cosines and sines of `w s` over half of the lags `s` of a kernel, by frequencies."""
    height, width = extent
    steps = _lattice(range(1 - height, height), range(1 - width, width))
    phases = torch.from_numpy(half_grid(grid) @ steps[len(steps) // 2 :].T)
    return phases.cos(), phases.sin()


def _lattice(rows: range, columns: range) -> NDArray[np.float64]:
    """All pairs of a row and a column, in order; on the host, where small arrays cost less."""
    pairs: NDArray[np.float64] = (
        np.indices((len(rows), len(columns)), dtype=np.float64).reshape(2, -1).T
    )
    pairs += [rows.start, columns.start]
    return pairs


def _correlate(taps: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """`A_s` and `B_s` of half of the lags, shape (lags, groups, side, side)."""
    groups, count, tall, side = taps.shape
    wide = taps.permute(0, 2, 1, 3).reshape(groups, tall, count * side)
    place = torch.arange(count, device=taps.device)
    place = place // width * (2 * width - 1) + place % width
    lags = taps.new_zeros(int(place[-1]) + 1, groups, side, side)
    for tap in range(count):
        products = taps[:, tap].mT @ wide[:, :, tap * side :]
        products = products.view(groups, side, count - tap, side).permute(2, 0, 1, 3)
        lags.index_add_(0, place[tap:] - place[tap], products)
    even, odd = lags + lags.mT, lags - lags.mT
    even[0] = lags[0]
    return even, odd
