"""Checkpoints: tensors and state in one safetensors file, whole, checked, and never executed.

The state is JSON text in the metadata of the file, beside the name of the format and a SHA-256
checksum of all that is in it.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from equipoise.core import (
    SourceError,
    remove_partials,
    require_count,
    require_whole,
    write_atomically,
)

__all__ = [
    "CheckpointError",
    "CheckpointWarning",
    "Checkpoints",
    "Stored",
    "checksum",
    "read_checkpoint",
    "write_checkpoint",
]

FORMAT = "equipoise-checkpoint-1"
MAX_HEADER_BYTES = (
    2**24
)  # bytes of names, shapes and state: parsed, they take many times their size
MAX_REASON_LENGTH = 400  # characters of a reason, which may quote a file
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class CheckpointError(SourceError):
    """A file is not a checkpoint, or is damaged, or cannot be read.

    Args:
        path: The file.
        reason: What is wrong with it.
    """

    def __init__(self, path: Path | str, reason: object) -> None:
        super().__init__(path, str(reason)[:MAX_REASON_LENGTH].rstrip(" ."))


class CheckpointWarning(UserWarning):
    """A checkpoint could not be used, or an old one not be removed; the run continues."""


def write_checkpoint(
    path: Path | str, tensors: Mapping[str, Tensor], state: Mapping[str, Any]
) -> None:
    """Write tensors and state to one file, in one step.

    Args:
        path: The file; its folder must be there.
        tensors: By name. Only their values are kept: not their strides, their devices, nor which of
            them share memory.
        state: What JSON can hold; numbers come back exactly, also those that are not finite. Tuples
            come back as lists.
    """
    text = json.dumps(dict(state), separators=(",", ":"))
    _require_text_keys(state)
    kept = {name: _plain(name, tensor) for name, tensor in tensors.items()}
    header: dict[str, object] = {
        "__metadata__": {"format": FORMAT, "sha256": checksum(kept, text), "state": text}
    }
    pieces, end = [], 0
    # the widest first, so that all numbers lie at multiples of their size
    for name, tensor in sorted(kept.items(), key=lambda item: (-item[1].element_size(), item[0])):
        pieces.append(_content(tensor))
        start, end = end, end + len(pieces[-1])
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    head = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    head += b" " * (-len(head) % 8)
    if len(head) > MAX_HEADER_BYTES:
        raise ValueError(
            f"checkpoint state must take at most {MAX_HEADER_BYTES} bytes; got {len(head)}. "
            "Keep large things in tensors."
        )
    write_atomically(path, [len(head).to_bytes(8, "little") + head, *pieces])


def read_checkpoint(path: Path | str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors, on the CPU, and the state in a file, if its checksum is right.

    Raises `CheckpointError` otherwise. Nothing in the file is ever executed, and the memory taken
    goes by how long the file is, not by what it claims.

    Args:
        path: The file.
    """
    path = Path(path)
    try:
        _inspect(path)
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise CheckpointError(
                    path, f"is a safetensors file, but not of the format {FORMAT}"
                )
            # copies, because what safe_open gives are views of the file
            tensors = {name: file.get_tensor(name).clone() for name in sorted(file.keys())}
        text = metadata.get("state", "")
        if metadata.get("sha256") != checksum(tensors, text):
            raise CheckpointError(path, "checksum is wrong")
    except (SafetensorError, ArithmeticError, MemoryError, RuntimeError, TypeError) as error:
        raise CheckpointError(path, f"damaged ({error})") from error
    except OSError as error:
        raise CheckpointError(path, f"cannot be read ({error.strerror or error})") from error
    return tensors, _parse_state(path, text)


@dataclass(frozen=True)
class Stored:
    """A checkpoint as it was read.

    Args:
        step: When it was written.
        path: Its file.
        tensors: By name, on the CPU.
        state: The rest.
    """

    step: int
    path: Path
    tensors: dict[str, Tensor]
    state: dict[str, Any]


