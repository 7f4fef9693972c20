from __future__ import annotations

import errno
import json
import math
import os
import pickle
import random
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from malformed_checkpoints import MALFORMED, sample
from published import Trap
from torch import Tensor

from equipoise.engine import checkpoint as module
from equipoise.engine.checkpoint import (
    CheckpointError,
    Checkpoints,
    CheckpointWarning,
    read_checkpoint,
    write_checkpoint,
)

STATE: dict[str, Any] = {"step": 3, "loss": 0.1, "names": ["a", None, True]}


def same(left: Tensor, right: Tensor) -> bool:
    """Equal in type, shape and every bit."""
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    return bytes(left.contiguous().reshape(-1).view(torch.uint8).tolist()) == bytes(
        right.contiguous().reshape(-1).view(torch.uint8).tolist()
    )


@pytest.fixture
def good(tmp_path: Path) -> bytes:
    write_checkpoint(tmp_path / "good", sample(), STATE)
    return (tmp_path / "good").read_bytes()


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_checkpoint_is_refused_in_one_line(
    tmp_path: Path, good: bytes, kind: str
) -> None:
    make, reason = MALFORMED[kind]
    path, marker = tmp_path / "bad.safetensors", tmp_path / "marker"
    path.write_bytes(make(good, marker))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=reason) as caught:
        read_checkpoint(path)
    assert (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    ) * 1024 < 20 * path.stat().st_size + 2**26
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert len(message.splitlines()) == 1
    assert len(message) < 600
    assert not marker.exists()
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again), again.source, again.reason) == (
        CheckpointError,
        message,
        str(path),
        caught.value.reason,
    )


def test_trap_would_spring_if_it_were_unpickled(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Trap(tmp_path / "marker")))
    assert (tmp_path / "marker").exists()


