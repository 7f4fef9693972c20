"""Every family trains in two processes under torchrun as it does in one.

Steps are small and plain, so that rounding is not magnified: sums over two shares are rounded
otherwise than sums over the whole.
"""

import sys
from pathlib import Path

import pytest
import torch
from family_presets import FAMILIES, SMALL, find_preset
from two_processes import run

from equipoise.cli import main
from equipoise.engine import read_checkpoint, read_metrics

SETTINGS = [
    *SMALL,
    "train.epochs=2",
    "train.evaluate_every=2",
    "train.log_every=1",
    "optimizer.name=sgd",
    "optimizer.learning_rate=1e-2",
]
OPTIONS = {
    # Each process draws noise of its own for training, so there must be next to none.
    "imaging": ["data.noise=1e-6"],
    "relu_implicit": ["train.warm_start=true"],
    # At the preset's 1e-2 a sample may stop one step earlier by rounding, which is seen.
    "residual": ["model.options.tolerance=1e-4"],
}


def train(family: str, folder: Path) -> int:
    words = [*SETTINGS, *OPTIONS.get(family, [])]
    where = ["--output", str(folder / family), "--quiet"]
    return main(["train", find_preset(family), *words, *where])


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder with the runs of two processes, and what they printed."""
    folder = tmp_path_factory.mktemp("pairs")
    return folder, run(folder, __file__, str(folder), limit=900)[1]


@pytest.mark.slow  # a minute for all families
@pytest.mark.filterwarnings("ignore::equipoise.ConvergenceWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_family_trains_in_two_processes_as_in_one(
    family: str, pairs: tuple[Path, str], tmp_path: Path
) -> None:
    folder, printed = pairs
    assert printed.count(f"{family} ended with code 0") == 2, printed
    assert train(family, tmp_path) == 0
    found, expected = (
        list(read_metrics(each / family / "metrics.jsonl")) for each in (folder, tmp_path)
    )
    assert [line["kind"] for line in found] == [line["kind"] for line in expected]
    for two, one in zip(found, expected, strict=True):
        if one["kind"] == "step":
            assert two["loss"] == pytest.approx(one["loss"], rel=1e-3)
            assert two["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=1e-3)
            assert two["skipped"] == one["skipped"]
        elif one.get("test"):
            assert two["test"]["loss"] == pytest.approx(one["test"]["loss"], rel=1e-3)
            assert two["test"]["samples"] == one["test"]["samples"]
    weights = [
        read_checkpoint(each / family / "model.safetensors")[0] for each in (folder, tmp_path)
    ]
    torch.testing.assert_close(*weights, rtol=1e-3, atol=1e-4)


if __name__ == "__main__":
    for each in sys.argv[2:] or FAMILIES:
        print(f"{each} ended with code {train(each, Path(sys.argv[1]))}", flush=True)
