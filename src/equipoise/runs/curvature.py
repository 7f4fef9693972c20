"""The largest curvatures of a network's loss at its weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from equipoise.analysis.sharpness import Curvature, hessian_product, top_eigenvalues
from equipoise.core import stop_if_requested
from equipoise.data import Dataset, batches
from equipoise.gradients import Implicit
from equipoise.models import find_equilibria
from equipoise.runs.network import Network

__all__ = ["copy_exact", "find_curvature"]

TOLERANCE = 1e-8  # of the solves: their errors would be errors of the Hessian
MIN_STEPS = 1000
BATCH = 64  # samples whose graph of second derivatives is in memory at a time
MAX_PRODUCTS = 100


def copy_exact(model: nn.Module) -> nn.Module:
    """Return a copy in float64 whose equilibria are solved to 1e-8 and differentiated implicitly.

    An equilibrium that is not reached raises `ConvergenceError`.

    Args:
        model: The model.
    """
    copied = copy.deepcopy(model).cpu().double().eval()
    for layer in find_equilibria(copied).values():
        layer.gradient = Implicit()
        layer.stop = replace(
            layer.stop,
            tolerance=TOLERANCE,
            max_steps=max(MIN_STEPS, layer.stop.max_steps),
            patience=max(MIN_STEPS, layer.stop.patience),
        )
        layer.eval_options = {}
        layer.solves.on_failure = "raise"
    return copied


def find_curvature(
    network: Network,
    dataset: Dataset,
    count: int,
    *,
    on_product: Callable[[int, int], None] | None = None,
) -> Curvature:
    """Return the ends of the spectrum of the Hessian of a network's mean loss.

    It is that of `copy_exact`, whatever the network was trained with.

    Args:
        network: The network.
        dataset: The samples that the loss is a mean over.
        count: How many of the largest eigenvalues.
        on_product: Called with the products with the Hessian that are made, and the most there
            will be.
    """
    run = network.run
    model = copy_exact(run.model)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    parts = [
        (x.double() if x.is_floating_point() else x, y.double() if y.is_floating_point() else y)
        for x, y in batches(dataset, BATCH, shuffle=False, transform=run.transform)
        if len(x)
    ]
    total = sum(run.task.weight(y) for _, y in parts)

    def product(vector: Tensor) -> Tensor:
        found = torch.zeros_like(vector)
        for x, y in parts:
            stop_if_requested()
            part = hessian_product(lambda x=x, y=y: run.task.loss(model(x), y), weights)  # type: ignore[misc]
            found += run.task.weight(y) / total * part(vector)
        return found

    width = sum(weight.numel() for weight in weights)
    start = torch.randn(width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    most = min(MAX_PRODUCTS, width)
    return top_eigenvalues(
        product,
        start,
        count,
        max_products=most,
        on_product=None if on_product is None else lambda made: on_product(made, most),
    )
