"""Every check, on a network that is built to break the conclusion of its statement."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from equipoise import verify
from equipoise.analysis.check import list_checks, make_case
from equipoise.families.monotone import MonotoneMatrix, MonotoneRegression, training_checks
from equipoise.families.opteq import layer_checks, network_checks
from equipoise.families.opteq import training_checks as opteq_training
from equipoise.families.opteq.potential import Potential
from equipoise.families.opteq.subject import Composition
from equipoise.families.opteq.unrolled_network import UnrolledNetwork
from equipoise.families.relu_implicit import ReluImplicitCell, ReluImplicitNetwork, spectrum_checks
from equipoise.prox import Incay
from equipoise.prox.activation import Identity

# OptEq ------------------------------------------------------------------------------------------


class Twisted(Potential):
    """Rotates what its layer returns, so that it is no gradient."""

    def prox(self, y):
        f = super().prox(y)
        return (f + f.roll(1, dims=1)) / 2


class Shrunk(Potential):
    """Returns half of its layer's value, which is monotone and nonexpansive, but no grad psi."""

    def prox(self, y):
        return super().prox(y) / 2


class Shifted(Composition):
    """Is not the composition of its layers: it adds a constant in the end."""

    def __call__(self, z):
        return super().__call__(z) + 0.1


class Doubling(Composition):
    """Expands, whatever its layers say."""

    def __call__(self, z):
        return 2 * z


class Idle(Composition):
    """Has every state for an equilibrium."""

    def __call__(self, z):
        return z


class Boasting(Composition):
    """Claims to contract more than it does."""

    @property
    def factor(self):
        return 0.01


class Steep(Identity):
    """Has a slope of 1000, and says that it is 1."""

    def __call__(self, a):
        return 1000 * a


class PrintedIncay(Incay):
    """With the sign of the printed table."""

    def gradient(self, z):
        return -super().gradient(z)


def as_potentials(kind):
    def change(case, _):
        made = []
        for own in case.network.potentials:
            made.append(object.__new__(kind))
            made[-1].__dict__.update(own.__dict__)
        return replace(case, network=replace(case.network, potentials=tuple(made)))

    return change


def as_composition(kind):
    def change(case, _):
        own = case.network
        return replace(case, network=kind(own.potentials, own.alphas, own.layer))

    return change


def with_steep_activations(case, _):
    cell = case.network.layer.layers
    cell.activations = tuple(Steep() for _ in cell.activations)
    return case


def with_a_flat_loss(case, monkeypatch):
    """Has a millionth of the slope that the loss has."""
    loss = UnrolledNetwork.loss

    def flat(network, theta):
        return loss(network, theta.detach()) + 1e-6 * (
            loss(network, theta) - loss(network, theta.detach())
        )

    monkeypatch.setattr(UnrolledNetwork, "loss", flat)
    return case


def with_a_wrong_conversion(case, monkeypatch):
    for converter in ("to_hidden_units", "to_opteq"):
        own = getattr(network_checks, converter)

        def wrong(net: nn.Module, own=own, **options):
            made = own(net, **options)
            next(p for p in reversed(list(made.parameters())) if p.dim() > 1).data[0] *= 1.001
            return made

        monkeypatch.setattr(network_checks, converter, wrong)
    return case


def with_a_transpose_for_the_inverse(case, monkeypatch):
    monkeypatch.setattr(torch.linalg, "pinv", lambda A: A.T)
    return case


def with_the_printed_sign(case, monkeypatch):
    monkeypatch.setattr(layer_checks, "Incay", PrintedIncay)
    return case


def with_a_steeper_function(case, monkeypatch):
    monkeypatch.setattr(opteq_training, "SLOPE", lambda x: 10 * torch.tanh(x))
    return case


# Monotone ---------------------------------------------------------------------------------------


class Tripled(MonotoneMatrix):
    """Iterates another matrix than that of its `A` and `B`."""

    def weights(self):
        return (3 * super().weights()[0],)


class Crooked(MonotoneMatrix):
    """Makes other products than those with its `W`."""

    def apply_with(self, weights, z):
        return 3 * super().apply_with(weights, z)


class Frozen(MonotoneRegression):
    """Learns nothing."""

    def forward(self, x):
        output = super().forward(x)
        return output.detach() + 0 * output


class Skewed(MonotoneRegression):
    """Has gradients that are too long by one factor for `A`, `B` and `U`, by another for `u`."""

    state_factor = head_factor = 1.0

    def forward(self, x):
        z, u = (
            factor * value + (1 - factor) * value.detach()
            for factor, value in (
                (self.state_factor, self.equilibrium(x)),
                (self.head_factor, self.u),
            )
        )
        return (z @ u)[:, None]


def with_operator(kind):
    def change(case, _):
        case.network.operator.__class__ = kind
        return case

    return change


def skewed(state, head=1.0):
    def change(case, _):
        case.network.__class__ = Skewed
        case.network.state_factor, case.network.head_factor = state, head
        return case

    return change


def frozen(case, _):
    case.network.__class__ = Frozen
    return case


def with_scaled_states(case, _):
    case.network.equilibrium.register_forward_hook(lambda _module, _inputs, z: 100 * z)
    return case


def with_states_that_collapse(case, _):
    """After the first step states keep their part along `u` alone, and so the predictions."""
    layer, first = case.network.equilibrium, case.network.u.detach().clone()
    layer.heads = [case.network.u]  # in a list, so that it is no parameter of the layer

    def collapse(layer, _inputs, z):
        (u,) = layer.heads
        return z if torch.equal(u, first) else (z @ u)[:, None] * u / u.square().sum()

    layer.register_forward_hook(collapse)
    return case


