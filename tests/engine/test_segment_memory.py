"""Memory of a text is carried from batch to batch, by training, evaluations and resumed runs."""

from __future__ import annotations

import math

import pytest
import torch
from pixel_run import weights

from equipoise import create_model
from equipoise.core import Interrupted
from equipoise.data import Dataset, batch_count, batches
from equipoise.engine import CheckpointError, TrainConfig, Trainer, evaluate
from equipoise.engine.progress import make_progress
from equipoise.engine.segment_memory import SegmentMemory
from equipoise.engine.tasks import LanguageModelling


def text(rows, length=4, classes=7):
    numbers = torch.randint(classes, (rows * length + 1,), generator=torch.manual_seed(0))
    x, y = numbers[:-1].reshape(rows, length), numbers[1:].reshape(rows, length)
    return Dataset("made-up", "train", "text", tuple("abcdefg"), (length,), x, y)


def order(dataset, size, **options):
    numbered = Dataset(
        "made-up", "train", "text", ("a",), (1,), torch.arange(len(dataset))[:, None], dataset.y
    )
    return [x[:, 0].tolist() for x, _ in batches(numbered, size, continuous=True, **options)]


def test_batches_continue_the_text_of_each_row():
    data = text(11)
    assert order(data, 4) == [[0, 2, 4, 6], [1, 3, 5, 7]]  # what is left over is left out
    assert batch_count(data, 4, continuous=True) == 2
    assert order(data, 4, shuffle=False) == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8]]
    halves = [order(data, 2, shuffle=False, rank=rank, world=2) for rank in (0, 1)]
    assert halves == [[[0, 6], [1, 7], [2, 8]], [[3, 9], [4, 10], [5]]]
    assert order(text(3), 8) == [[0, 1, 2]]


def model(name="transformer-tiny", **options):
    torch.manual_seed(3)
    return create_model(name, num_classes=7, memory_length=6, **options)


def test_evaluation_reads_a_text_as_if_it_were_one():
    """One row at a time, the score is that of the whole text at once, as far as memory goes."""
    net = model("transformer-explicit-tiny").double()
    net.memory_length = 100
    data = text(5)
    found = evaluate(net, LanguageModelling(7), data, batch=1).metrics["perplexity"]
    with torch.no_grad():
        output = net.eval()(data.x.reshape(1, -1))
    loss = torch.nn.functional.cross_entropy(output[0], data.y.reshape(-1))
    assert found == pytest.approx(math.exp(loss), rel=1e-9)
    # And again the same: nothing is left from the first time.
    assert evaluate(net, LanguageModelling(7), data, batch=1).metrics["perplexity"] == found


def test_memory_of_a_row_that_is_not_finite_is_not_carried_on():
    class Broken(torch.nn.Module):
        memory_length = 2

        def start_memory(self, batch):
            return torch.zeros(batch, 0, 3)

        def forward(self, x, memory):
            return x, torch.tensor([1.0, math.nan])[:, None, None].expand(2, 1, 3)

    memory = SegmentMemory(Broken())
    memory.run(Broken(), torch.zeros(2, 1))
    memory.advance()
    assert memory._rows[:, 0, 0].tolist() == [1.0, 0.0]


def trainer(folder, evaluate_batch=2, **settings):
    return Trainer(
        model(dropout=0.1),
        LanguageModelling(7),
        text(24),
        text(6),
        settings=TrainConfig(epochs=2, batch=4, evaluate_batch=evaluate_batch, **settings),
        folder=folder,
        progress=make_progress(quiet=True),
    )


@pytest.mark.parametrize("accumulate", [1, 2])
def test_resumed_run_remembers_what_it_had_read(tmp_path, monkeypatch, accumulate):
    whole = trainer(tmp_path / "whole", accumulate=accumulate)
    whole.fit()
    stopped = trainer(tmp_path / "stopped", accumulate=accumulate)
    made = []

    def stop_after_three():
        made.append(1)
        return len(made) == 3

    monkeypatch.setattr("equipoise.engine.trainer.stop_requested", stop_after_three)
    with pytest.raises(Interrupted):
        stopped.fit()
    monkeypatch.undo()
    assert stopped.position.step == 3
    resumed = trainer(tmp_path / "stopped", accumulate=accumulate)
    loaded = []
    load = SegmentMemory.load

    def spy(memory, tensors, group):
        load(memory, tensors, group)
        loaded.append(memory._rows.clone())

    monkeypatch.setattr(SegmentMemory, "load", spy)
    resumed.fit(resume=True)
    assert loaded[0].shape == (4, 6, 96)
    assert loaded[0].any()
    assert torch.equal(weights(resumed), weights(whole))


def test_text_that_is_scored_in_other_pieces_is_another_run(tmp_path):
    trainer(tmp_path).fit()
    with pytest.raises(CheckpointError, match=r"train\.evaluate_batch differs"):
        trainer(tmp_path, evaluate_batch=3).fit(resume=True)


def test_parts_of_a_batch_have_the_memory_of_their_rows():
    net = model().eval()
    whole, parts = SegmentMemory(net), SegmentMemory(net)
    data = text(8)
    for x, _ in batches(data, 4, shuffle=False, continuous=True):
        with torch.no_grad():
            at_once = whole.run(net, x)
            in_parts = torch.cat([parts.run(net, x[:1]), parts.run(net, x[1:])])
        whole.advance()
        parts.advance()
        assert torch.allclose(at_once, in_parts, atol=1e-2)
