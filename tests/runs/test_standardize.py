from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from equipoise.data import Dataset, Normalize, load_data
from equipoise.runs.build import make_transforms, resolve
from equipoise.runs.config import Config, dump_config, load_config
from equipoise.runs.samples import load_samples
from equipoise.runs.sections import DataConfig, ModelConfig


def test_standardized_features_have_the_scale_of_the_training_rows_alone(tmp_path: Path) -> None:
    rows = "".join(f"{i},7,{100 * i},{i % 2}\n" for i in range(10))
    (tmp_path / "train.csv").write_text(rows)
    (tmp_path / "test.csv").write_text("1e6,7,-1e6,0\n")
    data = DataConfig("csv", root=str(tmp_path), holdout=0.3, standardize=True)
    train = load_samples(data).train
    config = resolve(Config(ModelConfig("opteq-digits"), data), train)
    plain = make_transforms(config.data, train)[1]
    assert isinstance(plain, Normalize)
    x, _ = plain(train.x, train.y)
    assert torch.allclose(x.mean(0), torch.zeros(3), atol=1e-6)
    assert torch.allclose(x.std(0, correction=0), torch.tensor([1.0, 0.0, 1.0]))  # 7 is constant
    # A run keeps the numbers, and needs no samples to use them.
    (tmp_path / "config.toml").write_text(dump_config(config))
    kept = load_config(tmp_path).data
    assert (kept.mean, kept.std) == (config.data.mean, config.data.std)
    assert resolve(replace(config, data=kept), train).data == kept  # as on resume
    own = replace(kept, mean=(0.0, 0.0, 0.0))
    with pytest.raises(ValueError, match=r"data.mean must be left out with data.standardize"):
        resolve(replace(config, data=own), train)


def test_mixtures_need_another_image() -> None:
    with pytest.raises(ValueError, match=r"data.mix must be 'none' with train.batch = 1"):
        load_config("digits", ["data.mix=mixup", "train.batch=1"])


def test_standardize_is_for_tables() -> None:
    digits: Dataset = load_data("digits")
    config = Config(ModelConfig("opteq-digits"), DataConfig("digits", standardize=True))
    with pytest.raises(ValueError, match=r"data.standardize must be for tables of features"):
        resolve(config, digits)
