from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pixel_run import make, metrics, pixels, weights
from torch import nn

from equipoise.core import Interrupted, SettingError
from equipoise.data import Dataset
from equipoise.engine import TrainConfig, Trainer, make_task


@pytest.mark.parametrize("accumulate", [2, 4, 6])
@pytest.mark.parametrize("settings", [{}, {"clip": 0.3}, {"ema": 0.5}], ids=str)
def test_accumulated_steps_are_those_of_the_whole_batch(
    tmp_path: Path, accumulate: int, settings: dict[str, Any]
) -> None:
    whole = make(tmp_path / "whole", **settings)
    parts = make(tmp_path / "parts", accumulate=accumulate, **settings)
    sizes: list[int] = []
    parts.model.register_forward_pre_hook(
        lambda model, inputs: sizes.append(len(inputs[0])) if model.training else None
    )
    whole.fit()
    parts.fit()
    assert max(sizes) == math.ceil(6 / accumulate)
    torch.testing.assert_close(weights(parts), weights(whole), rtol=1e-10, atol=1e-12)
    for one, other in zip(metrics(tmp_path / "parts"), metrics(tmp_path / "whole"), strict=True):
        assert one.keys() == other.keys()
        for name in {"loss", "miou", "gradient_norm"} & one.keys():
            assert one[name] == pytest.approx(other[name], rel=1e-10), name


def test_step_with_nan_in_one_part_is_skipped_as_a_whole() -> None:
    data = pixels()
    assert data.x is not None
    x = data.x.clone()
    x[3] = math.nan
    broken = replace(data, x=x)
    whole, parts = make(data=broken, failures=20), make(data=broken, failures=20, accumulate=3)
    assert whole.fit().skipped == parts.fit().skipped == 3
    assert torch.isfinite(weights(parts)).all()
    torch.testing.assert_close(weights(parts), weights(whole), rtol=1e-10, atol=1e-12)


def test_accumulating_run_resumes_bit_identically(tmp_path: Path) -> None:
    options: dict[str, Any] = {"accumulate": 2, "dropout": 0.3, "clip": 0.5}
    whole = make(tmp_path / "whole", **options)
    whole.fit()
    with pytest.raises(Interrupted):
        make(tmp_path / "parts", stop_at=6, **options).fit()
    again = make(tmp_path / "parts", **options)
    again.fit(resume=True)
    assert torch.equal(weights(again), weights(whole))
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")


def test_accumulate_that_leaves_too_little_for_a_part_is_refused() -> None:
    with pytest.raises(
        SettingError, match=r"train.accumulate must be at most 6, the samples of a step; got 7"
    ):
        make(accumulate=7)
    data = Dataset(
        "rows", "train", "arrays", ("a", "b"), (3,), torch.randn(12, 3), torch.arange(12) % 2
    )
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    with pytest.raises(SettingError, match=r"leave three samples for each part, .* got 3 for"):
        Trainer(
            model,
            make_task("auto", data),
            data,
            settings=TrainConfig(batch=6, accumulate=3),
        )
