from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from equipoise.runs.config import load_config
from equipoise.runs.samples import load_samples
from equipoise.runs.sections import DataConfig


def test_standardized_features_have_the_scale_of_the_training_rows_alone(tmp_path: Path) -> None:
    rows = "".join(f"{i},7,{100 * i},{i % 2}\n" for i in range(10))
    (tmp_path / "train.csv").write_text(rows)
    (tmp_path / "test.csv").write_text("1e6,7,-1e6,0\n")
    data = DataConfig("csv", root=str(tmp_path), holdout=0.3, standardize=True)
    samples = load_samples(data)
    x = samples.train.x
    assert torch.allclose(x.mean(0), torch.zeros(3), atol=1e-6)
    assert torch.allclose(x.std(0, correction=0), torch.tensor([1.0, 0.0, 1.0]))  # 7 is constant
    assert samples.test.x[0, 0] > 1e5
    with pytest.raises(ValueError, match=r"data.mean must be left out with data.standardize"):
        replace(data, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))


def test_mixtures_need_another_image() -> None:
    with pytest.raises(ValueError, match=r"data.mix must be 'none' with train.batch = 1"):
        load_config("digits", ["data.mix=mixup", "train.batch=1"])


def test_standardize_is_for_tables() -> None:
    with pytest.raises(ValueError, match=r"data.standardize must be for tables of features"):
        load_samples(DataConfig("digits", standardize=True))
