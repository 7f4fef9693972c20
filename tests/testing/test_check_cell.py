"""`check_cell` passes an honest cell and says what is wrong with others."""

import pytest
import torch
from torch import nn

from equipoise import Cell, Linearization
from equipoise.layers.certificate import Certificate, Link
from equipoise.testing import ContractError, check_activation, check_cell
from equipoise.testing.problems import contraction


class Honest(Cell):
    """`z = tanh(W z + U x)` with everything that a cell can say of itself."""

    linearize_keeps_graph = True
    projects = True

    def __init__(self):
        super().__init__()
        self.W = nn.Parameter(contraction(3, 3, norm=0.6))
        self.U = nn.Parameter(torch.randn(3, 2, dtype=torch.float64))

    def inject(self, x):
        return x @ self.U.T

    def step(self, z, context):
        return torch.tanh(z @ self.W.T + context)

    def lipschitz(self):
        return torch.linalg.matrix_norm(self.W, 2)

    def linearize(self, z, context):
        value = self.step(z, context)
        return self._local(value, (1 - value.square()).detach())

    def _local(self, value, slope):
        return Linearization(
            value.detach(),
            jvp=lambda v: slope * (v @ self.W.T),
            vjp=lambda v: (slope * v) @ self.W,
            select_rows=lambda rows: self._local(value[rows], slope[rows]),
            graph=value if value.requires_grad else None,
        )

    @torch.no_grad()
    def project_(self):
        self.W.mul_(min(1.0, 0.9 / float(self.lipschitz())))


class SeesTheMean(Honest):
    def step(self, z, context):
        return torch.tanh(z @ self.W.T + context + 0.1 * z.mean(dim=0))

    def linearize(self, z, context):
        return None


class WritesInPlace(Honest):
    def step(self, z, context):
        return z.mul_(0.5).add_(torch.tanh(context))


class Random(Honest):
    def step(self, z, context):
        return super().step(z, context) + 1e-3 * torch.rand_like(z)


class FalselySymmetric(Honest):
    symmetric = True


class FalselyBounded(Honest):
    def lipschitz(self):
        return 0.5 * super().lipschitz()


class WrongProduct(Honest):
    def linearize(self, z, context):
        local = super().linearize(z, context)
        return Linearization(local.value, local.jvp, local.jvp, local.select_rows, local.graph)


class WrongRows(Honest):
    def _local(self, value, slope):
        good = super()._local(value, slope)
        return Linearization(good.value, good.jvp, good.vjp, lambda _: good, good.graph)


class NoGraph(Honest):
    def _local(self, value, slope):
        good = super()._local(value, slope)
        return Linearization(good.value, good.jvp, good.vjp, good.select_rows)


class OtherDtype(Honest):
    def step(self, z, context):
        return super().step(z, context).double()


class Flattens(Honest):
    def step(self, z, context):
        return super().step(z, context)[:, :2]


class Expands(Honest):
    projects = False

    def step(self, z, context):
        return 3 * z + context

    def lipschitz(self):
        return None

    def linearize(self, z, context):
        return None


class Detaches(Honest):
    """Its gradient lacks what the weight does to the equilibrium."""

    def step(self, z, context):
        return torch.tanh(z @ self.W.detach().T + context)

    def linearize(self, z, context):
        return None


class RoundsItsWeight(Honest):
    """Its value depends on a weight that autograd does not see."""

    def linearize(self, z, context):
        return None

    def step(self, z, context):
        return torch.tanh(z @ self.W.T + context) + 0.1 * self.U.detach().sum()


class LeavesOut(Honest):
    """Its state dict misses a tensor."""

    def _load_from_state_dict(self, state_dict, *args):
        super()._load_from_state_dict(state_dict, *args)
        with torch.no_grad():
            self.W.mul_(0.5)


class FalselyCertified(Honest):
    def certificate(self):
        return Certificate((Link("FalselyCertified", 0.1),))


class WrongNorms(Honest):
    def norms(self):
        return {"W": self.lipschitz()}


class HalfProjects(Honest):
    @torch.no_grad()
    def project_(self):
        if float(self.lipschitz()) > 1:
            self.W.mul_(0.5)


