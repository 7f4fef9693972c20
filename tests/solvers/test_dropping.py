"""Finished samples of a dear cell leave early: few rows are evaluated in vain."""

import math

import numpy as np
import pytest
import torch
from cells import ScaledCell
from torch import nn

from equipoise import Equilibrium
from equipoise.solvers.dropping import CROWDED, DEAR

BATCH = 64
STEPS = {
    "half and half": [5] * 31 + [100] * 33,
    "one slow": [10] * 63 + [300],
    "one fast": [2] + [100] * 63,
    "uniform": list(np.linspace(5, 100, BATCH)),
    "geometric": list(np.logspace(0.5, 2.5, BATCH)),
    "three groups": [10] * 20 + [40] * 20 + [160] * 24,
    "few fast": [3] * 12 + [200] * 52,
}


class DearCell(ScaledCell):
    """Counts the rows that it evaluates, and has as many weights as make it dear."""

    def __init__(self, dear=True):
        super().__init__()
        self.ballast = nn.Parameter(torch.zeros(DEAR if dear else 1))


def rows_over_needed(cell, steps, **options):
    """Return the rows evaluated over those needed, when samples need about `steps`."""
    rate = torch.tensor([math.exp(math.log(1e-4) / n) for n in steps], dtype=torch.float64)
    x = torch.cat([torch.ones(BATCH, 3, dtype=torch.float64), rate[:, None]], dim=1)
    layer = Equilibrium(cell, "fixed_point", max_steps=1000, **options)
    with torch.no_grad():
        layer(x[torch.randperm(BATCH)])
    assert layer.last.converged.all()
    looked = BATCH if layer.last.steps.min() < layer.last.steps.max() else 0
    return (cell.rows - looked) / int((layer.last.steps + 1).sum())


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS.keys())
def test_dear_cell_evaluates_few_rows_in_vain(steps):
    assert rows_over_needed(DearCell(), steps) <= 1.25


def test_cheap_cell_keeps_its_rows_until_half_are_done():
    steps = STEPS["half and half"]
    assert sum(n > 50 for n in steps) > CROWDED * BATCH
    assert rows_over_needed(DearCell(dear=False), steps) > 1.5


def test_equal_solves_evaluate_equal_rows():
    counts = []
    for _ in range(2):
        torch.manual_seed(0)
        counts.append(rows_over_needed(DearCell(), STEPS["geometric"]))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("solver", ["fixed_point", "anderson", "broyden", "newton"])
def test_dropping_changes_no_value(solver):
    x = torch.rand(BATCH, 4, dtype=torch.float64) * 0.9
    values = []
    for dear in (False, True):
        layer = Equilibrium(DearCell(dear), solver, tolerance=1e-12, max_steps=2000)
        leaf = x.clone().requires_grad_()
        z = layer(leaf)
        (grad,) = torch.autograd.grad(z.square().sum(), leaf)
        values.append((z.detach(), grad))
    torch.testing.assert_close(values[0], values[1], rtol=1e-9, atol=1e-9)
