import re
from pathlib import Path

import pytest
import torch
from torch import nn

from equipoise import OptEq
from equipoise.cli import main
from equipoise.data import Dataset
from equipoise.engine import TrainConfig, Trainer, make_task
from equipoise.runs import report_trainer


def table(split: str, count: int) -> Dataset:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(count))
    y = (x[:, 0] > 0).long()
    return Dataset("flowers", split, "arrays", ("rose", "tulip"), (4,), x, y)


def make_trainer(folder: Path | None) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(OptEq(4, 4, 6), nn.Linear(4, 2))
    train = table("train", 40)
    task = make_task("classification", train)
    settings = TrainConfig(epochs=2, batch=10, log_every=1)
    return Trainer(model, task, train, table("test", 20), settings=settings, folder=folder)


def test_trainer_from_python_has_a_page_with_settings_and_samples(tmp_path, capsys):
    trainer = make_trainer(tmp_path / "run")
    summary = trainer.fit()
    trainer.model.train()
    state = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    path = report_trainer(trainer, summary)
    assert trainer.model.training
    assert all(torch.equal(state[key], value) for key, value in trainer.model.state_dict().items())
    assert path == tmp_path / "run" / "report.html"
    page = path.read_text().replace("\u202f", " ")
    assert "<h1>Sequential on flowers</h1>" in page
    wrong = round(20 * (1 - summary.test["accuracy"]))
    assert f"{wrong} of 20 test samples" in page if wrong else "None of 20 test samples" in page
    assert "Solves of 20 test samples" in page
    assert re.search(r'scope="row">evaluate_batch</th><td>256</td>', page)
    assert "torch.nn.modules.container.Sequential" in page
    assert "tulip" in page
    assert "not finished" not in page
    # its model is unknown to the command, which says what to do
    assert main(["report", str(tmp_path / "run")]) == 2
    assert "equipoise.runs.report_trainer" in capsys.readouterr().err


def test_trainer_without_summary_or_folder_says_so(tmp_path):
    assert "not finished" in report_trainer(make_trainer_that_stopped(tmp_path / "run")).read_text()
    with pytest.raises(ValueError, match=r"Trainer\.folder must be given to keep a page"):
        report_trainer(make_trainer(None))


def make_trainer_that_stopped(folder: Path) -> Trainer:
    """One whose process was killed, and that was made again."""
    make_trainer(folder).fit()
    (folder / "metrics.jsonl").write_text(
        "".join((folder / "metrics.jsonl").read_text().splitlines(keepends=True)[:3])
    )
    return make_trainer(folder)
