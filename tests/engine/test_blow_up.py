import re
import sys
import warnings

import pytest
import torch
from torch import nn

from equipoise.core import ConvergenceWarning
from equipoise.data import Dataset
from equipoise.engine import OptimizerConfig, TrainConfig, Trainer, make_task
from equipoise.engine.blow_up import BlowUp
from equipoise.engine.progress import PlainProgress, SilentProgress


def train(rate: float, progress=None, folder=None) -> Trainer:
    torch.manual_seed(0)
    x, y = torch.randn(64, 5), torch.arange(64) % 2
    data = Dataset("made", "train", "arrays", ("a", "b"), (5,), x, y)
    trainer = Trainer(
        nn.Linear(5, 2),
        make_task("auto", data),
        data,
        settings=TrainConfig(epochs=3, batch=16),
        optimizer=OptimizerConfig("sgd", rate),
        progress=progress or SilentProgress(),
        folder=folder,
    )
    trainer.fit()
    return trainer


def test_run_that_blows_up_with_finite_numbers_is_told_once():
    with pytest.warns(ConvergenceWarning) as caught:
        train(1e6)
    assert len(caught) == 1
    text = str(caught[0].message)
    assert text.startswith("the run blows up: at step ")
    assert " the loss is " in text
    assert text.endswith("lower optimizer.learning_rate, or set train.clip or schedule.warmup.")


def test_run_that_learns_is_left_alone():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(0.1)


def test_blow_up_is_a_line_of_the_display(capsys):
    train(1e6, PlainProgress(sys.stdout))
    assert capsys.readouterr().out.count("the run blows up") == 1


@pytest.mark.parametrize(
    ("loss", "first", "largest", "expected"),
    [
        (1.1e4, 1.0, 1.0, r"the loss is 1\.1e\+04 and was 1\.0e\+00 at first"),
        (0.9e4, 1.0, 1.0, ""),
        (1.0, 1e-9, 1.0, ""),  # next to nothing may grow
        (1.0, 1.0, 1e20, r"numbers in the network reach 1\.0e\+20 and will soon overflow"),
        (1.0, 1.0, 1e18, ""),
        (None, None, 0.0, ""),
        (float("nan"), 1.0, float("nan"), ""),  # such a step is skipped, and that is told
    ],
)
def test_blow_up_goes_by_the_growth_of_the_loss_and_the_largest_number(
    loss, first, largest, expected
):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watch = BlowUp()
        watch.look(7, loss, first, largest)
        watch.look(8, loss, first, largest)
    assert len(caught) == bool(expected)
    if expected:
        assert re.search(f"at step 7 {expected}", str(caught[0].message))
