"""No model may learn across its batch, and none of text may see what it is to predict."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from equipoise import Cell, Equilibrium
from equipoise.data import Dataset
from equipoise.engine import OptimizerConfig, TrainConfig, Trainer, read_metrics
from equipoise.engine.tasks import LanguageModelling

TOKENS, WIDTH = 7, 16


class Recurrent(nn.Module):
    """torch's LSTM, whose first dimension is time unless it is told otherwise."""

    def __init__(self, *, batch_first: bool, bidirectional: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.memory = nn.LSTM(WIDTH, WIDTH, batch_first=batch_first, bidirectional=bidirectional)
        self.head = nn.Linear(WIDTH * (1 + bidirectional), TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.memory(self.embed(x))[0])


class Attention(nn.Module):
    def __init__(self, *, batch_first: bool, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=batch_first)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1] if self.layer.self_attn.batch_first else x.shape[0]
        mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1) if self.causal else None
        return self.head(self.layer(self.embed(x), src_mask=mask))


class CausalCell(Cell):
    """z_t = tanh(A z_(t - 1) + x_t / 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.A = nn.Linear(WIDTH, WIDTH)

    def inject(self, x: Tensor) -> Tensor:
        return x / 2

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        before = nn.functional.pad(z, (0, 0, 1, 0))[:, :-1]
        return torch.tanh(0.5 * self.A(before) + context)


class EquilibriumText(nn.Module):
    def __init__(self, tolerance: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.layer = Equilibrium(CausalCell(), tolerance=tolerance)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(x)))


class TimeFirst(nn.Module):
    """Right inside, but its output is (length, batch, classes)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Recurrent(batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).transpose(0, 1)


def texts(count: int = 6, length: int = 10) -> Dataset:
    torch.manual_seed(0)
    x = torch.randint(TOKENS, (count, length + 1))
    classes = tuple("abcdefg")
    return Dataset("t", "train", "text", classes, (length,), x[:, :-1], x[:, 1:], tokens="words")


ACROSS = r"for a sample must not depend on the other samples of its batch; .*batch_first=True"
AHEAD = r"at a token must not depend on later tokens, which it is to predict"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Recurrent(batch_first=False), ACROSS),
        (lambda: Attention(batch_first=False), ACROSS),
        (lambda: Attention(batch_first=False, causal=False), ACROSS),
        (lambda: Recurrent(batch_first=True, bidirectional=True), AHEAD),
        (lambda: Attention(batch_first=True, causal=False), AHEAD),
        (TimeFirst, r"must have the shape \(batch, length, classes\), the batch first; got shape"),
    ],
)
@pytest.mark.parametrize("length", [3, 6, 10])
def test_trainer_refuses_a_sequence_model_across_the_batch_or_ahead_of_time(make, reason, length):
    for seed in range(3):
        torch.manual_seed(seed)
        with pytest.raises(ValueError, match=reason):
            Trainer(
                make(),
                LanguageModelling(TOKENS),
                texts(length=length),
                settings=TrainConfig(batch=6),
            )


class Gated(nn.Module):
    """What it must not see goes through a gate that begins at 0, and training opens it."""

    def __init__(self, *, ahead: bool) -> None:
        super().__init__()
        self.ahead = ahead
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.gate = nn.Parameter(torch.zeros(()))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        seen = h.roll(-1, 1) if self.ahead else h.roll(1, 0)
        return self.head(h + self.gate * seen)


@pytest.mark.parametrize(("ahead", "reason"), [(True, AHEAD), (False, ACROSS)])
@pytest.mark.parametrize("scored", [True, False])
def test_model_that_learns_to_see_too_much_gets_no_score(tmp_path, ahead, reason, scored):
    torch.manual_seed(0)
    trainer = Trainer(
        Gated(ahead=ahead),
        LanguageModelling(TOKENS),
        texts(),
        texts() if scored else None,
        settings=TrainConfig(epochs=30, batch=6, evaluate_every=10),
        optimizer=OptimizerConfig("adam", 0.05),
        folder=tmp_path,
    )
    with pytest.raises(ValueError, match=reason):
        trainer.fit()
    assert not any("test" in line for line in read_metrics(tmp_path / "metrics.jsonl"))
    assert (tmp_path / "model.safetensors").is_file()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Recurrent(batch_first=True),
        lambda: Attention(batch_first=True),
        lambda: EquilibriumText(1e-1),
        lambda: EquilibriumText(1e-6),
    ],
)
def test_trainer_takes_causal_models_that_keep_samples_apart(make):
    for seed in range(3):
        torch.manual_seed(seed)
        Trainer(make(), LanguageModelling(TOKENS), texts(), settings=TrainConfig(batch=6))


def test_language_task_takes_no_stream_of_single_tokens():
    task = LanguageModelling(TOKENS)
    with pytest.raises(ValueError, match=r"target .* must have the shape \(batch, length\)"):
        task.check(torch.zeros(5, TOKENS), torch.zeros(5, dtype=torch.int64))
