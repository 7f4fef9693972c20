import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from equipoise import OptEq, create_model, runs, verify
from equipoise.analysis import Case, Check, Finding, Inequality, Subject, Verdict, find_checks
from equipoise.analysis.check import largest, register_check, smallest
from equipoise.cli import main
from equipoise.core import SettingError
from equipoise.families.relu_implicit import ReluImplicitNetwork

TRUE = Inequality("a", 1.0, "<", 2.0)
FALSE = Inequality("b", 3.0, "<", 2.0)
UNKNOWN = Inequality("c", math.nan, "<", 2.0)


def outcome(hypotheses, conclusions):
    subject = Subject("a thing", lambda _: None, lambda *_: None)
    check = Check("name", "statement", "paper", "Lemma 1", subject, lambda _: None)
    return Verdict(check, "case", Finding(hypotheses, conclusions)).outcome


@pytest.mark.parametrize(
    ("hypotheses", "conclusions", "expected"),
    [
        ([], [TRUE], "holds"),
        ([TRUE], [TRUE, TRUE], "holds"),
        ([TRUE], [TRUE, FALSE], "fails"),
        ([TRUE, FALSE], [TRUE], "does not apply"),
        ([FALSE, UNKNOWN], [FALSE], "does not apply"),
        ([UNKNOWN], [TRUE], "unknown"),
        ([UNKNOWN], [FALSE], "unknown"),
        ([TRUE], [UNKNOWN], "unknown"),
        ([TRUE], [UNKNOWN, FALSE], "fails"),
        ([TRUE], [], "unknown"),
    ],
)
def test_outcome_follows_from_hypotheses_and_conclusions(hypotheses, conclusions, expected):
    assert outcome(hypotheses, conclusions) == expected


@pytest.mark.parametrize(
    ("one", "holds", "margin"),
    [
        (Inequality("", 1.0, "<=", 1.0), True, 0.0),
        (Inequality("", 1.0, "<", 1.0), False, 0.0),
        (Inequality("", 1.0, ">", 0.5), True, 0.5),
        (Inequality("", 0.5, ">=", 1.0), False, -0.5),
        (Inequality("", 1.0 + 1e-9, "<=", 1.0, 1e-8), True, -1e-9),
        (Inequality("", math.inf, "<=", math.inf), True, 0.0),
        (Inequality("", math.inf, "<", 1.0), False, -math.inf),
    ],
)
def test_inequality_has_a_margin_and_a_truth(one, holds, margin):
    assert one.holds is holds
    assert one.margin == pytest.approx(margin, abs=1e-12)


def test_inequality_that_is_not_a_number_is_unknown():
    assert UNKNOWN.holds is None


def test_deciding_is_the_false_hypothesis_or_the_tightest_conclusion():
    subject = Subject("a thing", lambda _: None, lambda *_: None)
    check = Check("name", "statement", "paper", "Lemma 1", subject, lambda _: None)
    tight = Inequality("tight", 99.0, "<", 100.0)
    assert Verdict(check, "", Finding([TRUE], [TRUE, tight])).deciding is tight
    assert Verdict(check, "", Finding([TRUE, FALSE], [tight])).deciding is FALSE


def test_a_check_without_a_network_is_seeded_and_leaves_the_generator_alone():
    state = torch.get_rng_state()
    one, other, third = (verify("relu-implicit-lemma-2.2", seed=seed) for seed in (1, 1, 2))
    assert one.finding.hypotheses == other.finding.hypotheses
    assert one.finding.conclusions == other.finding.conclusions
    assert one.finding.hypotheses != third.finding.hypotheses
    assert torch.equal(torch.get_rng_state(), state)


def test_check_of_a_name_that_is_taken_is_refused():
    subject = find_checks("relu-implicit-lemma-2.2")[0].subject
    with pytest.raises(ValueError, match="must be new"):
        register_check("relu-implicit-lemma-2.2", "", paper="", number="", subject=subject)(
            lambda _: Finding([], [])
        )


