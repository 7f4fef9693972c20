"""Make the pictures of the README and of the documentation.

Run: make pictures   (about a minute; the picture of the report needs Chromium)

Each function makes one picture from a fixed seed and saves it beside this file, under 200 kB.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from PIL import Image
from torch import Tensor, nn

from equipoise import Cell, ConvergenceWarning, Equilibrium, Newton, OptEq, objective
from equipoise.plots import plot_objective

HERE = Path(__file__).parent
MAX_BYTES = 200_000
BLUE, ORANGE, GREEN, VIOLET, GREY = "#1f5fa8", "#d9730d", "#2f7d4f", "#7b4fa3", "#8a8f98"
RED = "#b3263a"


def draw_report() -> None:
    """The top of the page that `equipoise demo` writes, and the same page further down."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        raise SystemExit("The picture of the report needs Chromium: apt-get install chromium.")
    with tempfile.TemporaryDirectory() as folder:
        run, whole = Path(folder) / "run", Path(folder) / "whole.png"
        subprocess.run(
            [sys.executable, "-m", "equipoise", "demo", "--output", str(run)],
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},  # fast also on a busy machine
        )
        subprocess.run(
            [
                browser,
                *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
                *("--virtual-time-budget=8000", "--force-device-scale-factor=1.5"),
                *("--window-size=900,3600", f"--screenshot={whole}"),
                f"file://{run / 'report.html'}",
            ],
            check=True,
            capture_output=True,
        )
        page = Image.open(whole).convert("RGB")
    scale = 1.5
    _save(page.crop((0, round(25 * scale), page.width, round(660 * scale))), "report.png")
    _save(page.crop((0, round(1795 * scale), page.width, round(2810 * scale))), "report_solver.png")


def draw_objective() -> None:
    """The objective and the residual falling along the solves of one OptEq layer."""
    layer, x = _layer()
    layer(x, trace=True)
    assert layer.last is not None
    figure = plot_objective(objective(layer, x), layer.last.trace)
    _save(figure, "objective.png")

    # The README shows its left half, beside the report and in its shape.
    axes, right = figure.axes
    figure.delaxes(right)
    axes.set_subplotspec(GridSpec(1, 1, figure=figure)[0])
    figure.set_size_inches(6.4, 4.5)
    axes.set_title("")
    axes.set_xlabel("step of the solver", fontsize=12)
    axes.tick_params(labelsize=11)
    axes.legend(frameon=False, fontsize=11.5, loc="upper right")
    figure.suptitle("16 equilibria, each the minimum of a convex function", fontsize=14)
    _save(figure, "objective_falls.png")


def draw_solvers() -> None:
    """What four solvers do with the same cell: residual against the work done."""
    torch.manual_seed(0)
    cell = TanhCell(64, radius=0.97)
    x = 0.1 * torch.randn(32, 64)
    figure, axes = _figure(6.4, 4.2)
    for name, solver, colour in (
        ("fixed_point", "fixed_point", GREY),
        ("anderson", "anderson", BLUE),
        ("broyden", "broyden", ORANGE),
        # Elimination makes its many products in one batch: the count would say little of its time.
        ('Newton(inner="krylov")', Newton(inner="krylov"), GREEN),
    ):
        layer = Equilibrium(cell, solver=solver, tolerance=1e-6, max_steps=200)
        with torch.no_grad():
            layer(x, trace=True)
        assert layer.last is not None
        assert layer.last.trace is not None
        steps = int(layer.last.steps.median())
        residual = layer.last.trace.residual[: steps + 1].median(dim=1).values
        # Newton's steps cost several evaluations each, so work is spread evenly over its steps.
        work = torch.linspace(1, float(layer.last.evaluations.median()), len(residual))
        axes.plot(work, residual, color=colour, linewidth=2, marker="o", markersize=3, label=name)
    _finish(axes, "evaluations and Jacobian products", "relative residual, median of 32 samples")
    axes.legend(frameon=False)
    axes.set_title("One cell, four solvers", fontsize=12)
    _save(figure, "solvers.png")


