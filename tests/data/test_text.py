"""Texts of any folder, as words, characters or bytes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from equipoise.data import DataError, Dataset, find_scored_split, load_data
from equipoise.data.vocabulary import Vocabulary, split_text
from equipoise.engine import evaluate, make_task


def text_of(dataset: Dataset) -> str:
    """All of a text, each token once."""
    assert dataset.x is not None
    assert dataset.y is not None
    numbers = [*dataset.x.flatten().tolist(), int(dataset.y[-1, -1])]
    return Vocabulary(dataset.tokens or "words", dataset.classes).decode(numbers)


def test_text_samples_are_rows_with_the_next_token_as_target(tmp_path: Path) -> None:
    (tmp_path / "ptb.train.txt").write_text("a b a\n c <unk>\nb")
    dataset = load_data("text", root=tmp_path, length=3)
    assert dataset.classes == ("a", "b", "<eos>", "c", "<unk>")
    assert dataset.shape == (3,)
    assert dataset.x.tolist() == [[0, 1, 0], [2, 3, 4]]
    assert dataset.y.tolist() == [[1, 0, 2], [3, 4, 2]]


@pytest.mark.parametrize("tokens", ["words", "characters", "bytes"])
def test_text_comes_back_whatever_its_tokens_are(tmp_path: Path, tokens: str) -> None:
    text = "Größe ∂ der\nwelt 😀 , über"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    count = len(split_text(text.encode(), tokens))
    dataset = load_data("text", root=tmp_path / "a.txt", length=count - 1, tokens=tokens)
    assert text_of(dataset).strip() == text
    assert len(dataset.classes) == {"words": 9, "characters": 17, "bytes": 256}[tokens]


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"train.txt": "a b", "valid.txt": "c d", "test.txt": "e f"}, ("a b", "c d", "e f")),
        ({"wiki.train.tokens": "a b", "wiki.valid.tokens": "c d"}, ("a b", "c d", None)),
        (
            {"train/x.txt": "a b\n", "train/sub/y.txt": "x", "dev/z.txt": "c d"},
            ("xa b\n", "c d", None),
        ),
        (
            {"chapter2.txt": "c d", "chapter1.txt": "a b\n", "notes.md": "no"},
            ("a b\nc d", None, None),
        ),
    ],
)
def test_text_files_are_found_by_their_names(tmp_path: Path, files, found) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for split, text in zip(("train", "val", "test"), found, strict=True):
        options = {"tokens": "characters", "length": 2}
        if text is None:
            with pytest.raises(DataError, match=f"text needs a file {split}.txt in this folder"):
                load_data("text", split, tmp_path, **options)
        else:
            dataset = load_data("text", split, tmp_path, vocabulary=tuple("abcdefx \n"), **options)
            assert text_of(dataset) == text


def test_text_vocabulary_is_that_of_the_training_part_alone(tmp_path: Path) -> None:
    path = tmp_path / "all.txt"
    path.write_text("a a a b b c d\n" * 2 + "z z z z z b\n")
    train = load_data("text", "train", path, length=2, holdout=0.3)
    held = load_data("text", "val", path, length=2, holdout=0.3)
    assert train.classes == held.classes == ("a", "b", "c", "d", "<eos>", "<unk>")
    assert " ".join(text_of(train).split()) == "a a a b b c d a a a b b c d"
    assert text_of(held).split() == ["<unk>", "<unk>", "<unk>", "<unk>", "<unk>", "b"]
    assert find_scored_split("text", path, holdout=0.3) is None  # data.holdout is what is scored
    few = load_data("text", "train", path, length=2, holdout=0.3, max_vocabulary=4)
    assert few.classes == ("a", "b", "<eos>", "<unk>")
    assert "c" not in text_of(few)


def test_text_is_scored_to_its_end(tmp_path: Path) -> None:
    """The perplexity is over all tokens that have one before them, also in a short last row."""
    (tmp_path / "train.txt").write_text("abcd" * 4)
    (tmp_path / "test.txt").write_text("abcdabcdab")
    options = {"length": 4, "tokens": "characters"}
    train, test = (load_data("text", split, tmp_path, **options) for split in ("train", "test"))
    assert train.y.tolist() == [[1, 2, 3, 0]] * 3
    assert test.x.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 1, 1]]
    assert test.y.tolist() == [[1, 2, 3, 0], [1, 2, 3, 0], [1, -100, -100, -100]]
    logits = torch.randn(len(test.classes), len(test.classes))  # by the token before
    found = evaluate(nn.Embedding.from_pretrained(logits), make_task("auto", train), test, batch=2)
    pairs = torch.tensor([0, 1, 2, 3] * 2 + [0]), torch.tensor([1, 2, 3, 0] * 2 + [1])
    loss = functional.cross_entropy(logits[pairs[0]], pairs[1]).item()
    assert found.metrics["loss"] == pytest.approx(loss)
    assert found.metrics["perplexity"] == pytest.approx(math.exp(loss))
    (tmp_path / "test.txt").write_text("a")
    with pytest.raises(DataError, match="has 1 characters in 'test', of which none has a next one"):
        load_data("text", "test", tmp_path, **options)


def test_text_refuses_what_it_cannot_read_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes("Stra\u00dfe".encode("latin-1") * 20)
    with pytest.raises(DataError, match=r"not text in UTF-8 \(byte 4\); .* tokens = 'bytes'"):
        load_data("text", root=path, length=4)
    assert text_of(load_data("text", root=path, length=4, tokens="bytes"))[:4] == "Stra"
    with pytest.raises(DataError, match="has 120 bytes in 'train', too few for one sample of 120 "):
        load_data("text", root=path, length=120, tokens="bytes")
    (tmp_path / "train.txt").write_text("a")
    (tmp_path / "ptb.train.txt").write_text("a")
    with pytest.raises(DataError, match=r"several texts for 'train': ptb.train.txt, train.txt"):
        load_data("text", root=tmp_path)
    for wrong in ({"tokens": "letters"}, {"length": 0}, {"max_vocabulary": 2}, {"holdout": 1.0}):
        with pytest.raises(ValueError, match=f"Text.{next(iter(wrong))} must"):
            load_data("text", root=path, **wrong)
