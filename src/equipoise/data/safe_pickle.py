"""Pickles read as plain data: one that could run code is refused, and nothing in it is called."""

from __future__ import annotations

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.data.bounded_io import count_entries, data_errors_of
from equipoise.data.errors import DataError

__all__ = ["read_pickle"]

_VALUES = (
    "NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING "
    "BINSTRING SHORT_BINSTRING BINBYTES "
    "SHORT_BINBYTES BINBYTES8 UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8"
)
_CONTAINERS = (
    "EMPTY_LIST APPEND APPENDS LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 "
    "EMPTY_DICT DICT SETITEM SETITEMS"
)
_MACHINE = (
    "PROTO FRAME STOP MARK POP POP_MARK GET BINGET LONG_BINGET PUT BINPUT LONG_BINPUT MEMOIZE"
)
_ARRAYS = "GLOBAL STACK_GLOBAL REDUCE BUILD"  # what they may name and call is decided in _Unpickler
_OPCODES = frozenset(f"{_VALUES} {_CONTAINERS} {_MACHINE} {_ARRAYS}".split())


class _Dtype:
    """Stands for `numpy.dtype`."""

    def __init__(self, kind: object, *_: object) -> None:
        self.kind = kind

    def __setstate__(self, _: object) -> None:
        """Byte order and the like do not matter to bytes."""


class _Array:
    """Stands for `numpy.ndarray`, and keeps what the stream says of it."""

    def __init__(self, *_: object) -> None:
        self.state: Any = None

    def __setstate__(self, state: object) -> None:
        self.state = state


def _encode(text: str, encoding: str = "latin1") -> bytes:
    """Stand for `_codecs.encode`, with which newer versions write bytes for older ones."""
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError("it encodes text in another way than latin1")
    return text.encode("latin1")


_STUBS: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STUBS:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which could run code")
        return _STUBS[module, name]


def read_pickle(path: Path | str, content: bytes) -> dict[str, Any]:
    """Return the dictionary of plain values and arrays of bytes that a pickle holds.

    Args:
        path: The file that it comes from, for messages.
        content: The pickle.
    """
    with data_errors_of(path):
        for opcode, argument, _ in pickletools.genops(content):
            if opcode.name not in _OPCODES:
                raise DataError(
                    path,
                    f"is a pickle with the instruction {opcode.name}, which data do not need; "
                    "it was not run",
                )
            if opcode.name in ("PUT", "LONG_BINPUT") and int(argument or 0) > len(content):
                # each number costs memory
                raise DataError(path, "is a pickle that numbers its values beyond its length")
        try:
            value = _Unpickler(io.BytesIO(content), encoding="latin1").load()
        except pickle.UnpicklingError as error:
            raise DataError(
                path, f"is a pickle that is not plain data: {error}; it was not run"
            ) from error
    if not isinstance(value, dict):
        raise DataError(
            path, f"is a pickle of {type(value).__name__.strip('_').lower()}, not of a dictionary"
        )
    result: dict[str, Any] = {}
    for key, entry in value.items():
        if not isinstance(key, str | bytes):
            raise DataError(
                path,
                f"is a pickle of a dictionary with a key that is not text but {type(key).__name__}",
            )
        name = key.decode("latin1") if isinstance(key, bytes) else key
        result[name] = _array(path, entry) if isinstance(entry, _Array) else entry
    return result


def _array(path: Path | str, stub: _Array) -> NDArray[np.uint8]:
    with data_errors_of(path):
        _, shape, dtype, fortran, content = stub.state
        if isinstance(content, str):
            content = content.encode("latin1")
        # Nothing of the stream's own is quoted: a few references to references can be written out
        # to any length.
        if not isinstance(dtype, _Dtype) or dtype.kind not in ("u1", "|u1"):
            raise DataError(
                path, "holds an array of other values than bytes (u1); it must be bytes"
            )
        if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
            raise DataError(path, "holds an array whose shape is not a tuple of whole numbers")
        if not isinstance(content, bytes) or count_entries(shape) != len(content):
            raise DataError(path, "holds an array that is truncated")
        return np.frombuffer(content, dtype=np.uint8).reshape(shape, order="F" if fortran else "C")
