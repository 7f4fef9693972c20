"""Train an equilibrium network on scikit-learn's bundled digits, in a plain loop, and look at the problem that it solves.

Run: make demo   (writes build/demo/objective.png)
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import equipoise
from equipoise.report import plot_objective

PICTURE = Path("build/demo/objective.png")


def main(epochs: int = 10, batch: int = 64) -> float:
    """Train, print what happened, and return the test accuracy."""
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 16, labels, test_size=0.2, stratify=labels, random_state=0)
    x, x_test = (torch.tensor(part, dtype=torch.float32) for part in split[:2])
    y, y_test = (torch.tensor(part) for part in split[2:])

    model = equipoise.create_model("opteq-digits")
    layer = model.equilibrium
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=epochs * -(-len(x) // batch))
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
                schedule.step()
                total += loss.item() * len(rows)
                solves += 1
                steps_forward += layer.last.steps.float().mean().item()
                steps_backward += layer.last.adjoint.steps.float().mean().item()
            progress.update(bar, advance=1, description=f"loss {total / len(x):.4f}")
    trained = time.perf_counter() - started

    model.eval()
    with torch.no_grad():
        accuracy = (model(x_test).argmax(dim=1) == y_test).float().mean().item()
    print(f"{model}\n{len(x):,} training images, {epochs} epochs in {trained:.1f} s")
    for way, outcomes, steps in (("forward", layer.outcomes, steps_forward), ("backward", layer.adjoint_outcomes, steps_backward)):
        ended = ", ".join(f"{count:,} {status.name}" for status, count in outcomes.counts.items() if count)
        print(f"{way} solves ended: {ended}; {steps / solves:.1f} steps on average")
    print(f"on the {len(x_test)} test images: {layer.last}")
    print(f"test accuracy {100 * accuracy:.1f} %")
    examine(model, x_test[:16])
    return accuracy


def examine(model: equipoise.Network, x: torch.Tensor) -> None:
    """Print which problem the trained layer solves, what is proven of it, and how its objective falls during a solve."""
    print(f"\n{equipoise.certify(model.equilibrium)}")
    with torch.no_grad():
        features = model.extractor(x.reshape(-1, *model.input_shape))
        exact = equipoise.Equilibrium(model.equilibrium.cell, "fixed_point", tolerance=1e-6, max_steps=500)
        exact(features, trace=True)
    problem = equipoise.objective(exact, features)
    print(problem.describe())
    path = problem.descent(exact.last.trace)
    print(f"objective above its minimum, mean of {len(x)} test images, during a plain solve:")
    gap = (path.value - path.value[-1]).mean(axis=1)
    for step in [0, 1, 2, 3, 5, 10, 20, 50, 100, 200]:
        if step < len(gap) - 1:
            print(f"  step {step:3d}   objective {gap[step]:9.2e}   residual {path.residual[step].max():.1e}")
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    plot_objective(problem, exact.last.trace, PICTURE)
    print(f"the same as a picture: {PICTURE}")


if __name__ == "__main__":
    main()
