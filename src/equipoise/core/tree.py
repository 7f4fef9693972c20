"""States and contexts as trees of tensors, and as the matrices that solvers see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.core.transforms import is_wrapped

__all__ = [
    "Layout",
    "Shared",
    "Structure",
    "Tree",
    "row_dot",
    "row_norm",
    "shares_memory",
    "to_numpy",
]

Tree = Any
"""One tensor, or tuples, lists and dictionaries of trees, and `None`.

A context may also hold `Shared` leaves, and constants: numbers, strings, `torch.Size`,
`torch.dtype` and `torch.device`.
"""


REAL = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
"""What a state may be made of, and the real numbers of the same precision."""

CONSTANT = (Number, str, torch.Size, torch.dtype, torch.device)


@dataclass(frozen=True)
class Shared:
    """A context tensor of the whole batch, such as weights normalised once for each solve.

    `Cell.inject` returns it wrapped; `Cell.step` receives the bare tensor. Its rows are never
    dropped.
    """

    tensor: Tensor


class Structure:
    """The shape of a tree: takes it apart into tensors and rebuilds it from others.

    Args:
        tree: The tree to describe.
        owner: Who made it, for error messages.
        constants: Whether it may hold constants, as contexts may.
    """

    def __init__(self, tree: Tree, owner: str = "tree", *, constants: bool = True) -> None:
        self.leaves: list[Tensor] = []
        self.shared: list[bool] = []
        self._owner = owner
        self._constants = constants
        self._build = self._describe(tree)

    def _describe(self, tree: Tree) -> Callable[[Sequence[Tensor]], Tree]:
        if isinstance(tree, Tensor | Shared):
            index = len(self.leaves)
            self.leaves.append(tree.tensor if isinstance(tree, Shared) else tree)
            self.shared.append(isinstance(tree, Shared))
            return lambda tensors: tensors[index]
        if tree is None or (self._constants and isinstance(tree, CONSTANT)):
            return lambda _: tree
        if isinstance(tree, dict):
            # Leaves in the order of the keys, so that equal dictionaries have equal leaves however
            # they were filled.
            items = {
                key: self._describe(tree[key])
                for key in sorted(tree, key=lambda key: (type(key).__name__, str(key)))
            }
            order = list(tree)
            return lambda tensors: {key: items[key](tensors) for key in order}
        if isinstance(tree, tuple | list):
            parts, made = [self._describe(value) for value in tree], type(tree)
            if hasattr(tree, "_fields"):
                return lambda tensors: made(*(build(tensors) for build in parts))
            return lambda tensors: made([build(tensors) for build in parts])
        kind = type(tree).__name__
        constants, remedy = " and constants" if self._constants else "", ""
        if not self._constants and isinstance(tree, CONSTANT):
            remedy = " Constants belong to the context."
        raise ValueError(
            f"{self._owner} must be a tensor or a tuple, list or dict of tensors{constants}; got "
            f"{'an' if kind[0] in 'aeiou' else 'a'} {kind} inside it.{remedy}"
        )

    def rebuild(self, tensors: Sequence[Tensor]) -> Tree:
        """Return the tree with `tensors` as its leaves, `Shared` wrappers removed."""
        return self._build(tensors)


class Layout:
    """Where each tensor of a state lies in a matrix of shape (samples, width).

    For a single contiguous tensor both directions are views, and likewise for images that lie
    channels-last in memory, as convolutions like them. A coupled state, whose samples depend on
    each other, is one row.

    The matrix is real. A complex tensor lies in it as pairs of real and imaginary part, twice as
    wide, which is the field over which its map can be linearised: the derivative of a map with
    conjugates or magnitudes in it, `f(z + t) = f(z) + A t + B conj(t) + o(t)`, is linear over the
    reals only, so that no complex matrix stands for it. Norms are those of the complex vectors, and
    inner products the real parts of theirs, `Re <a, b>`, for which the transposed Jacobian is what
    autograd computes.

    Args:
        state: A state whose tensors share batch size, precision and device. Complex and real
            tensors of one precision go together.
        coupled: Whether the whole batch is one problem.

    Attributes:
        batch: Samples of the state.
        dtype: Of the matrix: float32 or float64.
        device: Of the state and the matrix.
        columns: How many numbers of a row belong to each tensor of the state.
    """

    def __init__(self, state: Tree, *, coupled: bool = False) -> None:
        self._structure = Structure(state, "The state", constants=False)
        leaves = self._structure.leaves
        if not leaves or any(self._structure.shared):
            raise ValueError(
                "The state must hold at least one tensor, each batch first and none of them Shared."
            )
        first = leaves[0]
        for leaf in leaves:
            if leaf.layout is not torch.strided:
                raise ValueError(f"The state must be dense; got {leaf.layout}.")
            if leaf.dtype not in REAL:
                lower = leaf.dtype in (torch.float16, torch.bfloat16)
                hint = " For lower precision use torch.autocast." if lower else ""
                raise ValueError(
                    "The state must be float32, float64, complex64 or complex128; "
                    f"got {leaf.dtype}.{hint}"
                )
            if leaf.dim() == 0 or leaf.shape[0] != first.shape[0]:
                remedy = " For one problem give fixed_point or root coupled=True."
                raise ValueError(
                    "The state must be batch first, with one batch size for all of its tensors; "
                    f"got shapes {', '.join(str(tuple(other.shape)) for other in leaves)}."
                    + ("" if leaf.dim() else remedy)
                )
            if REAL[leaf.dtype] != REAL[first.dtype] or leaf.device != first.device:
                raise ValueError(
                    "The state must have one precision and one device; "
                    f"got {first.dtype} on {first.device} and {leaf.dtype} on {leaf.device}."
                )
        self.batch: int = first.shape[0]
        self.dtype, self.device = REAL[first.dtype], first.device
        self.coupled = coupled
        self._shapes = [leaf.shape[1:] for leaf in leaves]
        self._dtypes = [leaf.dtype for leaf in leaves]
        self._complex = [leaf.is_complex() for leaf in leaves]
        self._widths = [
            shape.numel() * (1 + pairs)
            for shape, pairs in zip(self._shapes, self._complex, strict=True)
        ]
        self.columns = tuple(width * (self.batch if coupled else 1) for width in self._widths)
        self._single = isinstance(state, Tensor)
        # Whether there is nothing to rearrange.
        self._matrix = self._single and first.dim() == 2 and not coupled and not self._complex[0]
        self._channels_last = (
            self._single
            and first.dim() == 4
            and not is_wrapped(first)  # vmap does not tell how its tensors lie
            and not first.is_contiguous()
            and first.is_contiguous(memory_format=torch.channels_last)
        )
        # A layout lives until backward; the state that it was read from need not.
        self._structure.leaves = []

    def pack(self, state: Tree, owner: str = "Cell.step", samples: int | None = None) -> Tensor:
        """Return a state as a matrix.

        Raises unless it has this layout's shapes, dtypes and device, and `samples` rows.
        """
        if self._single and isinstance(state, Tensor):
            if (
                self._matrix
                and state.dim() == 2
                and state.shape[1] == self._widths[0]
                and state.dtype is self.dtype
                and state.device == self.device
                and (samples is None or state.shape[0] == samples)
            ):
                return state
            leaves = [state]
        else:
            leaves = self._check_structure(state, owner)
        rows = leaves[0].shape[0] if leaves[0].dim() else -1
        for leaf, shape, dtype in zip(leaves, self._shapes, self._dtypes, strict=True):
            if leaf.shape[1:] != shape or leaf.dim() == 0 or leaf.shape[0] != rows:
                wanted = f"(batch, {', '.join(map(str, shape))})" if shape else "(batch,)"
                raise ValueError(
                    f"{owner} must return the shape of its state; got {tuple(leaf.shape)} for "
                    f"a state of shape {wanted}."
                )
            if leaf.dtype != dtype and (
                leaf.is_complex() != dtype.is_complex
                or not torch.is_autocast_enabled(leaf.device.type)
            ):
                raise ValueError(
                    f"{owner} must keep the dtype of its state; got {leaf.dtype} for a state "
                    f"of {dtype}."
                )
            if leaf.device != self.device:
                raise ValueError(
                    f"{owner} must stay on the device of its state; got {leaf.device} for a "
                    f"state on {self.device}."
                )
        if self.coupled and rows != self.batch:
            raise ValueError(
                f"{owner} must keep the batch size of a coupled state; got {rows} for {self.batch}."
            )
        count = 1 if self.coupled else rows
        if samples is not None and count != samples:
            raise ValueError(
                f"{owner} must keep the number of samples of its state; got {rows} for {samples}."
            )
        if len(leaves) == 1:
            leaf = leaves[0].permute(0, 2, 3, 1) if self._channels_last else leaves[0]
            leaf = _as_real(leaf, alone=True) if leaf.is_complex() else leaf
            return leaf.reshape(count, -1 if rows else self.width).to(self.dtype)
        # The flattened width is written out because -1 is ambiguous for an empty batch.
        scale = rows if self.coupled else 1
        flat = [
            (_as_real(leaf, alone=False) if leaf.is_complex() else leaf).reshape(
                count, scale * width
            )
            for leaf, width in zip(leaves, self._widths, strict=True)
        ]
        return torch.cat(flat, dim=1).to(self.dtype)

    def _check_structure(self, state: Tree, owner: str) -> list[Tensor]:
        found = Structure(state, owner, constants=False)
        same = len(found.leaves) == len(self._shapes) and _outline(state) == _outline(
            self._structure.rebuild(found.leaves)
        )
        if not same:
            raise ValueError(
                f"{owner} must return the tree of its state; got another nesting or number of "
                "tensors."
            )
        return found.leaves

    @property
    def is_matrix(self) -> bool:
        """Whether the state is such a matrix itself."""
        return self._matrix

    @property
    def width(self) -> int:
        """Real numbers in one row."""
        return sum(self._widths) * (self.batch if self.coupled else 1)

    def unpack(self, flat: Tensor) -> Tree:
        """Return a matrix with any number of rows as a state."""
        if self._matrix:
            return flat
        rows = self.batch if self.coupled else flat.shape[0]
        if self._channels_last:
            channels, height, width = self._shapes[0]
            shape = (rows, height, width, channels)
            image = _as_complex(flat, shape) if self._complex[0] else flat.view(*shape)
            return image.permute(0, 3, 1, 2)
        if self._single:
            shape = (rows, *self._shapes[0])
            return _as_complex(flat, shape) if self._complex[0] else flat.view(*shape)
        parts: list[Tensor] = []
        start = 0
        for tail, pairs, width in zip(self._shapes, self._complex, self._widths, strict=True):
            stop = start + width * (rows if self.coupled else 1)
            part, shape = flat[:, start:stop], (rows, *tail)
            parts.append(_as_complex(part, shape) if pairs else part.reshape(shape))
            start = stop
        return self._structure.rebuild(parts)


def _as_real(tensor: Tensor, *, alone: bool) -> Tensor:
    """Return complex numbers as pairs of real and imaginary part.

    Args:
        tensor: The numbers.
        alone: Whether nothing else will lie beside them in a row.
    """
    if alone and not is_wrapped(tensor):
        return torch.view_as_real(tensor.resolve_conj())
    # Autograd goes back through a view by `view_as_complex`, which wants gradients that begin at
    # even numbers.
    return torch.stack((tensor.real, tensor.imag), dim=-1)


def _as_complex(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return pairs of real and imaginary part as complex numbers; a view where they lie so."""
    pairs = rows.reshape(*shape, 2)
    viewable = (
        not is_wrapped(pairs)  # vmap does not tell how its tensors lie
        and pairs.stride(-1) == 1
        and pairs.storage_offset() % 2 == 0
        and all(stride % 2 == 0 for stride in pairs.stride()[:-1])
    )
    return torch.view_as_complex(pairs) if viewable else torch.complex(pairs[..., 0], pairs[..., 1])


def _outline(tree: Tree) -> Any:
    """The nesting of a tree without its tensors, comparable with `==`."""
    if isinstance(tree, dict):
        return {key: _outline(value) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return (type(tree), [_outline(value) for value in tree])
    return None if tree is None else Tensor


def to_numpy(tensor: Tensor) -> np.ndarray:
    """The values of a tensor; on a CPU, its memory."""
    array: np.ndarray = (tensor if tensor.is_cpu else tensor.cpu()).numpy()
    return array


def shares_memory(tensor: Tensor, others: Iterable[Tensor]) -> bool:
    """Whether a tensor lies in the memory of one of the others, which may be sparse."""
    address = tensor.untyped_storage().data_ptr()
    return any(
        other.layout is torch.strided and other.untyped_storage().data_ptr() == address
        for other in others
    )


def row_norm(matrix: Tensor) -> Tensor:
    """Euclidean norm of each row."""
    norm: Tensor = torch.linalg.vector_norm(matrix, dim=1)
    return norm


def row_dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner product of each row of `a` with that of `b`, as a column."""
    dot: Tensor = torch.linalg.vecdot(a, b)
    return dot.unsqueeze_(1)
