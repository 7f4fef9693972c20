import math

import pytest
import torch
from torch import nn

from equipoise import verify
from equipoise.analysis import find_checks, make_case, tangent_kernel
from equipoise.analysis.training_path import gradient_descent
from equipoise.core import memory
from equipoise.families.relu_implicit import (
    ReluImplicitNetwork,
    gram,
    limit_gram,
    quantities,
)
from equipoise.families.relu_implicit.gram import limit_variance

NAMES = [check.name for check in find_checks("relu-implicit-*")]


def case_of(name, seed=1):
    return make_case(find_checks(name)[0], seed)


def with_large_a(case):
    case.network.cell.A.data.mul_(20)
    return case


def with_large_gamma(case):
    case.network.cell.gamma = 0.4
    return case


def with_parallel_samples(case):
    case.x[1] = case.x[0]
    return case


def test_there_is_a_check_for_each_numbered_statement():
    lemmas = [f"relu-implicit-lemma-{n}" for n in ("2.1", "2.2", "2.3", "3.1", "3.2", "3.3", "3.4")]
    lemmas += [f"relu-implicit-lemma-{n}" for n in ("3.5", "3.6")]
    assert sorted(NAMES) == sorted(
        [*lemmas, "relu-implicit-theorem-3.1", "relu-implicit-theorem-3.2"]
    )


WIDE = [pytest.param(name, marks=pytest.mark.slow) if "theorem" in name else name for name in NAMES]


@pytest.mark.parametrize("name", WIDE)
def test_check_holds_on_a_random_network(name):
    verdict = verify(name, seed=1)
    assert verdict.outcome == "holds", verdict.deciding


@pytest.mark.parametrize(
    ("number", "change"),
    [
        ("lemma-2.1", with_large_a),
        ("lemma-2.2", with_large_a),
        ("lemma-2.3", with_large_a),
        ("lemma-3.1", with_large_a),
        ("lemma-3.2", with_parallel_samples),
        ("lemma-3.3", with_parallel_samples),
        ("lemma-3.4", with_parallel_samples),
        pytest.param("lemma-3.5", with_large_gamma, marks=pytest.mark.slow),
        ("lemma-3.6", with_large_gamma),
        ("theorem-3.1", with_large_a),
        ("theorem-3.2", with_large_a),
    ],
)
def test_check_does_not_apply_where_a_hypothesis_is_false(number, change):
    name = f"relu-implicit-{number}"
    assert verify(name, change(case_of(name))).outcome == "does not apply"


def test_gram_matrix_is_the_kernel_of_autograd():
    case = case_of("relu-implicit-lemma-3.1", 3)
    found = gram(case.network, case.x)
    expected = tangent_kernel(case.network, case.x, method="samples")
    torch.testing.assert_close(found.H, expected, rtol=1e-10, atol=1e-12)
    for part in (found.M, found.Q, found.G, found.H):
        assert float(torch.linalg.eigvalsh(part)[0]) > -1e-12


def test_limit_of_the_gram_matrix_is_what_random_features_tend_to():
    torch.manual_seed(0)
    x = nn.functional.normalize(torch.randn(5, 3, dtype=torch.float64)) * 2
    features = torch.relu(torch.randn(400_000, 3, dtype=torch.float64) @ x.T)
    torch.testing.assert_close(features.T @ features / 400_000, limit_gram(x), atol=0.05, rtol=0)
    products = features[:, :, None] * features[:, None, :]
    torch.testing.assert_close(products.var(dim=0), limit_variance(x), atol=0, rtol=0.06)


def test_gram_of_a_width_that_would_not_fit_is_refused_before(monkeypatch):
    case = case_of("relu-implicit-lemma-3.1")
    monkeypatch.setattr(memory, "available_memory", lambda: 10**6)
    with pytest.raises(ValueError, match=r"matrices of 256 x 256 .* got 0\.00105 GB"):
        gram(case.network, case.x)


def test_erratum_lemma_3_5_bounds_u_by_less_than_it_begins_with():
    case = case_of("relu-implicit-lemma-3.5")
    known = quantities(case.network, case.x, case.y)
    assert all(one.holds for one in known.width(descent=False))
    printed = 16 * known.c * math.sqrt(known.n) * known.error / known.lambda_0
    assert printed < float(case.network.u.norm().detach())


def test_erratum_lemma_3_6_a_bound_of_first_order_is_taken_for_one_of_second():
    """The product of norms of eq. 43 exceeds the progress, at any step; the product is negative."""
    case = case_of("relu-implicit-lemma-3.6")
    known = quantities(case.network, case.x, case.y)
    for step in (1e-2, 1e-4):
        path = gradient_descent(case.network, case.x, case.y, step_size=step, steps=1)
        with torch.no_grad():
            phi = [one.cell.inject(case.x) for one in (case.network, path.model)]
            z = [one.equilibrium(case.x) for one in (case.network, path.model)]
            error = case.network(case.x)[:, 0] - case.y
            moved = (z[1] - z[0]) @ path.model.u[0] + (phi[1] - phi[0]) @ path.model.v[0]
        assert 2 * float(moved.norm() * error.norm()) > step * known.lambda_0 * known.error**2 / 2
        assert float(moved @ error) < 0


@pytest.mark.parametrize("seed", range(8))
def test_smallest_eigenvalue_of_parallel_samples_is_rounding(seed):
    case = with_parallel_samples(case_of("relu-implicit-lemma-3.4", seed))
    positive, _ = quantities(case.network, case.x, case.y).spectrum()
    assert not positive.holds, positive


@pytest.mark.parametrize("name", ["lemma-3.5", "lemma-3.6", "theorem-3.2"])
@pytest.mark.parametrize("last", [0.0, 1.0])  # a blank image, and one that is there twice
def test_check_does_not_apply_to_samples_whose_smallest_eigenvalue_is_zero(name, last):
    torch.manual_seed(0)
    network = ReluImplicitNetwork((6,), width=40)
    x = torch.rand(1, 6)
    verdict = verify(f"relu-implicit-{name}", network, torch.cat([x, last * x]), torch.ones(2))
    assert verdict.outcome == "does not apply"
