"""The theorem on training (OptEq v1, section G): its inequalities on concrete networks."""

import math

import pytest
import torch
from torch import nn

from equipoise import OptEq, Unrolled
from equipoise.families.opteq import training_bound
from equipoise.prox import LeakyReLU

UNTRUE = ("Lemma 16:", "Q_1:")  # in general; see the errata


def make(seed, activation="identity", layers=2, alpha=0.05, samples=4, scale=0.6):
    torch.manual_seed(seed)
    layer = OptEq(3, 6, [4] * layers, activation=activation, alpha=alpha, norm="none")
    for operator in layer.layers.operators:
        nn.init.orthogonal_(operator.weight, gain=scale)
    head = nn.Linear(6, 2, bias=seed % 2 == 0)
    return (
        layer.double(),
        head.double(),
        torch.randn(samples, 3).double(),
        (torch.randn(samples, 2).double()),
    )


@pytest.mark.parametrize("activation", ["identity", "tanh", "softplus", LeakyReLU(0.3)], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_every_other_inequality_of_the_proof_holds_on_random_networks(seed, activation):
    layers = 1 + seed % 3
    shape = {"layers": layers, "alpha": (0.05, 0.2, 0.8, 1.0)[seed], "scale": (0.6, 0.9)[seed % 2]}
    found = training_bound(*make(seed, activation, samples=3 + seed, **shape), steps=2 + seed)
    checked = [each for each in found.lemmas if not each.claim.startswith(UNTRUE)]
    assert len(checked) == 13
    assert not [str(each) for each in checked if not each.holds]


def test_measured_sides_are_those_of_the_layer_itself():
    """The report computes the network anew: its gradients must be those of the library's layer."""
    layer, head, x, y = make(3, "tanh", layers=2, alpha=0.4)
    steps = 7
    found = training_bound(layer, head, x, y, steps=steps)
    z = layer(x, torch.zeros(4, 6).double(), gradient=Unrolled(steps), on_failure="ignore")
    (head(z) - y).square().sum().div(2).backward()
    left = {each.claim: each.value for each in found.lemmas}
    cell = layer.layers
    gradients = {
        "W": [own.weight.grad for own in cell.operators],
        "U": [own.weight.grad for own in cell.inputs],
        "b": [own.bias.grad for own in cell.inputs],
    }
    for name, tensors in gradients.items():
        largest = max(float(own.norm()) for own in tensors)
        assert left[f"eq. 22: |grad_{name}_l|"] == pytest.approx(largest, rel=1e-9)
    assert left["eq. 27: |grad_W_(L+1)|"] == pytest.approx(float(head.weight.grad.norm()))
    assert left["Lemma 12: |z^K|"] == pytest.approx(float(z.detach().norm()))


def test_the_constants_are_those_of_the_paper():
    layer, head, x, y = make(1, layers=1, alpha=0.1)
    found = training_bound(layer, head, x, y, steps=4)
    N, K, a = 4, 5, 0.1
    smallest = float(torch.linalg.svdvals(head.weight.detach())[-1])
    wanted = K**2 * a**2 * (0.6 - 0.25) ** 2 * N * smallest**2 / 4
    assert found.constants["Q0"] == pytest.approx(wanted)
    start = torch.zeros(4, 6).double()
    z = layer(x, start, gradient=Unrolled(4), on_failure="ignore")
    loss = float((head(z) - y).detach().square().sum())
    B_J = 2 * a * K * found.constants["C_z"]
    curve = B_J**2 * found.constants["B_L"] + B_J * math.sqrt(loss / 2)
    assert found.constants["Q1"] == pytest.approx(curve)  # L_s = 0: C_J = 0
    assert found.step == pytest.approx(1 / found.constants["Q1"])


def test_erratum_lemma_16_two_equal_inputs_with_opposite_residuals_have_no_gradient():
    layer, head, x, _ = make(1)
    x = x[:1].repeat(2, 1)
    z = layer(x, torch.zeros(2, 6).double(), gradient=Unrolled(5), on_failure="ignore")
    y = head(z).detach() + torch.tensor([[1.0, 0.5], [-1.0, -0.5]]).double()
    (head(z) - y).square().sum().div(2).backward()
    assert all(float(own.bias.grad.norm()) < 1e-12 for own in layer.layers.inputs)
    found = training_bound(layer, head, x, y, steps=5)
    (lemma,) = (each for each in found.lemmas if each.claim.startswith("Lemma 16:"))
    assert lemma.bound > 1e-4  # the bound: above zero, as is the loss
    assert lemma.value < 1e-15
    assert not lemma.holds
    assert found.kernel[0] < 1e-12  # and no step lowers this loss


def test_erratum_q_1_leaves_out_the_curvature_in_the_head():
    layer, head, x, y = make(1)
    with torch.no_grad():
        head.weight.mul_(1e-6)
    found = training_bound(layer, head, x, 1e-6 * y, steps=5)
    (last,) = (each for each in found.lemmas if each.claim.startswith("Q_1:"))
    assert not last.holds
    assert found.measured_rate > 1  # the promised step makes the loss grow


def test_report_reads_as_sentences():
    text = repr(training_bound(*make(1), steps=5))
    assert "holds  Assumption 5: max |W_l|: 0.6 <= 0.75" in text
    assert "FAILS  eq. 31" in text
    assert "promised for steps below" in text
    assert "if all assumptions held" in text
    assert "measured with the step" in text
    bent = training_bound(*make(1, LeakyReLU(0.3)), steps=2)
    assert "FAILS  Theorem 6: smooth activation, L_s: inf < inf" in repr(bent)
    assert bent.constants["kappa"] == 0.3


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"steps": 0}, "training_bound.steps must be a whole number of at least 1; got 0."),
        ({"extractor_lipschitz": 0.5}, "training_bound.extractor_lipschitz must be at least 1"),
        ({"y": torch.zeros(4, 3)}, r"training_bound.y must have shape \(4, 2\); got \(4, 3\)"),
        ({"layer": OptEq(3, 6, 4, mu=2.0)}, "training_bound.layer must have no regulariser, mu ="),
        ({"head": nn.Identity()}, "training_bound.head must be an nn.Linear; got Identity."),
    ],
)
def test_what_the_theorem_does_not_cover_is_told(change, sentence):
    layer, head, x, y = make(1)
    given = {"layer": layer, "head": head, "x": x, "y": y} | change
    with pytest.raises(ValueError, match=sentence):
        training_bound(**given)
