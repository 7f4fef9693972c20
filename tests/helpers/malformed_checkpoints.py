"""Malformed checkpoints, and what the error about each must say."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch
from published import Trap
from torch import Tensor

from equipoise.engine import checkpoint as module


def sample() -> dict[str, Tensor]:
    return {
        "weight": torch.randn(3, 4),
        "random": torch.get_rng_state()[:40],
        "count": torch.tensor(7),
    }


def raw(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(head) if length is None else length) + head + data


def entry(
    dtype: str = "F32", shape: tuple[int, ...] = (1,), offsets: tuple[int, int] = (0, 4)
) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def ours(tensors: dict[str, object], data: bytes = b"", **metadata: str) -> bytes:
    """A file with our metadata around any tensors."""
    return raw(
        {
            "__metadata__": {
                "format": module.FORMAT,
                "state": "{}",
                "sha256": "0" * 64,
                **metadata,
            },
            **tensors,
        },
        data,
    )


def with_state(text: str) -> bytes:
    """A file whose checksum is right for a state that may be anything."""
    return ours({}, state=text, sha256=module.checksum({}, text))


def torch_file(marker: Path, zipped: bool) -> bytes:
    buffer = io.BytesIO()
    torch.save({"trap": Trap(marker)}, buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


def plain_zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("data.pkl", b"x" * 100)
    return buffer.getvalue()


Make = Callable[[bytes, Path], bytes]
MALFORMED: dict[str, tuple[Make, str]] = {
    "empty": (lambda _good, _marker: b"", "is empty"),
    "one byte": (lambda good, _marker: good[:1], "truncated"),
    "seven bytes": (lambda good, _marker: good[:7], "truncated"),
    "length only": (lambda good, _marker: good[:8], "truncated"),
    "header cut": (lambda good, _marker: good[:50], "truncated"),
    "header of 640 bytes cut": (
        lambda _good, _marker: raw(b"{", length=640),
        "truncated",
    ),  # begins as a pickle does
    "data cut by one": (lambda good, _marker: good[:-1], "damaged"),
    "data cut by half": (lambda good, _marker: good[: -len(good) // 8], "damaged"),
    "one byte more": (lambda good, _marker: good + b"x", "damaged"),
    "twice": (lambda good, _marker: good * 2, "damaged"),
    "zeros": (lambda _good, _marker: bytes(1000), "damaged"),
    "text": (lambda _good, _marker: b"loss = 0.1\n" * 20, "not a checkpoint: its first bytes"),
    "web page": (lambda _good, _marker: b"\n<!DOCTYPE html><html>404</html>", "web page"),
    "pickle": (lambda _good, marker: pickle.dumps(Trap(marker)), "pickle"),
    "old pickle": (
        lambda _good, marker: pickle.dumps(Trap(marker), protocol=0),
        "not a checkpoint: its first bytes",
    ),
    "torch.save": (lambda _good, marker: torch_file(marker, True), "pickle or zip"),
    "old torch.save": (lambda _good, marker: torch_file(marker, False), "pickle or zip"),
    "zip": (lambda _good, _marker: plain_zip(), "pickle or zip"),
    "pickle as header": (lambda _good, marker: raw(pickle.dumps(Trap(marker))), "damaged"),
    "pickle as state": (
        lambda _good, marker: with_state(pickle.dumps(Trap(marker), protocol=0).decode()),
        "state is not JSON",
    ),
    "other safetensors": (
        lambda _good, _marker: safetensors.torch.save(sample()),
        "not of the format",
    ),
    "other metadata": (
        lambda _good, _marker: safetensors.torch.save(sample(), {"format": "pt"}),
        "not of the format",
    ),
    "newer format": (
        lambda _good, _marker: ours({}, format="equipoise-checkpoint-2"),
        "not of the format",
    ),
    "no checksum": (
        lambda _good, _marker: raw({"__metadata__": {"format": module.FORMAT, "state": "{}"}}),
        "checksum",
    ),
    "no state": (
        lambda _good, _marker: raw(
            {"__metadata__": {"format": module.FORMAT, "sha256": module.checksum({}, "")}}
        ),
        "not JSON",
    ),
    "wrong checksum": (lambda _good, _marker: ours({"a": entry()}, b"1234"), "checksum is wrong"),
    "state not JSON": (lambda _good, _marker: with_state("{'a': 1}"), "state is not JSON"),
    "state cut": (lambda _good, _marker: with_state('{"a": 1'), "state is not JSON"),
    "state a list": (lambda _good, _marker: with_state("[1]"), "state is not a JSON object"),
    "state a number": (lambda _good, _marker: with_state("NaN"), "state is not a JSON object"),
    "state too deep": (lambda _good, _marker: with_state("[" * 100_000), "state is not JSON"),
    "state number too long": (
        lambda _good, _marker: with_state('{"a": ' + "9" * 10_000 + "}"),
        "state is not JSON",
    ),
    "header not JSON": (lambda _good, _marker: raw(b"{'a'}"), "damaged"),
    "header a list": (lambda _good, _marker: raw([1]), "damaged"),
    "header too deep": (lambda _good, _marker: raw(b'{"a":' + b"[" * 100_000), "damaged"),
    "header not UTF-8": (lambda _good, _marker: raw(b'{"\xff": 1}'), "damaged"),
    "header longer than file": (lambda _good, _marker: raw({}, length=2**20), "truncated"),
    "header of 2**63": (
        lambda _good, _marker: raw({}, length=2**63),
        "not a checkpoint: its first bytes",
    ),
    "header of 2**64 - 1": (
        lambda _good, _marker: raw({}, length=2**64 - 1),
        "not a checkpoint: its first bytes",
    ),
    "header over the limit": (
        lambda _good, _marker: raw(b"{}" + b" " * module.MAX_HEADER_BYTES),
        "not a checkpoint: its first bytes",
    ),
    "header empty": (lambda _good, _marker: raw(b""), "damaged"),
    "metadata not text": (lambda _good, _marker: raw({"__metadata__": {"format": 1}}), "damaged"),
    "tensor too large": (
        lambda _good, _marker: ours({"a": entry(shape=(2**40,), offsets=(0, 2**42))}),
        "damaged",
    ),
    "tensor overflows": (
        lambda _good, _marker: ours({"a": entry(shape=(2**62, 2**62))}, b"1234"),
        "damaged",
    ),
    "tensor of 2**63 by 0": (
        lambda _good, _marker: ours({"a": entry(shape=(2**63, 0), offsets=(0, 0))}),
        "damaged",
    ),
    "shape not its bytes": (
        lambda _good, _marker: ours({"a": entry(shape=(2,))}, b"1234"),
        "damaged",
    ),
    "negative shape": (lambda _good, _marker: ours({"a": entry(shape=(-1,))}, b"1234"), "damaged"),
    "offsets turned": (
        lambda _good, _marker: ours({"a": entry(offsets=(4, 0))}, b"1234"),
        "damaged",
    ),
    "offsets outside": (
        lambda _good, _marker: ours({"a": entry(offsets=(4, 8))}, b"1234"),
        "damaged",
    ),
    "tensors overlap": (
        lambda _good, _marker: ours({"a": entry(), "b": entry()}, b"1234"),
        "damaged",
    ),
    "hole between tensors": (
        lambda _good, _marker: ours({"a": entry(), "b": entry(offsets=(8, 12))}, b"1" * 12),
        "damaged",
    ),
    "unknown type": (lambda _good, _marker: ours({"a": entry("F33")}, b"1234"), "damaged"),
    "type torch has not": (
        lambda _good, _marker: ours({"a": entry("F6_E2M3", (4,), (0, 3))}, b"123"),
        "damaged",
    ),
    "type of half bytes": (
        lambda _good, _marker: ours({"a": entry("F4", (2,), (0, 1))}, b"1"),
        "damaged|checksum",
    ),
    "a million dimensions": (
        lambda _good, _marker: ours({"a": entry(shape=(1,) * 1_000_000)}, b"1234"),
        "damaged|checksum",
    ),
}