def test_checkpoint_that_is_no_readable_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        CheckpointError, match=r"^\S+missing: cannot be read \(No such file or directory\)$"
    ):
        read_checkpoint(tmp_path / "missing")
    with pytest.raises(CheckpointError, match="is a folder"):
        read_checkpoint(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_checkpoint(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_checkpoint("/dev/zero")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_checkpoint(tmp_path / "loop")

    def refuse(*_arguments: object, **_named: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    write_checkpoint(tmp_path / "file", {}, {})
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CheckpointError, match=r"cannot be read \(Permission denied\)"):
        read_checkpoint(tmp_path / "file")


def test_every_single_bit_flip_is_detected(tmp_path: Path, good: bytes) -> None:
    path, dice = tmp_path / "flipped", random.Random(0)
    for position in {*range(16), *(dice.randrange(8 * len(good)) for _ in range(800))}:
        damaged = bytearray(good)
        damaged[position // 8] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError):
            read_checkpoint(path)


def test_every_truncation_is_detected(tmp_path: Path, good: bytes) -> None:
    path = tmp_path / "cut"
    for length in range(len(good)):
        path.write_bytes(good[:length])
        with pytest.raises(CheckpointError):
            read_checkpoint(path)


def test_swapped_tensors_are_detected(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_checkpoint(path, {"aaa": torch.ones(2), "bbb": torch.zeros(2)}, {})
    path.write_bytes(
        path.read_bytes().replace(b"aaa", b"ccc").replace(b"bbb", b"aaa").replace(b"ccc", b"bbb")
    )
    with pytest.raises(CheckpointError, match="checksum is wrong"):
        read_checkpoint(path)


DTYPES = st.sampled_from(sorted(module.DTYPES, key=str))
SHAPES = st.lists(st.integers(0, 3), max_size=4)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    data=st.data(),
    names=st.lists(
        st.text(min_size=1).filter(lambda name: name != "__metadata__"), unique=True, max_size=4
    ),
    state=st.dictionaries(st.text(), JSON, max_size=4),
)
def test_checkpoint_comes_back_bit_for_bit(
    tmp_path: Path, data: st.DataObject, names: list[str], state: dict[str, Any]
) -> None:
    tensors = {}
    for name in names:
        dtype, shape = data.draw(DTYPES), data.draw(SHAPES)
        size = math.prod(shape) * dtype.itemsize
        content = data.draw(
            st.binary(min_size=size, max_size=size)
        )  # every pattern of bits, NaN with payloads among them
        if dtype is torch.bool:
            content = bytes(byte & 1 for byte in content)
        tensors[name] = (
            torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)
            if size
            else torch.empty(shape, dtype=dtype)
        )
    path = tmp_path / "file"
    write_checkpoint(path, tensors, state)
    found, found_state = read_checkpoint(path)
    assert found.keys() == tensors.keys()
    assert all(same(found[name], tensors[name]) for name in tensors)
    assert found_state == state
    assert repr(found_state) == repr(
        json.loads(json.dumps(state))
    )  # -0.0 and 0.0, 1 and True and 1.0 are equal but not the same
    witness = safetensors.torch.load_file(path)
    assert all(same(witness[name], tensors[name]) for name in tensors)


def test_checkpoint_keeps_numbers_that_are_not_finite(tmp_path: Path) -> None:
    write_checkpoint(
        tmp_path / "file", {}, {"best": -math.inf, "loss": [math.nan, math.inf], "tiny": 5e-324}
    )
    _, state = read_checkpoint(tmp_path / "file")
    assert state["best"] == -math.inf
    assert math.isnan(state["loss"][0])
    assert state["loss"][1] == math.inf
    assert state["tiny"] == 5e-324


def test_checkpoint_takes_tensors_however_they_lie_in_memory(tmp_path: Path) -> None:
    base = torch.randn(4, 6)
    weight = torch.nn.Parameter(base[:2])
    tensors = {
        "turned": base.t(),
        "slice": base[1:3, ::2],
        "expanded": base[0].expand(3, 6),
        "same": base,
        "again": base,
        "reversed conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "parameter": weight,
        "part of storage": base.reshape(-1)[5:7],
    }
    write_checkpoint(tmp_path / "file", tensors, {})
    found, _ = read_checkpoint(tmp_path / "file")
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor.detach()), name
        assert not found[name].requires_grad
        assert found[name].is_contiguous()
    found[
        "same"
    ].zero_()  # what comes back shares memory neither with one another nor with the file
    assert torch.equal(found["again"], base)
    assert torch.equal(read_checkpoint(tmp_path / "file")[0]["same"], base)


def test_tensors_that_were_read_do_not_change_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_checkpoint(path, {"a": torch.ones(5000)}, {})
    tensors, _ = read_checkpoint(path)
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert torch.equal(tensors["a"], torch.ones(5000))


def test_checkpoint_of_the_same_content_is_the_same_file(tmp_path: Path) -> None:
    tensors = sample()
    write_checkpoint(tmp_path / "a", tensors, STATE)
    write_checkpoint(tmp_path / "b", dict(reversed(tensors.items())), STATE)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_numbers_lie_at_multiples_of_their_size(tmp_path: Path) -> None:
    tensors = {
        "a": torch.zeros(3, dtype=torch.uint8),
        "b": torch.zeros(1, dtype=torch.float64),
        "c": torch.zeros(1, dtype=torch.half),
    }
    write_checkpoint(tmp_path / "file", tensors, {"odd": "x" * 3})
    data = (tmp_path / "file").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    assert all(
        header[name]["data_offsets"][0] % tensor.element_size() == 0
        for name, tensor in tensors.items()
    )


@pytest.mark.parametrize(
    ("tensors", "state", "reason"),
    [
        ({"a": torch.zeros(2).to_sparse()}, {}, "'a' must be dense"),
        ({"a": torch.zeros(2, dtype=torch.complex128)}, {}, "'a' must be dense.*complex128"),
        ({"__metadata__": torch.zeros(2)}, {}, "must .* not named '__metadata__'"),
        ({"\ud800": torch.zeros(2)}, {}, "surrogates"),
        ({}, {"a": {0: 1}}, "text for keys; got 0"),
        ({}, {"a": [{None: 1}]}, "text for keys; got None"),
        ({}, {"a": "x" * module.MAX_HEADER_BYTES}, "at most"),
    ],
    ids=[
        "sparse",
        "complex128",
        "reserved name",
        "surrogate",
        "number for a key",
        "None for a key",
        "too long",
    ],
)
def test_checkpoint_that_would_not_come_back_is_not_written(
    tmp_path: Path, tensors: dict[str, Tensor], state: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        write_checkpoint(tmp_path / "file", tensors, state)
    assert os.listdir(tmp_path) == []


def test_checkpoints_keep_the_newest(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path / "run" / "checkpoints")
    assert store.latest() is None
    for step in (0, 5, 10, 1_234_567_890):
        path = store.save(step, {"a": torch.tensor(step)}, {"step": step})
        assert path.name == f"step-{step:09d}.safetensors"
        found = store.latest()
        assert found is not None
        assert (found.step, found.path, found.state, found.tensors["a"].item()) == (
            step,
            path,
            {"step": step},
            step,
        )
    assert sorted(os.listdir(store.folder)) == [
        "step-000000010.safetensors",
        "step-1234567890.safetensors",
    ]


def test_checkpoints_leave_other_files_alone(tmp_path: Path) -> None:
    for name in ("step-1.safetensors", "step-00000000x.safetensors", "notes.txt"):
        (tmp_path / name).touch()
    store = Checkpoints(tmp_path, keep=1)
    store.save(1, {}, {})
    store.save(2, {}, {})
    assert set(os.listdir(tmp_path)) == {
        "step-1.safetensors",
        "step-00000000x.safetensors",
        "notes.txt",
        "step-000000002.safetensors",
    }


@pytest.mark.parametrize("keep", [0, -1, True, 1.5])
def test_checkpoints_refuse_to_keep_none(tmp_path: Path, keep: Any) -> None:
    with pytest.raises(ValueError, match=r"Checkpoints\.keep must be a whole number of at least 1"):
        Checkpoints(tmp_path, keep=keep)


def test_checkpoints_refuse_a_negative_step(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 0; got -1"):
        Checkpoints(tmp_path).save(-1, {}, {})


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_damaged_checkpoint_falls_back_with_a_warning(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, keep=3)
    for step in (360, 380, 400):
        store.save(step, {"a": torch.ones(2)}, {"step": step})
    newest, middle = (
        tmp_path / "step-000000400.safetensors",
        tmp_path / "step-000000380.safetensors",
    )
    damage(newest)
    with pytest.warns(CheckpointWarning) as caught:
        found = store.latest()
    assert [str(warning.message) for warning in caught] == [
        f"{newest}: checksum is wrong; resuming from the one before it, step 380."
    ]
    assert found is not None
    assert (found.step, found.state) == (380, {"step": 380})
    middle.write_bytes(b"")
    with pytest.warns(CheckpointWarning) as caught:
        found = store.latest()
    assert [str(warning.message) for warning in caught] == [
        f"{newest}: checksum is wrong; resuming from an earlier one, step 360.",
        f"{middle}: is empty; resuming from the one before it, step 360.",
    ]
    assert found is not None
    assert found.step == 360


def test_checkpoints_that_are_all_damaged_are_an_error(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path)
    for step in (1, 2):
        damage(store.save(step, {"a": torch.ones(2)}, {}))
    with pytest.raises(
        CheckpointError, match=r"step-000000002\.safetensors: checksum is wrong$"
    ) as caught:
        store.latest()
    assert str(caught.value).startswith(f"{tmp_path}: no checkpoint here can be used")


@pytest.mark.parametrize("keep", [1, 2])
def test_run_that_came_back_drops_the_later_checkpoints(tmp_path: Path, keep: int) -> None:
    store = Checkpoints(tmp_path, keep=3)
    for step in (360, 380, 400):
        store.save(step, {}, {})
    Checkpoints(tmp_path, keep).save(390, {}, {})
    assert sorted(os.listdir(tmp_path)) == [
        f"step-{step:09d}.safetensors" for step in (380, 390)[-keep:]
    ]


def test_old_checkpoint_that_cannot_be_removed_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Checkpoints(tmp_path, keep=1)
    first = store.save(1, {}, {})
    unlink = Path.unlink

    def stubborn(path: Path, missing_ok: bool = False) -> None:
        if path == first:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", stubborn)
    with pytest.warns(
        CheckpointWarning,
        match=r"000001\.safetensors: could not be removed \(Operation not permitted\)",
    ):
        store.save(2, {}, {})
    found = store.latest()
    assert found is not None
    assert found.step == 2


@pytest.mark.parametrize("place", ["replace", "fsync"])
def test_save_that_fails_leaves_the_earlier_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    store = Checkpoints(tmp_path, keep=1)
    store.save(1, {"a": torch.ones(2)}, STATE)

    def full(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, place, full)
    with pytest.raises(
        OSError, match=r"step-000000002\.safetensors: could not be written \(No space left"
    ):
        store.save(2, {"a": torch.zeros(2)}, STATE)
    assert os.listdir(tmp_path) == ["step-000000001.safetensors"]
    found = store.latest()
    assert found is not None
    assert (found.step, found.state) == (1, STATE)


FULL_DISK = """
import resource, signal, sys, torch
from equipoise.engine.checkpoint import Checkpoints
store = Checkpoints(sys.argv[1], keep=1)
store.save(1, {"a": torch.ones(1000)}, {})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
try:
    store.save(2, {"a": torch.ones(10**6)}, {})
except OSError as error:
    print(error.errno, error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files")
def test_save_on_a_full_disk_leaves_the_earlier_checkpoints(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert ended.stdout.startswith(
        f"{errno.EFBIG} {tmp_path}{os.sep}step-000000002.safetensors: could not be written "
        "(File too large)"
    )
    assert os.listdir(tmp_path) == ["step-000000001.safetensors"]
    found = Checkpoints(tmp_path).latest()
    assert found is not None
    assert found.step == 1


def test_killed_save_is_cleaned_up(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path)
    path = store.save(1, {}, {})
    (tmp_path / ".step-000000002.safetensors.0123456789abcdef.partial").write_bytes(b"half")
    found = store.latest()
    assert found is not None
    assert found.step == 1
    store.clean()
    assert os.listdir(tmp_path) == [path.name]
    Checkpoints(tmp_path / "missing").clean()


MEMORY = """
import resource, sys
from equipoise.engine.checkpoint import read_checkpoint
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
read_checkpoint(sys.argv[1])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts memory in units of 1024 bytes")
def test_reading_takes_memory_by_the_size_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "large"
    write_checkpoint(path, {"a": torch.zeros(2**22)}, {})
    ended = subprocess.run(
        [sys.executable, "-c", MEMORY, str(path)], capture_output=True, text=True, check=True
    )
    assert (
        int(ended.stdout) < 2.5 * path.stat().st_size
    )  # pages of the file that are mapped count as well
