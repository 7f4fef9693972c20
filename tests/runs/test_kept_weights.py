"""The trained weights that are kept with the results."""

from __future__ import annotations

from pathlib import Path

import torch

from equipoise import certify
from equipoise.runs.saved_run import open_run

FOLDER = Path(__file__).parents[2] / "docs" / "results" / "cifar10"


def test_weights_of_cifar10_are_a_run_with_one_equilibrium_for_every_image() -> None:
    run = open_run(FOLDER)
    assert len(run.classes) == 10
    assert sum(each.numel() for each in run.model.parameters()) == 158_878
    equilibrium = run.model.get_submodule("equilibrium")
    certificate = certify(equilibrium)
    assert certificate.contracts
    torch.manual_seed(0)
    with torch.no_grad():
        logits = run.model(torch.randn(2, 3, 32, 32))
    assert logits.shape == (2, 10)
    assert equilibrium.last.converged.all()
