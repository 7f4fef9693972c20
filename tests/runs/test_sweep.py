import csv
import json
import os
import signal
import sys
import types
from pathlib import Path

import pytest

from equipoise.cli import main
from equipoise.core import ConvergenceError, SourceError
from equipoise.engine import Summary
from equipoise.report import SweepReport, SweptRun, render_sweep
from equipoise.runs import dump_config, load_config
from equipoise.runs import sweep as module
from equipoise.runs.sweep import split_values, sweep
from equipoise.runs.sweep_report import report_sweep
from equipoise.runs.sweep_table import format_table

SMALL = ["train.epochs=1", "data.subset=100", "train.batch=50"]


def summary(score, metric="accuracy", **changes):
    scores = {"loss": 1.0, metric: score, "samples": 10, "missed": 2}
    values = {"validation": {}, "test": scores, **changes}
    return Summary(
        "finished",
        1,
        1,
        2,
        0.1,
        {"total": 3},
        metric,
        scores,
        values["validation"],
        values["test"],
        0,
        {},
        {},
    )


@pytest.fixture
def here(monkeypatch):
    """Run the jobs in this process, by a function that tests may change."""
    calls = []

    def train(config, folder, *, resume, quiet):
        assert resume
        assert quiet
        calls.append(folder.name)
        if config.train.seed == 3:
            raise ConvergenceError("10 steps in a row were skipped")
        if config.train.seed == 4:
            raise ValueError("data.root must hold the files")
        folder.mkdir()
        (folder / "config.toml").write_text(dump_config(config))
        found = summary(config.train.seed / 10)
        (folder / "summary.json").write_text(json.dumps(found.to_dict()))
        return found

    monkeypatch.setattr(module, "train_run", train)
    monkeypatch.setattr(
        module, "_run_local", lambda calls, _: ((call[1], module._train(*call)) for call in calls)
    )
    return calls


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("1", ["1"]),
        ("1e-3,1e-2", ["1e-3", "1e-2"]),
        ("[0.9, 0.99],[0.8, 0.9]", ["[0.9, 0.99]", "[0.8, 0.9]"]),
        ("{a = 1, b = [2, 3]},x", ["{a = 1, b = [2, 3]}", "x"]),
        ('"a,b",c', ['"a,b"', "c"]),
        ('"a\\",b",c', ['"a\\",b"', "c"]),
        ("it's,ours", ["it's", "ours"]),
        ("a],b", ["a]", "b"]),
        ("", [""]),
        ("1,", ["1", ""]),
    ],
)
def test_values_are_split_where_toml_would_not_need_the_comma(text, parts):
    assert split_values(text) == parts


@pytest.mark.usefixtures("here")
def test_sweep_tries_all_combinations_and_sorts_them(tmp_path, capsys):
    rows = sweep(
        "digits",
        SMALL,
        {"train.seed": ["1", "2"], "optimizer.betas": ["[0.9, 0.9]", "[0.8, 0.9]"]},
        tmp_path / "s",
    )
    assert [(row["train.seed"], row["optimizer.betas"]) for row in rows] == [
        ("2", "[0.9, 0.9]"),
        ("2", "[0.8, 0.9]"),
        ("1", "[0.9, 0.9]"),
        ("1", "[0.8, 0.9]"),
    ]
    assert rows[0]["run"] == "002-train.seed=2-optimizer.betas=_0.9__0.9_"
    assert load_config(tmp_path / "s" / rows[0]["run"]) == load_config(
        "digits", [*SMALL, "train.seed=2", "optimizer.betas=[0.9, 0.9]"]
    )
    with open(tmp_path / "s" / "sweep.csv", newline="") as file:
        stored = list(csv.DictReader(file))
    assert [(row["run"], float(row["score"])) for row in stored] == [
        (row["run"], row["score"]) for row in rows
    ]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1/4  000-train.seed=1-optimizer.betas=_0.9__0.9_: test accuracy 0.1"
    assert len(lines) == 4


@pytest.mark.usefixtures("here")
def test_sweep_goes_on_after_a_failure_and_tells_it(tmp_path):
    rows = sweep("digits", SMALL, {"train.seed": ["3", "4", "1"]}, tmp_path / "s")
    assert [row["status"] for row in rows] == ["finished", "diverged", "failed"]
    assert rows[1]["reason"] == "10 steps in a row were skipped"
    assert "data.root must hold the files" in (tmp_path / "s" / "sweep.csv").read_text()
    first, *rest = format_table(rows).splitlines()
    assert first.split("  ")[:3] == ["run", "seed", "status"]
    assert first.split()[3:] == ["test", "accuracy", "loss", "missed", "epochs", "seconds"]
    assert rest[0].split()[:4] == ["002", "1", "finished", "0.1"]
    assert rest[-1].startswith(f"{rows[-1]['run'][:3]}: ")
    assert "000: 10 steps in a row were skipped" in rest