class Checkpoints:
    """The newest checkpoints of a run, `step-000000400.safetensors` and so on.

    Args:
        folder: Where they are; made when the first is saved.
        keep: How many to keep.
    """

    def __init__(self, folder: Path | str, keep: int = 2) -> None:
        require_count("Checkpoints.keep", keep)
        self.folder, self.keep = Path(folder), keep

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
        spared: Collection[int] = (),
    ) -> Path:
        """Write a checkpoint, and after that remove those that are too many.

        Args:
            step: When.
            tensors: By name.
            state: The rest.
            spared: As of `prune`.
        """
        require_whole("Checkpoints.save.step", step)
        path = self.folder / f"step-{step:09d}.safetensors"
        self.folder.mkdir(parents=True, exist_ok=True)
        write_checkpoint(path, tensors, state)
        self.prune(step, spared)
        return path

    def prune(self, step: int, spared: Collection[int] = ()) -> None:
        """Remove all checkpoints but the newest `keep` and those to be spared.

        Those of later steps go too: the run came back from there, and must not take them up again.

        Args:
            step: Where the run is.
            spared: The steps of older ones to keep.
        """
        files = self._files()
        past = sorted((s for s in files if s <= step), reverse=True)
        for old in set(files) - set(past[: self.keep]) - set(past).intersection(spared):
            try:
                files[old].unlink(missing_ok=True)
            except OSError as error:
                warnings.warn(
                    f"{files[old]}: could not be removed ({error.strerror}).",
                    CheckpointWarning,
                    stacklevel=2,
                )

    def latest(self) -> Stored | None:
        """Return the newest whole checkpoint, warning of newer ones that are not; None if none."""
        failures: list[CheckpointError] = []
        files = self._files()
        for step in sorted(files, reverse=True):
            try:
                tensors, state = read_checkpoint(files[step])
            except CheckpointError as error:
                failures.append(error)
                continue
            for failure in failures:
                which = "the one before it" if failure is failures[-1] else "an earlier one"
                warnings.warn(
                    f"{failure}; resuming from {which}, step {step}.",
                    CheckpointWarning,
                    stacklevel=2,
                )
            return Stored(step, files[step], tensors, state)
        if failures:
            newest = failures[0]
            name = Path(newest.source).name
            raise CheckpointError(
                self.folder,
                f"no checkpoint here can be used; the newest, {name}: {newest.reason}",
            )
        return None

    def clean(self) -> None:
        """Remove what a killed run left half-written."""
        remove_partials(self.folder)

    def _files(self) -> dict[int, Path]:
        found = (
            (re.fullmatch(r"step-([0-9]{9,18})\.safetensors", path.name), path)
            for path in self.folder.glob("step-*.safetensors")
        )
        return {int(match[1]): path for match, path in found if match}


def _plain(name: str, tensor: Tensor) -> Tensor:
    """Return the values of a tensor as they lie in a file."""
    if name == "__metadata__" or tensor.layout is not torch.strided or tensor.dtype not in DTYPES:
        kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ValueError(
            f"checkpoint tensor {name!r} must be dense, of {kinds}, and not named "
            f"'__metadata__'; got {tensor.dtype}."
        )
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _content(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, not copied."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def checksum(tensors: Mapping[str, Tensor], text: str = "") -> str:
    """Return the SHA-256 of all names, types, shapes and bytes by name, then of a text.

    Args:
        tensors: The tensors by name, on the CPU and contiguous.
        text: The text.
    """
    found = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        found.update(_content(tensor))
    found.update(text.encode())
    return found.hexdigest()


def _inspect(path: Path) -> None:
    """Raise unless a file's header lies within the file and is of a sensible size."""
    if path.is_dir():
        raise CheckpointError(path, "is a folder, not a checkpoint")
    if not stat.S_ISREG(path.stat().st_mode):
        raise CheckpointError(path, "is not a regular file")  # opening a pipe would wait for ever
    with path.open("rb") as file:
        head = file.read(64)
        size = path.stat().st_size
    length = int.from_bytes(head[:8], "little")
    if not size:
        raise CheckpointError(path, "is empty")
    if size >= 8 and length <= min(size - 8, MAX_HEADER_BYTES):
        return
    if size < 8 or length <= MAX_HEADER_BYTES:
        raise CheckpointError(path, f"is truncated in its header: {size} bytes found")
    if head.startswith((b"PK\3\4", b"\x80")):
        raise CheckpointError(
            path,
            "is a pickle or zip file, such as torch.save writes; it can run code and is never "
            "opened",
        )
    if head.lstrip().startswith(b"<"):
        raise CheckpointError(path, "is a web page, not a checkpoint")
    raise CheckpointError(
        path, f"is not a checkpoint: its first bytes claim a header of {length} bytes"
    )


def _parse_state(path: Path, text: str) -> dict[str, Any]:
    try:
        state = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, f"its state is not JSON ({error})") from error
    if not isinstance(state, dict):
        raise CheckpointError(path, "its state is not a JSON object")
    return state


def _require_text_keys(value: object) -> None:
    """Raise for keys that JSON would silently turn into text."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"checkpoint state must have text for keys; got {key!r}.")
    if isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            _require_text_keys(item)
