"""A monotone network trains from the terminal, by its preset."""

from equipoise.cli import main


def test_preset_trains_certifies_and_predicts(tmp_path, capsys):
    folder = str(tmp_path / "run")
    assert main(["train", "monotone-digits", "train.epochs=1", "--output", folder]) == 0
    assert "monotone-digits with 4,458 parameters" in capsys.readouterr().err
    assert main(["certify", folder]) == 0
    assert "strongly monotone" in capsys.readouterr().out


def test_margin_that_is_not_positive_is_refused_in_one_sentence(tmp_path, capsys):
    command = ["train", "monotone-digits", "model.options.margin=0.0", "--output"]
    assert main([*command, str(tmp_path / "run")]) != 0
    assert "model.options.margin must be a positive number; got 0.0. Only then" in " ".join(
        capsys.readouterr().err.split()
    )
    assert not (tmp_path / "run").exists()
