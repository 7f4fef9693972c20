"""Images too large to normalise make solves that say so, and never zeros that pass for features."""

import pytest
import torch

from equipoise import Equilibrium, Status
from equipoise.core import ConvergenceWarning
from equipoise.families.multiscale import MultiscaleCell
from equipoise.families.residual import ResidualCell
from equipoise.models.group_norm import GroupNorm, mark_overflow

CELLS = {
    "residual": lambda: ResidualCell(8, 8),
    "multiscale": lambda: MultiscaleCell((8, 8)),
}


@pytest.mark.parametrize("size", [1e19, 1e20, 1e30, 3e38])
@pytest.mark.parametrize("kind", CELLS)
def test_sample_too_large_to_normalise_is_told(kind, size):
    torch.manual_seed(0)
    layer = Equilibrium(CELLS[kind](), tolerance=1e-2)
    x = torch.randn(3, 8, 4, 4).clamp(-1, 1)
    alone = layer(x[[0, 2]])
    x[1] *= size
    with pytest.warns(ConvergenceWarning, match="1 of 3 samples met NaN or infinity"):
        found = layer(x)
    assert layer.last.status.tolist() == [0, Status.NONFINITE, 0]
    for one, other in zip(
        found if isinstance(found, tuple) else (found,),
        alone if isinstance(alone, tuple) else (alone,),
        strict=True,
    ):
        torch.testing.assert_close(one[[0, 2]], other, rtol=0.05, atol=0.05)


def test_backward_solve_through_it_met_nan_as_well():
    torch.manual_seed(0)
    layer = Equilibrium(MultiscaleCell((8, 8)), tolerance=1e-2)
    with pytest.warns(ConvergenceWarning, match="3 of 3 samples met NaN or infinity"):
        found = layer(1e30 * torch.randn(3, 8, 4, 4))
    with pytest.warns(ConvergenceWarning, match="backward solve: 3 of 3 samples met NaN"):
        sum(each.sum() for each in found).backward()
    assert layer.last.adjoint.status.tolist() == [Status.NONFINITE] * 3


def test_images_are_marked_before_normalisation_fails():
    torch.manual_seed(0)
    x = torch.randn(1, 8, 4, 4)
    expected = GroupNorm(2, 8)(x)
    for size in torch.logspace(0, 38, 77).tolist():
        scaled = size * x / x.abs().max()
        marked = mark_overflow(scaled)
        if marked.isnan().any():
            assert marked.isnan().all()
            assert size > 1e16
        else:
            torch.testing.assert_close(marked, scaled, rtol=0, atol=0)
            if size > 100:  # where epsilon is small beside the variance
                torch.testing.assert_close(GroupNorm(2, 8)(marked), expected, rtol=1e-3, atol=1e-4)