def test_verify_of_another_network_is_refused():
    with pytest.raises(ValueError, match=r"must be an implicit ReLU network for .*; got Linear"):
        verify("relu-implicit-lemma-2.2", nn.Linear(2, 2), torch.ones(1, 2), torch.ones(1))
    with pytest.raises(ValueError, match="must be given with a model"):
        verify("relu-implicit-lemma-2.2", nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["relu-implicit-lema-2.2"], "Did you mean 'relu-implicit-lemma-2.2'?"),
        (["nothing-*"], "verify.name must match a check (equipoise verify --list)"),
        (["relu-implicit-lemma-2.2", "nowhere"], "nowhere: must be the folder of a run"),
        (["relu-implicit-lemma-2.2", "--seed", "-1"], "verify.seed must be a whole number"),
        (["relu-implicit-lemma-2.2", "--samples", "0"], "verify.samples must be a whole number"),
    ],
)
def test_command_refuses_bad_input_in_one_sentence(words, message, capsys):
    assert main(["verify", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_command_lists_every_check(capsys):
    assert main(["verify", "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert list(listed) == [check.name for check in find_checks()]
    assert all(about["statement"] and about["number"] for about in listed.values())


def test_command_ends_with_4_where_a_check_fails(capsys, monkeypatch):
    (check,) = find_checks("relu-implicit-lemma-2.2")
    monkeypatch.setattr(
        "equipoise.analysis.check._CHECKS",
        {"false": Check("false", "s", "p", "n", check.subject, lambda _: Finding([], [FALSE]))},
    )
    assert main(["verify", "false"]) == 4
    assert "false: fails" in capsys.readouterr().out
    assert main(["verify", "false", "--json"]) == 4
    assert json.loads(capsys.readouterr().out)["false"]["conclusions"][0]["margin"] == -1.0


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for model in ("opteq-digits", "relu-implicit"):
        made[model] = tmp_path_factory.mktemp("runs") / model
        words = [f"model.name={model}", "train.epochs=1", "data.subset=60", "train.batch=50"]
        words += ["model.options.width=32"] if model == "relu-implicit" else []
        assert main(["train", "digits", *words, "--output", str(made[model]), "--quiet"]) == 0
    return made


def test_command_checks_a_run_with_its_data(folders, capsys):
    capsys.readouterr()
    assert main(["verify", "relu-implicit-lemma-2.2", str(folders["relu-implicit"])]) == 0
    assert "network: trained: 32 units, 32 samples, first output" in capsys.readouterr().out
    words = ["verify", "relu-implicit-lemma-2.*", str(folders["relu-implicit"])]
    assert main([*words, "--samples", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (
        found["relu-implicit-lemma-2.2"]["network"] == "trained: 32 units, 3 samples, first output"
    )


def test_command_refuses_a_run_of_another_family(folders, capsys):
    capsys.readouterr()
    assert main(["verify", "relu-implicit-lemma-2.2", str(folders["opteq-digits"])]) == 2
    assert capsys.readouterr().err == (
        "equipoise: error: verify.run must be of an implicit ReLU network; got 'opteq-digits'.\n"
    )


def test_verify_refuses_a_network_without_equilibrium(folders):
    run = replace(runs.open_run(folders["opteq-digits"]), model=create_model("mlp-table"))
    with pytest.raises(ValueError, match="of a network with an equilibrium; got 'mlp-table'"):
        runs.verify_run(run, find_checks())


def test_verify_refuses_a_run_without_its_data(folders, tmp_path):
    run = runs.open_run(folders["relu-implicit"])
    data = replace(run.config.data, name="mnist", root=str(tmp_path / "gone"))
    with pytest.raises(ValueError, match=r"gone.* does not exist"):
        runs.verify_run(replace(run, config=replace(run.config, data=data)), find_checks())


def test_verify_leaves_the_model_of_a_run_as_it_was(folders):
    run = runs.open_run(folders["relu-implicit"])
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    runs.verify_run(run, find_checks("relu-implicit-lemma-2.*"), samples=4)
    assert all(torch.equal(value, before[name]) for name, value in run.model.state_dict().items())
    assert run.model.u.dtype == torch.float32


def test_a_case_may_be_given_by_hand():
    verdict = verify("relu-implicit-lemma-2.2", seed=3)
    case = find_checks("relu-implicit-lemma-2.2")[0].subject.fresh(3)
    assert isinstance(case, Case)
    assert verify("relu-implicit-lemma-2.2", case).outcome == verdict.outcome == "holds"


def test_largest_and_smallest_keep_what_is_not_a_number():
    assert largest(0.0, 2.0) == 2.0
    assert smallest(math.inf, 2.0) == 2.0
    assert math.isnan(largest(0.0, math.nan))
    assert math.isnan(smallest(math.inf, math.nan))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_verify_refuses_a_sample_that_is_not_finite(bad):
    x = torch.randn(4, 5)
    x[2, 1] = bad
    with pytest.raises(SettingError, match=r"verify\.x must be finite; got .* in sample 2\."):
        verify("opteq-theorem-1", OptEq(5, 6, 10), x, torch.zeros(4))


def test_lemma_about_equilibria_looks_past_a_sample_of_zeros():
    torch.manual_seed(0)
    network = ReluImplicitNetwork((20,), width=64, gamma=0.3)
    x = torch.cat([torch.randn(3, 20), torch.zeros(1, 20)])
    assert verify("relu-implicit-lemma-2.2", network, x, torch.ones(4)).outcome == "holds"

    class Longer(type(network.cell)):
        def step(self, z, context):
            return 3.1 * super().step(z, context)

    (check,) = find_checks("relu-implicit-lemma-2.2")
    case = check.subject.adapt(network, x, torch.ones(4))
    case.network.cell.__class__ = Longer
    verdict = verify(check, case)
    assert verdict.finding.conclusions[0].holds is False


def test_case_of_one_sample_is_told_in_the_singular():
    verdict = verify("opteq-table-2", OptEq(5, 6, 10), torch.randn(1, 5), torch.zeros(1))
    assert verdict.case == "1 layer as it is, 1 sample"
    assert verdict.outcome == "does not apply"
    assert verdict.deciding.claim == "samples, at least 2"
