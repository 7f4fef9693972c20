import pytest
import torch
from torch import nn

from equipoise import create_model, verify
from equipoise.analysis import find_checks, make_case, tangent_kernel
from equipoise.core import memory
from equipoise.families.monotone import MonotoneMatrix, MonotoneRegression, monotone_forms
from equipoise.families.monotone.conditions import condition_2, start_of

NAMES = [check.name for check in find_checks("monotone-*")]


def case_of(name, seed=1):
    return make_case(find_checks(name)[0], seed)


class NotMonotone(MonotoneMatrix):
    def weights(self):
        return (super().weights()[0] + 3 * torch.eye(len(self.A), dtype=self.A.dtype),)


def not_monotone(case):
    case.network.operator.__class__ = NotMonotone
    return case


def with_far_targets(case):
    case.y.add_(1e4)
    return case


@pytest.mark.parametrize("name", NAMES)
def test_check_holds_on_a_random_network_or_says_that_the_condition_cannot_be_met(name):
    verdict = verify(name, seed=1)
    vacuous = name == "monotone-theorem-3.3.5"
    assert verdict.outcome == ("does not apply" if vacuous else "holds"), verdict.deciding


@pytest.mark.parametrize(
    ("number", "change"),
    [
        ("lemma-3.2.2", not_monotone),
        ("lemma-3.2.3", not_monotone),
        ("proposition-3", not_monotone),
        ("proposition-4", not_monotone),
        ("lemma-3.3.2", not_monotone),
        ("lemma-3.3.3", not_monotone),
        ("lemma-3.3.4", not_monotone),
        pytest.param("theorem-3.3.1", with_far_targets, marks=pytest.mark.slow),
        ("theorem-3.3.5", with_far_targets),
        ("theorem-3.3.5-mended", with_far_targets),
        ("lemma-3.3.7", with_far_targets),
        ("proposition-5", with_far_targets),
        ("proposition-6", with_far_targets),
        ("lemma-3.3.8", with_far_targets),
        ("lemma-3.3.9", with_far_targets),
        ("lemma-3.3.10", with_far_targets),
    ],
)
def test_check_does_not_apply_where_a_hypothesis_is_false(number, change):
    name = f"monotone-{number}"
    assert verify(name, change(case_of(name))).outcome == "does not apply"


def test_kernel_by_closed_forms_is_that_of_autograd():
    torch.manual_seed(0)
    network = MonotoneRegression(5, 24, margin=0.5).double()
    x = torch.randn(6, 5, dtype=torch.float64)
    found = monotone_forms(network, x).kernel()
    torch.testing.assert_close(found, tangent_kernel(network, x), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("margin", "scale"), [(1.0, 1.0), (0.01, 5.0), (1e-5, 1.0)])
def test_equilibria_and_adjoints_are_exact_for_every_margin(margin, scale):
    """Steps are too slow for the smallest margin, for which elimination takes over."""
    torch.manual_seed(0)
    network = MonotoneRegression(5, 40, margin=margin).double()
    with torch.no_grad():
        network.operator.A.mul_(scale)
        network.operator.B.mul_(scale)
        x = torch.randn(9, 5, dtype=torch.float64)
        x[3] = 0
        forms, W, U = monotone_forms(network, x), network.W, network.U
        inside = forms.z @ W.T + x @ U.T
        torch.testing.assert_close(inside.relu(), forms.z, rtol=1e-10, atol=1e-10)
        eye = torch.eye(40, dtype=torch.float64)
        for lit, v in zip((inside > 0).double(), forms.v, strict=True):
            row = lit * torch.linalg.solve((eye - lit[:, None] * W).T, network.u)
            torch.testing.assert_close(v, row, rtol=1e-9, atol=1e-9)


def test_kernel_of_a_width_that_would_not_fit_is_refused_before(monkeypatch):
    case = case_of("monotone-proposition-4")
    monkeypatch.setattr(memory, "available_memory", lambda: 1000)
    with pytest.raises(ValueError, match=r"matrices of 32 x 32 and 4 x 4 .* got"):
        monotone_forms(case.network, case.x)


def test_a_model_with_biases_becomes_a_network_with_a_constant_input():
    torch.manual_seed(0)
    model = create_model("monotone-digits", tolerance=1e-6, max_steps=500)
    x, y = torch.rand(3, 1, 8, 8), torch.tensor([0, 1, 2])
    case = find_checks("monotone-proposition-4")[0].subject.adapt(model, x, y)
    with torch.no_grad():
        expected = model.eval()(x)[:, 0] - model.head.bias[0]
        torch.testing.assert_close(case.network(case.x)[:, 0].float(), expected, atol=1e-5, rtol=0)
    assert verify("monotone-proposition-4", model, x, y).outcome == "holds"
    with pytest.raises(ValueError, match="must be a dense monotone network with ReLU"):
        verify("monotone-proposition-4", nn.Linear(2, 2), x, y)


def test_erratum_lemma_3_3_2_needs_the_active_units():
    """`u^T (I - D W)^-1` grows with the weights from active to inactive units."""
    W = torch.tensor([[0.0, 5.0], [-5.0, 0.0]])  # I - W has the margin 1
    D, u = torch.diag(torch.tensor([1.0, 0.0])), torch.tensor([1.0, 0.0])
    row = torch.linalg.solve((torch.eye(2) - D @ W).T, u)
    assert float(row.norm()) > 5 * float(u.norm())
    assert float((D @ row).norm()) <= float(u.norm())


@pytest.mark.parametrize("seed", range(4))
def test_erratum_condition_2_cannot_be_met_with_a_margin_of_1(seed):
    torch.manual_seed(seed)
    network = MonotoneRegression(8, 16, margin=1.0 + seed).double()
    network.U.data.mul_(10.0**seed)
    network.u.data.mul_(1e-9)
    x = torch.randn(1 + seed, 8, dtype=torch.float64)
    forms = monotone_forms(network, x)
    last = condition_2(start_of(network, forms, forms.output))[-1]
    assert last.claim.startswith("(3.18)")
    assert last.holds is False


def test_erratum_the_forward_step_does_not_contract_at_the_end_of_the_printed_range():
    m = 0.5
    gap = m * torch.eye(2)  # I - W, with L = m
    step = torch.eye(2) - 2 * m / m**2 * gap
    assert float(torch.linalg.matrix_norm(step, 2)) == 1.0


def test_erratum_the_proof_of_proposition_6_needs_twice_what_3_17_asks_for():
    X, e, u, U, A = 2.0, 0.1, 0.3, 1.5, 1.2
    lambda_0 = (8 * X**2 * e * u * (1 + 6 * (U * A) ** 2 + 4 * U**2)) ** (1 / 3)
    moved = X**2 * e * (8 * u + 16 * (3 * A**2 + 2) * U**2 * u) / lambda_0**2
    assert moved == pytest.approx(lambda_0)  # where lambda_0/2 is claimed
