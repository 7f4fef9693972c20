"""Every family has a preset that needs no files, and its run does all that runs do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from family_presets import FAMILIES, SMALL, find_preset
from torch.nn import functional

from equipoise.cli import main
from equipoise.data import load_raw
from equipoise.runs import open_run

CHEAP = {"residual": ["model.options.max_steps=6"]}
"""What makes a family's preset quick enough."""


# A few steps do not make a contraction of a family that promises none; the command says so.
@pytest.mark.filterwarnings("ignore::equipoise.ConvergenceWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_family_trains_resumes_scores_predicts_and_reports(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, run = find_preset(family), tmp_path / "run"
    assert (
        main(["train", name, *SMALL, *CHEAP.get(family, []), "--output", str(run), "--quiet"]) == 0
    )
    assert main(["resume", str(run), "train.epochs=2", "--quiet"]) == 0
    assert main(["evaluate", str(run)]) == 0
    opened = open_run(run)
    samples = load_raw(opened.config.data.name, "test").gather([0, 1])[0]
    if opened.config.data.size:
        samples = functional.interpolate(samples, opened.config.data.size)
    if opened.task.reads_text:
        inputs = tmp_path / "new.txt"
        inputs.write_text(" ".join(opened.classes[:5]))
    else:
        inputs = tmp_path / "new.npy"
        np.save(inputs, samples.numpy())
    capsys.readouterr()
    out = ["--out", str(tmp_path / "answers")] if opened.task.writes_files else []
    assert main(["predict", str(run), str(inputs), *out]) == 0
    assert "new." in capsys.readouterr().out
    (run / "report.html").unlink()
    assert main(["report", str(run)]) == 0
    assert (run / "report.html").stat().st_size > 1000
