"""A few samples are followed in Python numbers; everything ends as it does in arrays."""

import math

import numpy as np
import pytest
import torch

from equipoise import Status, Stop, solve
from equipoise.solvers import monitor

FIELDS = ("value", "status", "residual", "scale", "steps", "evaluations")


def contraction(z, c):
    return 0.5 * torch.tanh(z) + c


def slow(z, c):
    return 0.99 * z + c


def runaway(z, c):
    return 1.5 * z + c


def to_zero(z, c):
    return 0.3 * z + 0 * c


def far_away(z, c):
    """A residual that becomes small beside an iterate that runs away."""
    return z + c / (1 + z.abs()) ** 0.5


def breaks(z, c):
    return torch.where(z.abs() > 1.4, torch.nan, 0.5 * z + c)


def mixed(z, c):
    """Samples of their own pace, one of which runs away."""
    rate = torch.tensor([[0.1], [0.9], [1.2], [0.5]], dtype=z.dtype)[: len(z)]
    return rate * z + c


MAPS = [contraction, slow, runaway, to_zero, far_away, breaks, mixed]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e12, 1e25])
@pytest.mark.parametrize("step", MAPS, ids=lambda step: step.__name__)
def test_numbers_and_arrays_end_alike(step, size, dtype, monkeypatch):
    stops = [
        Stop(1e-5),
        Stop(1e-3, absolute=0.5, check_every=3),
        Stop(1e-5, max_steps=7),
        Stop(1e-4, growth=10.0),
    ]
    for samples in (1, 3, 4):
        c = size * torch.randn(samples, 5, dtype=dtype)
        for stop in stops:
            for solver in ("fixed_point", "anderson"):
                start = size * torch.ones_like(c)
                few = solve(step, start, solver, stop, context=c)
                with monkeypatch.context() as patch:
                    patch.setattr(monitor, "MAX_FEW_SAMPLES", 0)
                    arrays = solve(step, start, solver, stop, context=c)
                for name in FIELDS:
                    found, wanted = getattr(few, name), getattr(arrays, name)
                    assert found.dtype == wanted.dtype
                    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
                np.testing.assert_array_equal(few.start, arrays.start)


def test_common_end_is_found_in_numbers_alone(monkeypatch):
    def refuse(*_):
        raise AssertionError

    monkeypatch.setattr(monitor.Monitor, "_judge", refuse)
    solution = solve(contraction, torch.zeros(2, 5), context=torch.full((2, 5), 0.1))
    assert solution.converged.all()
    assert (solution.residual > 0).all()
    assert (solution.residual <= 1e-4).all()


def test_residuals_too_large_for_their_dtype_are_infinite_without_a_warning(recwarn):
    solution = solve(lambda z: z * 1e30, torch.ones(1, 2), "fixed_point", Stop(max_steps=20))
    assert solution.status.item() in (Status.DIVERGED, Status.NONFINITE)
    assert not math.isnan(solution.residual.item())
    assert not recwarn.list
