"""`equipoise predict` continues a text, greedily or by draws."""

from __future__ import annotations

import csv
import io
import math

import pytest
import torch

from equipoise import create_model
from equipoise.cli import main
from equipoise.engine.tasks import LanguageModelling

CONFIG = """
[model]
name = "transformer-tiny"
options = { memory_length = 8 }

[data]
name = "text"
root = "texts"
options = { tokens = "TOKENS", length = 8 }

[train]
steps = 30
batch = 4

[optimizer]
name = "adam"
learning_rate = 1e-2
"""


@pytest.fixture(scope="module", params=["words", "characters", "bytes"])
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    (folder / "texts").mkdir()
    for split in ("train", "valid", "test"):
        (folder / "texts" / f"{split}.txt").write_text("the cat sees the dog .\n" * 40)
    config = CONFIG.replace("TOKENS", request.param).replace('"texts"', f'"{folder / "texts"}"')
    (folder / "config.toml").write_text(config)
    source, out = str(folder / "config.toml"), str(folder / "run")
    assert main(["train", source, "--output", out, "--quiet"]) == 0
    return request.param, folder / "run"


def ask(capsys, *words):
    capsys.readouterr()
    code = main([str(word) for word in words])
    return code, capsys.readouterr()


def continued(capsys, folder, *words):
    code, told = ask(capsys, "predict", folder, *words)
    assert code == 0, told.err
    return [row[1] for row in csv.reader(io.StringIO(told.out))][1:]


def test_predict_continues_a_text_from_the_command_line(run, capsys):
    tokens, folder = run
    begin, length = "the cat", 5
    options = ("--text", begin, "--length", length)
    greedy = continued(capsys, folder, *options)
    assert greedy[0].startswith(begin)
    assert greedy == continued(capsys, folder, *options)
    hot = (*options, "--temperature", 50)
    one, two = (continued(capsys, folder, *hot, "--seed", seed) for seed in (1, 2))
    assert one != two
    # Whatever text is beside it.
    assert continued(capsys, folder, *hot, "--seed", 1, "--text", "the dog")[0] == one[0]
    if tokens == "words":
        assert len(greedy[0].split(" ")) <= len(begin.split()) + length


@pytest.mark.filterwarnings("default::equipoise.engine.inputs.UnknownTokenWarning")
def test_predict_says_what_is_wrong_with_a_text(run, capsys):
    tokens, folder = run
    code, told = ask(capsys, "predict", folder, "--text", "")
    assert code == 2
    assert "--text must be the beginning of a text; got ''. Write a word: --text 'The'." in told.err
    code, told = ask(capsys, "predict", folder)
    assert "must be given a file or a text (--text) to predict for; got none" in told.err
    for option, value in (("--length", 0), ("--temperature", -1), ("--seed", -1)):
        code, told = ask(capsys, "predict", folder, "--text", "the", option, value)
        assert code == 2
        assert f"{option} must be" in told.err
    if tokens == "words":
        code, told = ask(capsys, "predict", folder, "--text", "the zebra", "--length", 1)
        assert code == 0
        assert "text[0]: the model does not know 'zebra', and reads <unk> in place" in told.err


def test_run_is_watched_on_the_validation_text_and_scored_on_the_test_text(run, capsys):
    tokens, folder = run
    code, told = ask(capsys, "evaluate", folder)
    assert code == 0
    bits = {"words": None, "characters": "bits/character", "bytes": "bits/byte"}[tokens]
    assert "perplexity" in told.out
    assert bits is None or bits in told.out
    summary = (folder / "summary.json").read_text()
    assert '"validation": {\n  "loss"' in summary


def test_bits_are_the_logarithm_of_perplexity():
    output, target = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    score = LanguageModelling(7, tokens="characters").score()
    score.update(output, target)
    found = score.compute()
    assert found["bits_per_character"] == pytest.approx(math.log2(found["perplexity"]))
    assert [*LanguageModelling(7).score().compute()] == ["perplexity"]


def test_continuation_by_memory_is_that_of_the_whole_text():
    torch.manual_seed(0)
    model = create_model("transformer-explicit-tiny", num_classes=9, memory_length=50).eval()
    x = torch.randint(9, (2, 6))
    task = LanguageModelling(9, continuation=8, window=4, temperature=0.7, seed=5)
    names = tuple("abcdefghi")
    with torch.no_grad():
        remembered = task.respond(model, x, names)
        model.memory_length = 0
        whole = LanguageModelling(9, continuation=8, temperature=0.7, seed=5)
        assert whole.respond(model, x, names) == remembered
