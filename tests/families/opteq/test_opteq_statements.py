"""The statements of the OptEq papers as checks: they hold, or do not apply."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from equipoise import create_model, verify
from equipoise.analysis.check import Case, list_checks, make_case
from equipoise.families.opteq import OptEq
from equipoise.families.opteq.potential import Potential
from equipoise.families.opteq.subject import OPTEQ, _read

CHECKS = [check for check in list_checks().values() if check.name.startswith("opteq-")]
ABOUT_LAYERS = [check.name for check in CHECKS if check.subject is OPTEQ]
INDEPENDENT = {
    "opteq-lemma-9",  # these two speak of functions, at any states
    "opteq-table-2",
    "opteq-lemma-3",  # these two are true for layers of any norm
    "opteq-lemma-16",
    "opteq-lemma-14",  # these have the hypotheses of Lemma 12
    "opteq-lemma-15",
    "opteq-lemma-19",
}


def layers(scale: float = 0.95, alpha: float = 0.8) -> Case:
    torch.manual_seed(1)
    layer = OptEq(5, 6, [8, 7], alpha=alpha, norm="none").double()
    for operator in layer.layers.operators:
        operator.weight.data *= scale / torch.linalg.matrix_norm(operator.weight, 2)
    x = torch.randn(3, 5, dtype=torch.float64)
    return Case(_read(layer, x), x, x[:, 0], "two layers", 3)


class Twisted(Potential):
    """Rotates what its layer returns, so that it is no gradient."""

    def __init__(self, own: Potential) -> None:
        self.__dict__.update(own.__dict__)

    def prox(self, y: Tensor) -> Tensor:
        f = super().prox(y)
        return (f + f.roll(1, dims=1)) / 2


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_statement_holds_on_its_random_network(check) -> None:
    verdict = verify(check, make_case(check, seed=5))
    assert verdict.outcome == "holds", [*verdict.finding.hypotheses, *verdict.finding.conclusions]


@pytest.mark.parametrize("name", sorted(set(ABOUT_LAYERS) - INDEPENDENT))
def test_statement_does_not_apply_to_layers_that_expand(name: str) -> None:
    assert verify(name, layers(scale=1.6)).outcome == "does not apply"


def test_a_map_that_is_not_monotone_is_outside_of_lemma_5() -> None:
    case = layers()
    potentials = tuple(Twisted(own) for own in case.network.potentials)
    verdict = verify(
        "opteq-lemma-5", replace(case, network=replace(case.network, potentials=potentials))
    )
    assert verdict.outcome == "does not apply"


def test_averaging_is_not_judged_where_nobody_knows_the_wanted_equilibrium() -> None:
    case = make_case(next(check for check in CHECKS if check.name == "opteq-theorem-5"))
    (potential,) = case.network.potentials
    other = object.__new__(Potential)
    other.__dict__.update(potential.__dict__)
    other.c = potential.c + 0.1
    changed = replace(case, network=replace(case.network, potentials=(other,)))
    assert verify("opteq-theorem-5", changed).outcome == "unknown"


def test_statements_are_checked_on_a_model_with_images() -> None:
    torch.manual_seed(0)
    model = create_model("opteq-digits", norm="project")
    x, y = torch.rand(3, 1, 8, 8), torch.tensor([0, 1, 2])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for name in ("opteq-theorem-1", "opteq-lemma-3", "opteq-theorem-2"):
        assert verify(name, model, x, y).outcome == "holds"
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert verify("opteq-corollary-1", model, x, y).outcome == "does not apply"


def test_network_keeps_the_modes_of_its_parts() -> None:
    model = nn.Sequential(nn.BatchNorm1d(5), OptEq(5, 6, 10))
    model[0].eval()
    assert verify("opteq-theorem-1", model, torch.randn(4, 5), torch.zeros(4)).outcome == "holds"
    assert model.training
    assert not model[0].training