def frozen_without_a_condition(case, monkeypatch):
    """No network meets the printed condition."""
    monkeypatch.setattr(training_checks, "condition_2", lambda _start: [])
    return frozen(case, monkeypatch)


# ReLU-implicit ----------------------------------------------------------------------------------


class OtherStep(ReluImplicitCell):
    """Iterates another map than the one whose weights it has."""

    def step(self, z, context):
        return torch.relu(torch.addmm(context, z, self.A.T, alpha=4 * self.scale))


class Louder(ReluImplicitCell):
    """Injects ten times what it should."""

    def inject(self, x):
        return 10 * super().inject(x)


class FrozenNetwork(ReluImplicitNetwork):
    """Learns nothing."""

    def forward(self, x):
        output = super().forward(x)
        return output.detach() + 0 * output


def with_cell(kind):
    def change(case, _):
        case.network.cell.__class__ = kind
        return case

    return change


def frozen_network(case, _):
    case.network.__class__ = FrozenNetwork
    return case


def with_a_hidden_spike(case, _):
    """A rank-one part of norm 2.5 sqrt(m), which the statistics of the entries do not show."""
    A = case.network.cell.A
    signs = [torch.randint(0, 2, (len(A),)).double() * 2 - 1 for _ in range(2)]
    A.data.add_(torch.outer(*signs), alpha=2.5 / math.sqrt(len(A)))
    return case


def with_one_column(case, _):
    V = case.network.cell.V
    V.data = torch.stack([math.sqrt(2) * V.data[:, 0], 0 * V.data[:, 0]], dim=1)
    return case


def with_a_linear_kernel(case, monkeypatch):
    """Without ReLU, more samples than numbers in each have a singular Gram matrix."""
    monkeypatch.setattr(spectrum_checks, "limit_gram", lambda x: x @ x.T)
    return replace(case, x=nn.functional.normalize(torch.randn(6, 3, dtype=torch.float64)))


BROKEN = {
    "opteq-lemma-1": with_a_wrong_conversion,
    "opteq-lemma-2": with_a_wrong_conversion,
    "opteq-lemma-3": as_composition(Shifted),
    "opteq-lemma-4": with_a_transpose_for_the_inverse,
    "opteq-lemma-5": as_potentials(Shrunk),
    "opteq-lemma-6": as_potentials(Twisted),
    "opteq-lemma-7": as_composition(Boasting),
    "opteq-lemma-9": with_a_steeper_function,
    "opteq-lemma-10": as_composition(Doubling),
    "opteq-lemma-12": with_steep_activations,
    "opteq-lemma-14": with_steep_activations,
    "opteq-lemma-15": with_steep_activations,
    "opteq-lemma-16": with_a_flat_loss,
    "opteq-lemma-19": with_steep_activations,
    "opteq-theorem-1": as_potentials(Twisted),
    "opteq-theorem-2": as_composition(Shifted),
    "opteq-theorem-3": as_composition(Shifted),
    "opteq-theorem-4": as_potentials(Twisted),
    "opteq-theorem-5": as_composition(Idle),
    "opteq-theorem-6": with_a_flat_loss,
    "opteq-corollary-1": as_composition(Shifted),
    "opteq-table-1": as_potentials(Twisted),
    "opteq-table-2": with_the_printed_sign,
    "monotone-lemma-3.2.1": with_operator(Tripled),
    "monotone-lemma-3.2.2": with_scaled_states,
    "monotone-lemma-3.2.3": frozen,
    "monotone-proposition-3": with_operator(Crooked),
    "monotone-proposition-4": frozen,
    "monotone-lemma-3.3.2": with_scaled_states,
    "monotone-lemma-3.3.3": with_scaled_states,
    "monotone-lemma-3.3.4": with_scaled_states,
    "monotone-lemma-3.3.6": with_operator(Tripled),
    "monotone-theorem-3.3.1": frozen,
    "monotone-theorem-3.3.5": frozen_without_a_condition,
    "monotone-theorem-3.3.5-mended": frozen,
    "monotone-lemma-3.3.7": skewed(1e4),
    "monotone-proposition-5": skewed(2e7),
    "monotone-proposition-6": with_states_that_collapse,
    "monotone-lemma-3.3.8": skewed(1e4, 1e2),
    "monotone-lemma-3.3.9": skewed(-1e4),
    "monotone-lemma-3.3.10": skewed(1e4, 0.0),
    "relu-implicit-lemma-2.1": with_a_hidden_spike,
    "relu-implicit-lemma-2.2": with_cell(OtherStep),
    "relu-implicit-lemma-2.3": with_cell(OtherStep),
    "relu-implicit-lemma-3.1": with_cell(OtherStep),
    "relu-implicit-lemma-3.2": with_a_linear_kernel,
    "relu-implicit-lemma-3.3": with_one_column,
    "relu-implicit-lemma-3.4": with_cell(Louder),
    "relu-implicit-lemma-3.5": frozen_network,
    "relu-implicit-lemma-3.6": frozen_network,
    "relu-implicit-theorem-3.1": frozen_network,
    "relu-implicit-theorem-3.2": frozen_network,
}
"""How the case of each check is changed so that hypotheses are true and a conclusion is not."""
SLOW = {"relu-implicit-theorem-3.1", "relu-implicit-theorem-3.2"}


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, marks=[pytest.mark.slow] if name in SLOW else [], id=name)
        for name, check in list_checks().items()
    ],
)
def test_check_fails_on_a_network_that_breaks_its_conclusion(check, monkeypatch):
    assert check.name in BROKEN, "a new check needs a network that breaks its conclusion"
    case = BROKEN[check.name](make_case(check, seed=1), monkeypatch)
    verdict = verify(check, case)
    assert verdict.outcome == "fails", verdict.deciding
