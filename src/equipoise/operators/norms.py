"""Proven bounds of operator norms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from equipoise.core.transforms import full_precision, outside_graphs
from equipoise.core.validate import require_size

__all__ = ["convolution_bound", "dense_norm"]

# Grid frequencies for each step of a kernel's length: at most cos(pi / 24)**-2 - 1 = 1.73 % of
# slack.
DENSITY = 12
LANCZOS = 256  # the size from which Lanczos steps cost less than all eigenvectors
STEPS = 64  # Lanczos steps after which all eigenvectors are the cheaper way
POWER = 6  # double power iterations that tell which matrix of many may be the largest
# Between the frequencies of a grid that are looked at first; prime to the length of its rows, hence
# spread evenly.
STRIDE = 5
SCREEN = 1e-3  # well above the relative rounding errors of a Cholesky factorisation in float32
MARGIN = 1e-12  # and in float64
MAX_ENTRIES = (
    2**16
)  # of the matrices that are looked at together; with more, the time goes into getting memory


@outside_graphs
def dense_norm(W: Tensor) -> Tensor:
    """Return the spectral norm of a matrix, its largest singular value.

    `|W| = max_v |W v| / |v|`, attained at the top eigenvector of the smaller Gram matrix `G`. A
    large `G` gets it from Lanczos steps, followed by a Cholesky factorisation of
    `(1 + eps) |W v|^2 I - G`, which exists only if no eigenvalue was missed (Golub & Van Loan,
    2013, chapters 4 and 10); otherwise all eigenvectors are computed. The gradient is `u v^T` with
    the top singular vectors, a subgradient where they are not unique, and zero at zero. Second
    derivatives are right too.

    All work is done in float64. The result is rounded up by two units of its own precision and
    `4 min(n, m)` of float64's, so that it is an upper bound despite rounding. It is NaN if an entry
    is not finite.

    Args:
        W: Shape (n, m), real or complex.
    """
    if W.dim() != 2 or not W.numel():
        raise ValueError(
            f"dense_norm.W must be a matrix with at least one entry; got shape {tuple(W.shape)}."
        )
    size = W.detach().abs().amax().double()
    size = torch.where(size > 0, size, 1.0)
    scaled = (
        W.to(torch.promote_types(W.dtype, torch.float64)) / size
    )  # squares of entries must neither overflow nor vanish
    tall = scaled if W.shape[0] >= W.shape[1] else scaled.mT
    slack = 4 * tall.shape[1] * torch.finfo(torch.float64).eps + 2 * torch.finfo(W.dtype).eps
    v: Tensor = _TopVector.apply(tall.mH @ tall, slack)  # type: ignore[no-untyped-call]
    norm = torch.linalg.vector_norm(tall @ v) / torch.linalg.vector_norm(v)
    rounded: Tensor = (1 + slack) * size * norm
    return rounded.to(W.dtype.to_real())


@outside_graphs
def convolution_bound(
    kernel: Tensor, *, groups: int = 1, circular_size: tuple[int, int] | None = None
) -> Tensor:
    """Return an upper bound of a two-dimensional convolution's norm, at any image size.

    It holds for zero and for circular padding.

    On images without borders the norm is `sup_w |K(w)|` over all frequencies, with the matrices
    `K(w) = sum_t K_t exp(-i w t)` on channels. Zero padding restricts that convolution to a part of
    the plane, circular padding to some of the frequencies, a stride to some of the outputs, so all
    of them have at most this norm. `u^H K(w) v` is a trigonometric polynomial of degree
    `(h - 1) / 2` and `(w - 1) / 2` about its centre, so on a grid of `N x M` frequencies (Riesz,
    1914; Ehlich & Zeller, 1964)

        sup_w |K(w)| <= max_grid |K(w)| / (cos(pi (h - 1) / 2N) cos(pi (w - 1) / 2M)).

    With `N = 12 (h - 1)` this is at most 1.8 % above the supremum, and for kernels of height and
    width 1 it is the norm. The norm of the kernel reshaped to (out, in h w) bounds nothing.

    The largest matrix of the grid is found without recording gradients, and Cholesky factorisations
    prove of the others that they are not larger. The gradient is that of the largest one's norm.
    The result is NaN if an entry is not finite.

    Args:
        kernel: Shape (out, in / groups, h, w).
        groups: As of `torch.nn.Conv2d`. The bound is the largest of the groups' bounds.
        circular_size: Height and width of the images, if padding is circular and the stride is 1.
            The norm is then the maximum over `height x width` frequencies (Sedghi et al., 2019),
            which is returned without any slack but for rounding.
    """
    if kernel.dim() != 4 or not kernel.numel():
        raise ValueError(
            f"convolution_bound.kernel must have shape (out, in, h, w); got {tuple(kernel.shape)}."
        )
    height, width = kernel.shape[2:]
    if groups < 1 or len(kernel) % groups:
        raise ValueError(
            f"convolution_bound.groups must divide the {len(kernel)} output channels; got {groups}."
        )
    if groups == height == width == 1:
        return dense_norm(kernel.flatten(1))
    slack = 1 + MARGIN + 2 * torch.finfo(kernel.dtype).eps
    if circular_size is None:
        rows, columns = DENSITY * (height - 1), DENSITY * (width - 1)
        slack /= math.cos(math.pi / (2 * DENSITY)) ** ((height > 1) + (width > 1))
    else:
        require_size("convolution_bound.circular_size", circular_size)
        rows, columns = circular_size
    # A kernel of height or width 1 is the same at all frequencies of that axis.
    grid = (rows if height > 1 else 1, columns if width > 1 else 1)
    taps = torch.stack(kernel.double().chunk(groups))
    waves: Tensor = _WorstFrequency.apply(taps, grid)  # type: ignore[no-untyped-call]
    matrix = torch.complex(
        *(torch.einsum("goihw,ghw->oi", taps, part) for part in (waves.real, waves.imag))
    )
    return (slack * dense_norm(matrix)).to(kernel.dtype)


class _TopVector(torch.autograd.Function):
    """A unit eigenvector `v` of the largest eigenvalue `l` of a Gram matrix `G`.

    Its derivative is `dv = (l - G)^+ dG v`.

    Only for functions that are stationary in `v`: their gradients do not depend on this derivative,
    so it is worked out only when gradients are to be differentiated again.
    """

    @staticmethod
    def forward(gram: Tensor, slack: float) -> Tensor:
        with full_precision(gram.device.type):
            return _find_top(gram, slack)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.save_for_forward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, None]:
        if not torch.is_grad_enabled():
            return None, None
        gram, v = ctx.saved_tensors
        return torch.outer(_respond(gram, g), v.conj()), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _slack: None) -> Tensor:
        gram, v = ctx.saved_tensors
        return _respond(gram, tangent @ v)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int, None], gram: Tensor, slack: float
    ) -> tuple[Tensor, int]:
        members = (gram.select(in_dims[0], member) for member in range(info.batch_size))
        return torch.stack([_TopVector.apply(member, slack) for member in members]), 0  # type: ignore[no-untyped-call]


def _respond(gram: Tensor, g: Tensor) -> Tensor:
    """`(l - G)^+ g`; eigenvalues equal to the largest, `l`, up to rounding count as `l`."""
    values, vectors = torch.linalg.eigh(gram.detach())
    gaps = values[-1] - values
    inverse = torch.where(gaps > MARGIN**0.5 * values[-1], gaps, torch.inf).reciprocal()
    response: Tensor = vectors @ (inverse * (vectors.mH @ g))
    return response


def _find_top(gram: Tensor, slack: float) -> Tensor:
    """A unit eigenvector of the largest eigenvalue: `v^H G v` up to a factor of `1 + slack`."""
    if not bool(gram.isfinite().all()):
        return torch.full_like(gram[0], torch.nan)
    if len(gram) >= LANCZOS:
        v = _lanczos(gram, slack / 4)
        if v is not None and bool(
            _at_most(gram, (1 + slack) * float(torch.vdot(v, gram @ v).real))
        ):
            return v
    vectors: Tensor = torch.linalg.eigh(gram)[1]
    return vectors[:, -1].clone()  # a view could not carry a tangent of its own


def _lanczos(gram: Tensor, tolerance: float) -> Tensor | None:
    """The top eigenvector by Lanczos steps, or nothing if they do not suffice.

    Each new vector is made orthogonal to all before it, twice, so that no eigenvalue appears again.
    A Ritz pair with residual `r` and a gap `d` to the next has an error of at most `r`, and about
    `r^2 / d`.
    """
    basis = gram.new_zeros(STEPS, len(gram))
    basis[0] = _start(gram)
    for count in range(1, STEPS + 1):
        known = basis[:count]
        new = gram @ known[-1]
        for _ in range(2):
            new = new - known.mT @ (known.conj() @ new)
        length = float(torch.linalg.vector_norm(new))
        if count % 8 == 0 or length == 0:
            values, vectors = torch.linalg.eigh(known.conj() @ gram @ known.mT)
            residual = length * float(vectors[-1, -1].abs())
            gap = float(values[-1] - values[-2]) if count > 1 else 0.0
            if residual**2 <= tolerance * float(values[-1]) * max(residual, gap):
                return functional.normalize(known.mT @ vectors[:, -1], dim=0)
        if count < STEPS:
            basis[count] = new / length
    return None


def _start(grams: Tensor) -> Tensor:
    """A random unit vector, always the same and without a trace in the global generator."""
    v = torch.randn(
        grams.shape[-1], dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    return functional.normalize(v, dim=0).to(grams)


def _at_most(grams: Tensor, level: float) -> Tensor:
    """Whether all eigenvalues of Hermitian matrices are below a level, proven by Cholesky."""
    shifted = -grams
    shifted.diagonal(dim1=-2, dim2=-1).add_(level)
    proven: Tensor = torch.linalg.cholesky_ex(shifted)[1] == 0
    return proven


class _WorstFrequency(torch.autograd.Function):
    """The waves `exp(-i w t)` at the frequency `w` of a grid where `|K(w)|` is largest.

    They are zero in all groups but the worst.
    """

    @staticmethod
    def forward(taps: Tensor, grid: tuple[int, int]) -> Tensor:
        with full_precision(taps.device.type):
            group, frequency = _find_worst(taps, grid)
        height, width = taps.shape[3:]
        phases = _lattice(range(height), range(width)) @ frequency
        waves = torch.zeros(len(taps), height, width, dtype=torch.complex128, device=taps.device)
        waves[group] = torch.from_numpy(np.exp(-1j * phases)).view(height, width)
        return waves

    @staticmethod
    def setup_context(ctx: Any, _inputs: tuple[Tensor, tuple[int, int]], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(_ctx: Any, _g: Tensor) -> tuple[None, None]:
        return None, None

    @staticmethod
    def jvp(_ctx: Any, *_tangents: Any) -> None:
        return None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int, None], taps: Tensor, grid: tuple[int, int]
    ) -> tuple[Tensor, int]:
        members = (taps.select(in_dims[0], member) for member in range(info.batch_size))
        return torch.stack([_WorstFrequency.apply(member, grid) for member in members]), 0  # type: ignore[no-untyped-call]


def _find_worst(taps: Tensor, grid: tuple[int, int]) -> tuple[int, NDArray[np.float64]]:
    """The group and the frequency of a grid where `|K(w)|` is largest."""
    frequencies = _half_grid(grid)
    size = float(taps.abs().amax())
    if size == 0 or not math.isfinite(size):
        return 0, frequencies[0]  # all are equal, or the bound is NaN anyway
    even, odd = _correlate(taps / size)
    groups, side = even.shape[1:3]
    even, odd = even.flatten(1), odd.flatten(1)
    height, width = taps.shape[3:]
    steps = _lattice(range(1 - height, height), range(1 - width, width))[-len(even) :]
    phases = torch.from_numpy(frequencies @ steps.T).to(taps.device)
    if side == 1:
        worst = int((phases.cos() @ even).argmax())
        return worst % groups, frequencies[worst // groups]
    largest, worst = 0.0, 0
    chunk = min(math.ceil(len(phases) / STRIDE), max(4, MAX_ENTRIES // (groups * side**2)))
    for index in torch.split(
        torch.arange(len(phases) * groups, device=taps.device), chunk * groups
    ):
        some = phases[index[::groups] // groups]
        grams = torch.complex(some.cos() @ even, -some[:, 1:].sin() @ odd).view(-1, side, side)
        if largest > 0:
            grams, index = _larger(grams, index, largest)
        while len(index):
            pick = int(_estimate(grams).argmax())
            largest, worst = max(
                (largest, worst), (float(torch.linalg.eigvalsh(grams[pick])[-1]), int(index[pick]))
            )
            done = index[pick]
            grams, index = _larger(grams, index, largest)
            grams, index = grams[index != done], index[index != done]
    return worst % groups, frequencies[worst // groups]


def _larger(grams: Tensor, index: Tensor, level: float) -> tuple[Tensor, Tensor]:
    """The Hermitian matrices not proven to have only eigenvalues up to a level.

    Float32 is faster, and leaves few of them.
    """
    for margin, dtype in ((-SCREEN, torch.complex64), (MARGIN, torch.complex128)):
        if len(index):
            unproven = ~_at_most(grams.to(dtype), (1 + margin) * level)
            grams, index = grams[unproven], index[unproven]
    return grams, index


def _half_grid(grid: tuple[int, int]) -> NDArray[np.float64]:
    """One of each pair `w` and `-w` of a grid's frequencies; a coarser grid first.

    A real kernel's matrices are conjugate at the two.
    """
    rows, columns = grid
    row, column = _lattice(range(rows), range(columns)).T
    first = row * columns + column <= (-row % rows) * columns + -column % columns
    half = 2 * math.pi * np.stack([row / rows, column / columns], axis=1)[first]
    return np.concatenate([half[start::STRIDE] for start in range(STRIDE)])


def _lattice(rows: range, columns: range) -> NDArray[np.float64]:
    """All pairs of a row and a column, in order; on the host, where small arrays cost less."""
    pairs: NDArray[np.float64] = (
        np.indices((len(rows), len(columns)), dtype=np.float64).reshape(2, -1).T
    )
    pairs += [rows.start, columns.start]
    return pairs


def _correlate(taps: Tensor) -> tuple[Tensor, Tensor]:
    """The coefficients of `K(w)^H K(w)` for the smaller side of a kernel.

    `K(w)^H K(w) = sum_s A_s cos(w s) - i B_s sin(w s)`.

    With `C_s = sum_t K_t^T K_(t+s)` they are `A_s = C_s + C_(-s)` and `B_s = C_s - C_(-s)` over
    half of the lags, and `A_0 = C_0`.
    """
    height, width = taps.shape[3:]
    taps = (
        (taps if taps.shape[1] >= taps.shape[2] else taps.transpose(1, 2))
        .permute(3, 4, 0, 1, 2)
        .contiguous()
    )
    lags = taps.new_zeros(
        2 * height - 1, 2 * width - 1, taps.shape[2], taps.shape[4], taps.shape[4]
    )
    for y in range(height):
        for x in range(width):
            lags[height - 1 - y : 2 * height - 1 - y, width - 1 - x : 2 * width - 1 - x] += (
                taps[y, x].mT @ taps
            )
    lags = lags.flatten(0, 1)
    zero = len(lags) // 2
    before, after = lags[:zero].flip(0), lags[zero + 1 :]
    return torch.cat([lags[zero, None], after + before]), after - before


def _estimate(grams: Tensor) -> Tensor:
    """Lower bounds of the largest eigenvalues, by power iteration."""
    grams = grams.to(torch.complex64)
    v = _start(grams).view(1, -1, 1).expand(len(grams), -1, 1)
    length = torch.ones(len(grams), device=grams.device)
    for _ in range(POWER):
        v = grams @ (grams @ (v / length.view(-1, 1, 1)))
        length = torch.linalg.vector_norm(torch.view_as_real(v), dim=(1, 2, 3)).clamp_min(
            1e-30
        )  # a matrix may be zero
    return length.sqrt()
