"""The symbol of a convolution on a grid of frequencies."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["FEW", "STRIDE", "KernelSymbol", "SeparableSymbol", "Symbol", "wave"]

FEW = 4  # matrices that are cheaper looked at one by one
# Between the frequencies of a grid that are looked at first; prime to the length of its rows, hence
# spread evenly.
STRIDE = 5


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

    def columns(self, kernels: Any) -> tuple[Tensor, Tensor] | None:
        """Return all these matrices in float32 as compiled kernels want them, if there is a way.

        That is the real and the imaginary parts of their lower triangles, row by row, shape
        (side (side + 1) / 2, matrices).

        Args:
            kernels: The module `symbol_kernels`.
        """
        return None

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
        even, odd, cosines, sines = self._coefficients(dtype)
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

    def columns(self, kernels: Any) -> tuple[Tensor, Tensor] | None:
        if self.groups > 1:
            return None
        width, side = self.extent[1], self.side
        cosines, sines = _lag_waves(self.grid, self.extent, torch.float32)
        shape = (2, cosines.shape[1], side * (side + 1) // 2)
        even, odd = torch.zeros(shape, dtype=torch.float32, device=self.device)
        for products in _products(self._taps.float(), width):
            kernels.add_lags(products[0].numpy(), side, width, even.numpy(), odd.numpy())
        even[0] /= 2
        return even.T @ cosines.T, odd.T @ sines.neg().T

    def _coefficients(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        if dtype not in self._known:
            self._known[dtype] = (
                *_correlate(self._taps.to(dtype), self.extent[1]),
                *(part.to(self.device) for part in _lag_waves(self.grid, self.extent, dtype)),
            )
        return self._known[dtype]

    def _direct(self, index: Tensor) -> Tensor:
        """The matrices of a few numbers, without the coefficients of all lags."""
        found, waves = [], _tap_waves(self.grid, self.extent).to(self.device)
        for number in index.tolist():
            taps = self._taps[number % self.groups].flatten(1)
            K = torch.complex(*(waves[number // self.groups] @ taps)).view(-1, self.side)
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
        if all(map(math.isfinite, sizes)):  # only the product is not: the norm may be still
            self.size = min(self.size, sys.float_info.max)
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
def _lag_waves(
    grid: tuple[int, int], extent: tuple[int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of `w s` over half of the lags `s` of a kernel, by frequencies."""
    height, width = extent
    steps = _lattice(range(1 - height, height), range(1 - width, width))
    phases = torch.from_numpy(half_grid(grid) @ steps[len(steps) // 2 :].T)
    return phases.cos().to(dtype), phases.sin().to(dtype)


@lru_cache(maxsize=16)
def _tap_waves(grid: tuple[int, int], extent: tuple[int, int]) -> Tensor:
    """Real and imaginary parts of `exp(-i w t)` over the taps `t`, shape (frequencies, 2, taps)."""
    phases = torch.from_numpy(half_grid(grid) @ _lattice(*map(range, extent)).T)
    return torch.stack([phases.cos(), -phases.sin()], dim=1)


def _lattice(rows: range, columns: range) -> NDArray[np.float64]:
    """All pairs of a row and a column, in order; on the host, where small arrays cost less."""
    pairs: NDArray[np.float64] = (
        np.indices((len(rows), len(columns)), dtype=np.float64).reshape(2, -1).T
    )
    pairs += [rows.start, columns.start]
    return pairs


def _products(taps: Tensor, width: int) -> Iterator[Tensor]:
    """The products `K_t^T K_u` of each row of taps `t` with it and later rows, in blocks."""
    groups, count, tall, side = taps.shape
    wide = taps.permute(0, 2, 1, 3).reshape(groups, tall, count * side)
    for start in range(0, count * side, width * side):
        yield wide[:, :, start : start + width * side].mT @ wide[:, :, start:]


def _correlate(taps: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """`A_s` and `B_s` of half of the lags, shape (lags, groups, side, side)."""
    groups, count, _, side = taps.shape
    lags = taps.new_zeros((count // width - 1) * (2 * width - 1) + width, groups, side, side)
    for products in _products(taps, width):
        blocks = products.view(groups, width, side, -1, side).permute(1, 3, 0, 2, 4)
        first, second = torch.triu_indices(*blocks.shape[:2], device=taps.device)
        lag = second // width * (2 * width - 1) + second % width - first
        lags.index_add_(0, lag, blocks[first, second])
    even, odd = lags + lags.mT, lags - lags.mT
    even[0] = lags[0]
    return even, odd
