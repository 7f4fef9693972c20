from __future__ import annotations

import errno
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from equipoise.engine.log import MetricLog, MetricLogWarning, read_metrics

STEP = {
    "kind": "step",
    "step": 12,
    "epoch": 0,
    "loss": 0.7,
    "forward_status": {"CONVERGED": 128},
    "skipped": False,
}
EPOCH = {
    "kind": "epoch",
    "epoch": 0,
    "step": 20,
    "test": {"accuracy": 0.5, "samples": 360},
    "operator_norms": {"equilibrium.1": 0.98},
}


def test_metric_lines_are_compact_json_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    with MetricLog(path) as log:
        log.write(STEP)
        assert (
            path.read_text() == json.dumps(STEP, separators=(",", ":")) + "\n"
        )  # readable while the run goes on
        log.write(EPOCH)
        log.sync()
    with MetricLog(path) as log:
        log.write({"name": "\u00e9\n"})
    assert read_metrics(path) == [STEP, EPOCH, {"name": "\u00e9\n"}]


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricLog(path) as log:
        log.write(
            {"a": math.nan, "b": {"c": [math.inf, 1.0, {"d": -math.inf}]}, "e": (0.1, math.nan)}
        )
    assert path.read_text() == '{"a":null,"b":{"c":[null,1.0,{"d":null}]},"e":[0.1,null]}\n'


def test_log_without_a_file_takes_lines_and_keeps_none() -> None:
    with MetricLog(None) as log:
        log.write(STEP)
        log.sync()
        assert log.position == 0
        log.truncate(0)
        log.close()


def test_resumed_log_is_cut_where_the_checkpoint_was(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricLog(path) as log:
        assert log.position == 0
        log.write(STEP)
        position = log.position
        assert position == path.stat().st_size
        log.write(EPOCH)
    with path.open("ab") as file:
        file.write(b'{"kind": "st')
    with MetricLog(path) as log:
        log.truncate(position)
        assert log.position == position
        log.write({"kind": "again"})
        assert log.position == path.stat().st_size
    assert read_metrics(path) == [STEP, {"kind": "again"}]


def half(line: dict[str, object]) -> bytes:
    return json.dumps(line).encode()[:20]


@pytest.mark.parametrize(
    "content",
    [b"", half(STEP) + b"\n", b"\xff\0\n" * 9, json.dumps(STEP).encode() + b"\n" + half(EPOCH)],
)
def test_damaged_log_keeps_its_whole_lines_up_to_the_checkpoint(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricLog(path) as log:
        for line in (STEP, STEP, EPOCH):
            log.write(line)
        position = log.position
    kept = [STEP] * content.startswith(b'{"kind": "step", "step"')
    later = json.dumps({**STEP, "later": True}).encode()
    path.write_bytes(content + b"\n" + later + b"\n")
    with MetricLog(path) as log:
        with pytest.warns(MetricLogWarning, match=rf"the {len(kept)} that are left are kept"):
            log.truncate(position, lambda line: "later" not in line)
        assert log.position == path.stat().st_size
        log.write(EPOCH)
    assert read_metrics(path) == [*kept, EPOCH]


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", 0),
        (b'{"a":1}\n', 1),
        (b'{"a":1}\n{"b', 1),
        (b'{"a":1}\n{"b":2}', 2),
        (b'{"a":1}\n\0\0\0', 1),
        (b'{"a":"\xc3', 0),
        (b'{"a":1}\n12', 1),
    ],
    ids=[
        "empty",
        "whole",
        "half a line",
        "only the end of line lost",
        "zeros",
        "half a letter",
        "not an object",
    ],
)
def test_half_written_last_line_is_left_out(tmp_path: Path, content: bytes, lines: int) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    assert read_metrics(path) == [{"a": 1}, {"b": 2}][:lines]


@pytest.mark.parametrize(
    "bad",
    [b"{'a'}", b"", b"[1]", b"\xff\xfe", b"[" * 100_000],
    ids=["quotes", "blank", "list", "bytes", "deep"],
)
def test_damaged_line_is_named(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"a":1}\n' + bad + b'\n{"b":2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl: line 2 is not a JSON object\.$"):
        read_metrics(path)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a disk that is always full")
def test_log_on_a_full_disk_names_the_file() -> None:
    log = MetricLog("/dev/full")
    with pytest.raises(
        OSError, match=r"^/dev/full: could not be written \(No space left on device\)\.$"
    ) as caught:
        log.write(STEP)
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match="No space left"):
        log.close()


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself reads from the folder."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    reader = accumulator.EventAccumulator(str(folder), size_guidance={accumulator.SCALARS: 0})
    reader.Reload()
    return {
        name: [(event.step, pytest.approx(event.value)) for event in reader.Scalars(name)]
        for name in reader.Tags()["scalars"]
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_gets_scalars_by_path_at_their_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    folder = tmp_path / "tensorboard"
    with MetricLog(tmp_path / "metrics.jsonl", folder) as log:
        log.write({**STEP, "gradient_norm": math.nan, "missing": None, "name": "text"})
        log.write({"kind": "step", "step": 13, "loss": 0.6})
        log.write(EPOCH)
        log.sync()
    assert events(folder) == {
        "step/epoch": [(12, 0.0)],
        "step/loss": [(12, 0.7), (13, 0.6)],
        "step/forward_status/CONVERGED": [(12, 128.0)],
        "step/skipped": [(12, 0.0)],
        "epoch/epoch": [(20, 0.0)],
        "epoch/test/accuracy": [(20, 0.5)],
        "epoch/test/samples": [(20, 360.0)],
        "epoch/operator_norms/equilibrium.1": [(20, 0.98)],
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_of_a_resumed_run_forgets_what_came_after(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    path, folder = tmp_path / "metrics.jsonl", tmp_path / "tensorboard"
    with MetricLog(path, folder) as log:
        log.write({"kind": "step", "step": 1, "loss": 1.0})
        position = log.position
        log.write({"kind": "step", "step": 2, "loss": 2.0})
        log.write({"kind": "step", "step": 3, "loss": 3.0})
    first = next(folder.iterdir())
    os.rename(
        first, folder / "events.out.tfevents.1.before"
    )  # files are read by their names, which hold whole seconds
    with MetricLog(path, folder) as log:
        log.truncate(position)
        log.write({"kind": "step", "step": 2, "loss": 20.0})
    assert events(folder) == {"step/loss": [(1, 1.0), (2, 20.0)]}


def test_missing_tensorboard_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ValueError, match=r"pip install 'equipoise\[tensorboard\]'"):
        MetricLog(tmp_path / "metrics.jsonl", tmp_path / "tensorboard")
    assert os.listdir(tmp_path) == []


def test_log_refuses_what_json_cannot_hold(tmp_path: Path) -> None:
    value: Any = object()
    with MetricLog(tmp_path / "metrics.jsonl") as log:
        with pytest.raises(TypeError, match="object"):
            log.write({"a": value})
        log.write({"a": 1})
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"a": 1}]
