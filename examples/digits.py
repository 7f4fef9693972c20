"""Train an equilibrium classifier on scikit-learn's bundled digits, in a plain loop.

Run: make demo
"""

from __future__ import annotations

import time

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import equipoise


class DigitCell(equipoise.Cell):
    """`z = relu(W z + U x + b)`, with `W` divided by its norm where that exceeds `bound`, so that the step contracts.

    The normalised weight is made once for each solve and travels in the context as `Shared`.
    """

    def __init__(self, inputs: int = 64, width: int = 96, bound: float = 0.9) -> None:
        super().__init__()
        self.bound = bound
        self.W = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.input = nn.Linear(inputs, width)

    def inject(self, x: Tensor) -> tuple[Tensor, equipoise.Shared]:
        norm = torch.linalg.matrix_norm(self.W, 2)
        return self.input(x), equipoise.Shared(self.W * (self.bound / norm.clamp_min(self.bound)))

    def initial(self, x: Tensor, context: tuple[Tensor, Tensor]) -> Tensor:
        return torch.zeros_like(context[0])

    def step(self, z: Tensor, context: tuple[Tensor, Tensor]) -> Tensor:
        c, W = context
        return torch.relu(torch.addmm(c, z, W.T))

    def lipschitz(self) -> float:
        return self.bound


def main(epochs: int = 30, batch: int = 64) -> float:
    """Train, print what happened, and return the test accuracy."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # matrices this small are not worth a second thread
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 16, labels, test_size=0.2, stratify=labels, random_state=0)
    x, x_test = (torch.tensor(part, dtype=torch.float32) for part in split[:2])
    y, y_test = (torch.tensor(part) for part in split[2:])

    layer = equipoise.Equilibrium(DigitCell(), tolerance=1e-4)
    model = nn.Sequential(layer, nn.Linear(96, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    steps_forward = steps_backward = solves = 0
    started = time.perf_counter()
    columns = (
        TextColumn("epoch {task.completed:.0f}/{task.total:.0f}"),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    with equipoise.flush_denormals(), Progress(*columns) as progress:
        bar = progress.add_task("", total=epochs)
        for _ in range(epochs):
            total = 0.0
            for rows in torch.randperm(len(x)).split(batch):
                loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.item() * len(rows)
                solves += 1
                steps_forward += layer.last.steps.float().mean().item()
                steps_backward += layer.last.adjoint.steps.float().mean().item()
            progress.update(bar, advance=1, description=f"loss {total / len(x):.4f}")

    trained = time.perf_counter() - started
    ended = ", ".join(f"{count:,} {status.name.lower()}" for status, count in layer.outcomes.counts.items() if count)
    ended_backward = ", ".join(
        f"{count:,} {status.name.lower()}" for status, count in layer.adjoint_outcomes.counts.items() if count
    )
    with torch.no_grad():
        accuracy = (model(x_test).argmax(dim=1) == y_test).float().mean().item()
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(x):,} training images, {epochs} epochs in {trained:.1f} s"
    )
    print(f"forward solves:  {ended} samples; {steps_forward / solves:.1f} steps on average")
    print(f"backward solves: {ended_backward} samples; {steps_backward / solves:.1f} steps on average")
    print(f"on the {len(x_test)} test images: {layer.last}")
    print(f"test accuracy {100 * accuracy:.1f} %")
    return accuracy


if __name__ == "__main__":
    main()