def test_sweep_table_fits_a_terminal_however_long_its_settings_are():
    keys = ("optimizer.learning_rate", "model.options.tolerance", "model.options.solver")
    rows = [
        {
            "run": f"{number:03d}-x",
            **dict.fromkeys(keys, f"value-{number}"),
            "data.root": "a/folder/with/a/long/name" * number,
            "status": "finished",
            "split": "validation",
            "metric": "accuracy",
            "score": 0.91234,
            "loss": 0.1,
            "missed": 0,
            "epochs": 10,
            "seconds": 123.4,
        }
        for number in range(3)
    ]
    rows.append({"run": "003-x", "status": "failed", "reason": "there is no such file. " * 9})
    text = format_table(rows)
    assert all(len(line) <= 80 for line in text.splitlines()), text
    head = text.splitlines()[0]
    assert head.split()[:4] == ["run", "learning_rate", "tolerance", "solver"]
    assert "validation accuracy" in head or "..." in head
    assert "003: there is no such file." in text
    assert text.endswith("more columns: sweep.csv")
    same = [{"run": "000-x", "model.seed": "1", "train.seed": "2"}]
    assert format_table(same) == "run  model.seed  train.seed\n000  1           2"


def test_sweep_again_only_runs_what_is_not_finished(tmp_path, here):
    sweep("digits", SMALL, {"train.seed": ["1", "3"]}, tmp_path / "s")
    rows = sweep("digits", SMALL, {"train.seed": ["1", "3"]}, tmp_path / "s")
    assert here == ["000-train.seed=1", "001-train.seed=3", "001-train.seed=3"]
    assert [row["status"] for row in rows] == ["finished", "diverged"]


@pytest.mark.usefixtures("here")
def test_sweep_refuses_the_folder_of_another_one(tmp_path):
    sweep("digits", SMALL, {"train.seed": ["1"]}, tmp_path / "s")
    with pytest.raises(ValueError, match=r"000-train.seed=1: holds a run with another config"):
        sweep("digits", [*SMALL, "train.clip=1"], {"train.seed": ["1"]}, tmp_path / "s")


def test_sweep_sees_mistakes_before_anything_runs(tmp_path, here):
    with pytest.raises(ValueError, match=r"^train.seed=x: train.seed must be a whole number"):
        sweep("digits", SMALL, {"train.seed": ["1", "x"]}, tmp_path / "s")
    with pytest.raises(ValueError, match=r"sweep.jobs must be a whole number of at least 1"):
        sweep("digits", SMALL, {}, tmp_path / "s", jobs=0)
    assert not here
    assert not (tmp_path / "s").exists()


@pytest.mark.usefixtures("here")
def test_sweep_takes_the_held_out_score_and_knows_which_scores_are_small(tmp_path, monkeypatch):
    def train(config, *_, **__):
        better = {"perplexity": 100.0 - config.train.seed, "loss": 1.0, "samples": 5, "missed": 0}
        return summary(1.0, "perplexity", validation=better)

    monkeypatch.setattr(module, "train_run", train)
    rows = sweep("digits", [*SMALL, "data.holdout=0.1"], {"train.seed": ["1", "2"]}, tmp_path / "s")
    assert [(row["split"], row["score"]) for row in rows] == [
        ("validation", 98.0),
        ("validation", 99.0),
    ]


@pytest.mark.usefixtures("here")
def test_sweep_name_of_a_folder_is_safe_and_short(tmp_path):
    rows = sweep("digits", SMALL, {"data.root": ["../../a b", "/" * 300]}, tmp_path / "s")
    names = {row["run"] for row in rows}
    assert "000-data.root=.._.._a_b" in names
    assert max(map(len, names)) <= 120
    assert {path.name for path in (tmp_path / "s").iterdir()} == {
        *names,
        "sweep.csv",
        "report.html",
    }


def test_sweep_runs_in_processes_of_their_own(tmp_path):
    (row,) = sweep("digits", SMALL, {"train.seed": ["1"]}, tmp_path / "s", jobs=2)
    assert row["status"] == "finished"
    assert 0 <= row["score"] <= 1
    folder = tmp_path / "s" / "000-train.seed=1"
    assert json.loads((folder / "environment.json").read_text())["threads"] == 1
    # The config of a run also holds what was taken from the data, and is the same all the same.
    assert load_config(folder).model.options == {"num_classes": 10}
    assert sweep("digits", SMALL, {"train.seed": ["1"]}, tmp_path / "s") == [row]


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def test_sweep_survives_a_process_that_dies(monkeypatch):
    monkeypatch.setattr(module, "_train_spawned", die)
    rows = list(module._run_local([(load_config("digits"), Path("a"), 1)], 1))
    assert rows[0][1]["status"] == "failed"
    assert "its process died" in rows[0][1]["reason"]


def test_sweep_on_ray_says_that_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install ray"):
        sweep("digits", SMALL, {}, tmp_path / "s", pool="ray")