class ProjectsForEver(Honest):
    @torch.no_grad()
    def project_(self):
        self.W.mul_(0.9 / max(1.0, float(self.lipschitz())))


BROKEN = [
    (SeesTheMean, "rows_are_independent", r"SeesTheMean\.step must treat each sample for itself"),
    (WritesInPlace, "nothing_is_written_to", r"step must leave its state as it was.*not z\.add_"),
    (Random, "step_is_a_function", r"must return the same for the same state and context"),
    (FalselySymmetric, "declared_symmetry_holds", r"be True only if the Jacobian .* is symmetric"),
    (FalselyBounded, "declared_lipschitz_bound_holds", r"got 0\.3\d* where the step expands by"),
    (WrongProduct, "linearization_is_autograds", r"must give autograd's vjp; got a largest"),
    (WrongRows, "linearization_is_autograds", r"autograd's value after select_rows"),
    (NoGraph, "linearization_is_autograds", r"give graph.*got no graph"),
    (OtherDtype, "shapes_and_types_are_kept", r"OtherDtype\.step must return the tree, shapes"),
    (Flattens, "shapes_and_types_are_kept", r"got \(2, 2\) .* for a state of \(2, 3\)"),
    (Expands, "equilibrium_is_found", r"must have an equilibrium that solver 'fixed_point' finds"),
    (Detaches, "derivatives_pass_finite_differences", r"must agree with finite differences"),
    (RoundsItsWeight, "derivatives_pass_finite_differences", r"no detach, no \.data, no NumPy"),
    (LeavesOut, "copies_are_the_same", r"equilibria as a cell with its state dict loaded"),
    (FalselyCertified, "certificate_is_true", r"certificate must bound the Lipschitz constant"),
    (WrongNorms, "norms_are_numbers", r"norms must return numbers.*Convert tensors by float"),
    (HalfProjects, "projection_keeps_its_promise", r"after a tenfold growth"),
    (ProjectsForEver, "projection_keeps_its_promise", r"leave weights alone that it has projected"),
]


def test_honest_cell_passes_in_any_dtype_and_is_left_alone():
    cell = Honest().float()
    before = {name: tensor.clone() for name, tensor in cell.state_dict().items()}
    report = check_cell(cell, torch.randn(3, 2))
    assert len(report.passed) >= 14
    assert report.skipped["declared_symmetry_holds"] == "the cell does not declare it"
    assert "Honest keeps its promises: " in str(report)
    assert cell.W.dtype == torch.float32
    assert all(torch.equal(before[name], tensor) for name, tensor in cell.state_dict().items())


def test_check_leaves_the_random_numbers_alone():
    torch.manual_seed(3)
    wanted = torch.randn(4)
    torch.manual_seed(3)
    check_activation("relu")
    assert torch.equal(torch.randn(4), wanted)


@pytest.mark.parametrize(("broken", "check", "sentence"), BROKEN)
def test_broken_cell_is_told(broken, check, sentence):
    solver = "fixed_point" if broken is Expands else "auto"
    with pytest.raises(ContractError, match=sentence) as caught:
        check_cell(broken(), torch.randn(2, 2), solver=solver, second=False)
    assert caught.value.check == check
    assert isinstance(caught.value, AssertionError)


class Complex(Cell):
    """A complex state and complex weights, with a conjugate in the step."""

    def __init__(self):
        super().__init__()
        self.W = nn.Parameter(0.2 * torch.randn(2, 2, dtype=torch.complex128))

    def inject(self, x):
        return x

    def step(self, z, context):
        return 0.3 * z.conj() @ self.W.T + context


class HalfDetached(Complex):
    """Loses the gradient of the imaginary part of its weight."""

    def step(self, z, context):
        W = torch.complex(self.W.real, self.W.imag.detach())
        return 0.3 * z.conj() @ W.T + context


def test_check_cell_takes_complex_cells_and_sees_their_imaginary_parts():
    x = torch.randn(3, 2, dtype=torch.complex128)
    check_cell(Complex(), x)
    with pytest.raises(ContractError, match="agree with finite differences"):
        check_cell(HalfDetached(), x)