def draw_cifar10() -> None:
    """Accuracies on CIFAR-10 by epoch, of the runs in `docs/results/cifar10.csv`."""
    with (HERE.parent / "results" / "cifar10.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    figure, axes = _figure(8.6, 4.4)
    names = list(dict.fromkeys(row["run"] for row in rows))
    for name, colour in zip(names, (GREY, BLUE, ORANGE, VIOLET, RED), strict=True):
        for kind, style in (("training", {"linestyle": "--"}), ("test", {"marker": "o"})):
            found = [row for row in rows if row["run"] == name and row[f"{kind} accuracy"]]
            axes.plot(
                [int(row["epoch"]) for row in found],
                [float(row[f"{kind} accuracy"]) for row in found],
                color=colour,
                linewidth=1.3 if kind == "training" else 2.2,
                markersize=4,
                label=f"{name}: {kind}",
                **style,
            )
    axes.axhline(85.7, color=GREEN, linewidth=1, linestyle=":")
    axes.text(67, 86.1, "published, 200 epochs: 85.7 %", color=GREEN, fontsize=9.5)
    _finish(axes, "epoch", "accuracy, %")
    axes.set_yscale("linear")
    axes.set_xlim(left=0)
    axes.legend(frameon=False, loc="lower right")
    _save(figure, "cifar10.png")


def draw_contours() -> None:
    """The convex objective of a layer with a state of two numbers, and the ways to its minimum."""
    torch.manual_seed(6)
    layer = OptEq(3, 2, hidden=12, activation="tanh").double()
    with torch.no_grad():
        for weight in layer.parameters():
            if weight.shape == (12, 2):  # one direction that contracts well, and one that does not
                turned = torch.linalg.qr(torch.randn(2, 2, dtype=torch.float64)).Q
                weight.copy_(torch.linalg.qr(weight).Q @ torch.diag(_row(0.97, 0.4)) @ turned)
    x = 0.5 * torch.randn(1, 3, dtype=torch.float64)
    best = objective(layer, x).minimizer()[0]
    across = torch.linspace(-4.4, 4.4, 161, dtype=torch.float64)
    up = torch.linspace(-2.9, 2.9, 121, dtype=torch.float64)
    grid = torch.cartesian_prod(across, up) + best
    height = objective(layer, x.expand(len(grid), 3)).merit(grid).reshape(161, 121).T
    figure, axes = _figure(6.4, 4.4)
    low = float(height.min())
    levels = [low + 0.05 * 1.55**k for k in range(13)]
    axes.contourf(across + best[0], up + best[1], height, [low, *levels], cmap="Blues_r", alpha=0.6)
    for angle, colour in ((0.2, ORANGE), (2.3, GREEN), (4.3, VIOLET)):
        start = best + _row(4.1 * math.cos(angle), 2.7 * math.sin(angle))
        plain = Equilibrium(layer.cell, solver="fixed_point", tolerance=1e-3, max_steps=500)
        plain(x, z0=start[None], trace=True)
        assert plain.last is not None
        assert plain.last.trace is not None
        path = torch.cat(plain.last.trace.state)
        axes.plot(*path.T, color=colour, marker="o", markersize=4, linewidth=1.6)
    axes.plot(*best, marker="*", markersize=16, color="black", zorder=5)
    axes.set_aspect("equal")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("$z_1$")
    axes.set_ylabel("$z_2$")
    axes.set_title("Plain iteration descends a convex function", fontsize=12)
    _save(figure, "contours.png")


def draw_samples() -> None:
    """Every sample stops by itself: 64 residual curves, each as long as its own solve."""
    torch.manual_seed(1)
    cell = TanhCell(32, radius=0.9)
    x = torch.cat([4 * torch.randn(63, 32), 0.02 * torch.randn(1, 32)])  # the last one is slow
    layer = Equilibrium(cell, solver="fixed_point", tolerance=1e-4, max_steps=400)
    with torch.no_grad():
        layer(x, trace=True)
    solution = layer.last
    assert solution is not None
    assert solution.trace is not None
    figure, axes = _figure(6.4, 4.2)
    slowest = int(solution.steps.argmax())
    for sample, steps in enumerate(solution.steps.tolist()):
        colour, width = (ORANGE, 2.2) if sample == slowest else (BLUE, 0.8)
        residual = solution.trace.residual[: steps + 1, sample]
        axes.plot(residual, color=colour, linewidth=width, alpha=1 if width > 1 else 0.5)
    axes.axhline(1e-4, color=GREY, linestyle="--", linewidth=1)
    others = solution.steps[torch.arange(64) != slowest]
    axes.set_title(
        f"63 samples finish within {others.max()} steps and leave; "
        f"one needs {solution.steps.max()}",
        fontsize=12,
    )
    _finish(axes, "step", "relative residual")
    _save(figure, "samples.png")


def draw_regularizers() -> None:
    """What another term in the objective does to the features."""
    strengths = torch.logspace(-3, 1, 17).tolist()
    figure, axes = _figure(6.4, 4.2)
    for name, colour, label in (("l1", BLUE, "l1, |z|_1"), ("l2", ORANGE, "l2, |z|^2/2")):
        sizes = []
        for strength in strengths:
            torch.manual_seed(0)
            x = torch.randn(64, 32)
            layer = OptEq(32, 64, hidden=96, tolerance=1e-5, regularizer=name, strength=strength)
            with torch.no_grad():
                for weight in layer.parameters():
                    weight.mul_(4)
                sizes.append(float(layer(x).abs().mean()))
        axes.plot(
            strengths, sizes, color=colour, marker="o", markersize=4, linewidth=2, label=label
        )
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("strength of the regulariser")
    axes.set_ylabel("mean size of a feature at the equilibrium")
    axes.grid(True, alpha=0.3, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    axes.set_title("Another term in the problem, other features", fontsize=12)
    _save(figure, "regularizers.png")


def draw_look() -> None:
    """The figures of `equipoise look` for a network of digits: its landscape, and its solves."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "digits"
        for words in (
            ["train", "digits", "--output", str(run), "train.weights_every=1", "--quiet"],
            ["look", "landscape", str(run), "--seed", "3", "--view", "contour", "--quiet"],
            ["look", "trajectory", str(run), "--epochs", "0,1,3,10", "--components", "ends"],
        ):
            subprocess.run(
                [sys.executable, "-m", "equipoise", *words],
                check=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        for source, name in (("landscape-contour", "landscape"), ("trajectory", "trajectory")):
            _save(Image.open(run / "look" / f"{source}.png").convert("RGB"), f"{name}.png")


class TanhCell(Cell):
    """`z = tanh(W z + x)` with a weight of given spectral radius."""

    def __init__(self, width: int, radius: float) -> None:
        super().__init__()
        weight = torch.randn(width, width)
        self.W = nn.Parameter(weight * (radius / torch.linalg.eigvals(weight).abs().max()))

    def inject(self, x: Tensor) -> Tensor:
        """Take the input as it is."""
        return x

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        """Iterate once."""
        return torch.tanh(z @ self.W.T + context)


def _layer() -> tuple[OptEq, Tensor]:
    torch.manual_seed(0)
    layer = OptEq(32, 64, hidden=64, tolerance=1e-7, solver="fixed_point", bound=0.97).double()
    with torch.no_grad():
        for weight in layer.parameters():
            weight.mul_(4)  # norm control holds the layer at its bound, as in a trained network
    return layer, torch.randn(16, 32, dtype=torch.float64)


def _row(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def _figure(width: float, height: float) -> tuple[Figure, object]:
    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    return figure, figure.subplots()


def _finish(axes: object, x: str, y: str) -> None:
    axes.set_yscale("log")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, alpha=0.3, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _save(picture: Figure | Image.Image, name: str) -> None:
    path = HERE / name
    if isinstance(picture, Figure):
        picture.savefig(path)
        picture = Image.open(path).convert("RGB")
    # Plots have few colours: 128 of them look the same and take a quarter of the room.
    picture.quantize(128).save(path, optimize=True)
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise SystemExit(f"{path} has {size:,} bytes, more than {MAX_BYTES:,}.")
    print(f"{path.name}: {size // 1000} kB")


DRAWINGS: dict[str, Callable[[], None]] = {
    "report": draw_report,
    "objective": draw_objective,
    "solvers": draw_solvers,
    "cifar10": draw_cifar10,
    "contours": draw_contours,
    "samples": draw_samples,
    "regularizers": draw_regularizers,
    "look": draw_look,
}


def main() -> None:
    """Make all pictures, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(DRAWINGS)}")
    chosen = parser.parse_args().names or list(DRAWINGS)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", ConvergenceWarning)  # some show solves that do not converge
    for name in chosen:
        DRAWINGS[name]()


if __name__ == "__main__":
    main()