@pytest.mark.usefixtures("here")
def test_sweep_on_ray_runs_the_same_function(tmp_path, monkeypatch):
    started = []

    def remote(**options):
        started.append(options)
        return lambda function: types.SimpleNamespace(
            remote=lambda *call: (function, call).__iter__()
        )

    class RayError(Exception):
        pass

    def get(task):
        function, call = task
        if call[0].train.seed == 5:
            raise RayError("The worker died.\nMore about it.")
        return function(*call)

    fake = types.SimpleNamespace(
        init=lambda **_: None,
        remote=remote,
        get=get,
        wait=lambda tasks, num_returns: (tasks[:num_returns], tasks[num_returns:]),
        exceptions=types.SimpleNamespace(RayError=RayError),
    )
    monkeypatch.setitem(sys.modules, "ray", fake)
    rows = sweep("digits", SMALL, {"train.seed": ["1", "5", "2"]}, tmp_path / "s", pool="ray")
    assert [row["train.seed"] for row in rows] == ["2", "1", "5"]
    assert rows[2]["reason"] == "Ray could not run it (The worker died.); run the sweep again."
    assert started == [{"num_cpus": 1}]


def test_sweep_on_a_real_ray_gives_what_local_processes_give(tmp_path):
    ray = pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    grid = {"train.seed": ["1", "2"]}
    try:
        rows = sweep("digits", SMALL, grid, tmp_path / "ray", pool="ray")
    finally:
        ray.shutdown()
    local = sweep("digits", SMALL, grid, tmp_path / "local")
    assert [(row["run"], row["score"], row["loss"]) for row in rows] == [
        (row["run"], row["score"], row["loss"]) for row in local
    ]


@pytest.mark.usefixtures("here")
def test_sweep_page_compares_settings_over_seeds(tmp_path):
    """Scores are a tenth of the seed; seed 3 fails."""
    folder = tmp_path / "rates"
    grid = {"optimizer.learning_rate": ["1e-3", "1e-2"], "train.seed": ["1", "2", "3", "5"]}
    sweep("digits", SMALL, grid, folder)
    page = (folder / "report.html").read_text().replace("\u202f", " ")
    assert "<h1>Sweep rates</h1>" in page
    assert "opteq-digits on digits" in page
    # 10, 20 and 50 %, of which the deviation is 20.82
    cells = ["3 of 4", "26.67 %", "20.82 %", "50.00 %", "10.00 %"]
    row = "".join(f"<td>{cell}</td>" for cell in cells)
    assert page.count(row) == 2
    assert "10 steps in a row were skipped" in page
    assert page.count("<td>diverged</td>") == 2
    assert "best test accuracy, mean of 3 seeds" in page


@pytest.mark.usefixtures("here")
def test_sweep_page_draws_the_curves_of_runs_and_their_mean(tmp_path):
    folder = tmp_path / "s"
    sweep("digits", SMALL, {"train.seed": ["1", "2"]}, folder)
    for run, scores in zip(sorted(folder.glob("0*")), ([0.5, 0.7, 0.9], [0.3, 0.5]), strict=True):
        lines = [
            {"kind": "epoch", "epoch": k, "step": 2 * k, "test": {"accuracy": score}}
            for k, score in enumerate(scores)
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = report_sweep(folder).read_text()
    # up to the last epoch that both have
    assert "Accuracy, test (%) by epoch: all runs from 40.00 to 60.00." in page
    assert "each seed" in page
    (folder / "000-train.seed=1" / "metrics.jsonl").write_text("no JSON\n" * 3)
    assert "all runs from 30.00 to 50.00." in report_sweep(folder).read_text()


def test_sweep_page_of_one_run_for_each_setting_is_ordered_by_score():
    runs = [
        SweptRun(f"{k:03d}", {"task.loss": str(k)}, "finished", metric="rmse", score=score)
        for k, score in enumerate([0.3, 0.1, 0.2])
    ]
    page = render_sweep(SweepReport("s", runs=runs))
    assert "Mean and deviation" not in page
    assert '<dd class="value">0.1</dd><dd class="more">task.loss=1</dd>' in page


@pytest.mark.parametrize("text", ["run\n../other\n", "name\nx\n", "run\nx,y\n", "run\n\n/etc\n"])
def test_sweep_page_of_a_table_that_names_no_runs_is_refused(tmp_path, text):
    (tmp_path / "sweep.csv").write_text(text)
    with pytest.raises(SourceError, match="must name a folder of the sweep"):
        report_sweep(tmp_path)


def test_sweep_page_of_hostile_names_is_harmless():
    harm = "<script>alert(1)</script>"
    run = SweptRun(harm, {harm: harm}, harm, harm, harm, 0.5, reason=harm)
    page = render_sweep(SweepReport(harm, harm, [run, SweptRun("x", score=float("inf"))]))
    assert "<script" not in page
    assert "Sweep" not in render_sweep(SweepReport("none"))


def test_sweep_is_reported_again_by_the_command(tmp_path, capsys):
    (tmp_path / "sweep.csv").write_text("run,train.seed,status,split,metric,score\n000,1,finished,")
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
