"""OptEq beside torchdeq: one dense layer and the 199 k network; time at equal error, memory.

Run: make bench   (writes docs/results/opteq.md; needs torchdeq 0.1.0, which `make bench` installs)

torchdeq gets the step in two forms: with the input injection computed once for each solve, as ours
is (`function`), and as its users write it, with the injection in the step (`written`). Norm control
is off for both; what it costs is a row of its own.

A layer forms `W W^T` where that pays, in training for each step anew.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from contest import Contestant, duel, interleave, layer_for, peak_of, write
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from equipoise import Equilibrium, Stop, Unrolled, create_model
from equipoise.families.opteq import OptEq
from equipoise.solvers.kernels import without_kernels


class OneLayer(nn.Module):
    """A dense OptEq of one layer, 512 units and 512 states."""

    def __init__(self, inputs: int, norm: float | None = None) -> None:
        super().__init__()
        self.layer = OptEq(inputs, 512, 512, alpha=1.0, norm="none")
        if norm is not None:
            operator = self.layer.layers.operators[0]
            operator.scale_(norm / operator.bound(operator.weights()))

    @property
    def cell(self) -> nn.Module:
        return self.layer.cell

    def start(self, x: Tensor) -> Tensor:
        return torch.zeros(x.shape[0], 512)

    def function(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        W, inject = self.layer.layers.operators[0].weight, self.layer.layers.inputs[0]
        c = inject(x)
        return lambda z: torch.relu(z @ W.T + c) @ W

    def written(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        W, inject = self.layer.layers.operators[0].weight, self.layer.layers.inputs[0]
        return lambda z: torch.relu(z @ W.T + inject(x)) @ W


class Network(nn.Module):
    """The equilibrium of `opteq-cifar10-199k`: five layers, 3 x 3 kernels, alpha 0.8."""

    def __init__(self, norm: float, control: str = "none") -> None:
        super().__init__()
        self.layer = create_model("opteq-cifar10-199k", norm=control).equilibrium
        for operator in self.layer.layers.operators:
            operator.scale_(norm / operator.bound(operator.weights()))

    @property
    def cell(self) -> nn.Module:
        return self.layer.cell

    def start(self, x: Tensor) -> Tensor:
        return x.detach()

    def _step(self, z: Tensor, injections: Iterable[Tensor]) -> Tensor:
        for operator, c in zip(self.layer.layers.operators, injections, strict=True):
            hidden = torch.relu(F.conv2d(z, operator.kernel, padding=1) + c)
            z = 0.8 * F.conv_transpose2d(hidden, operator.kernel, padding=1) + 0.2 * z
        return z

    def function(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        injected = [inject(x) for inject in self.layer.layers.inputs]
        return lambda z: self._step(z, injected)

    def written(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda z: self._step(z, (inject(x) for inject in self.layer.layers.inputs))


class Products(TorchDispatchMode):
    """Notes the shapes of the matrix products that a call makes."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, int, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            left, right = args[-2:]
            self.shapes.append((*left.shape, right.shape[1]))
        return func(*args, **(kwargs or {}))

    def bare(self) -> Callable[[], Tensor]:
        """Return the same products and nothing else."""
        pairs = [(torch.randn(m, k), torch.randn(k, n)) for m, k, n in set(self.shapes)]
        made = {(*a.shape, b.shape[1]): (a, b) for a, b in pairs}

        def run() -> Tensor:
            for shape in self.shapes:
                product = torch.mm(*made[shape])
            return product

        return run


def beside_products(
    title: str, problem: OneLayer, x: Tensor, training: bool, repetitions: int
) -> str:
    """Return the time of a solve and of a training step over that of the products they make."""
    layer = layer_for(problem.cell)(1e-5, 1e-5).train(training)

    def solve() -> Tensor:
        with torch.no_grad():
            return layer(x)

    def step() -> Tensor:
        layer(x).square().sum().backward()
        return x

    cells = []
    for run in (solve, step):
        run()
        with Products() as products, without_kernels():  # which hide theirs
            run()
        whole = Contestant("whole", run)
        bare = Contestant("bare", products.bare())
        interleave([whole, bare], repetitions)
        cells += [
            str(len(products.shapes)),
            f"{whole.milliseconds:.2f}",
            f"{whole.milliseconds / bare.milliseconds:.2f}",
        ]
    mode = "training" if training else "evaluation"
    line = f"| {title} | {mode} | {' | '.join(cells)} |"
    print(line, flush=True)
    return line


def trained(epochs: int = 20) -> tuple[OneLayer, Tensor]:
    """A layer after training on the digits, and a batch of them."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    problem = OneLayer(64)
    problem.layer.layers.norm = "scale"
    model = nn.Sequential(problem.layer, nn.Linear(512, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(128):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    problem.layer.layers.norm = "none"
    with torch.no_grad():
        for layer, operator in enumerate(problem.layer.layers.operators):
            excess = operator.bound(operator.weights()) / problem.layer.layers.limit(layer)
            operator.scale_(1 / excess.clamp_min(1))
    norm = problem.layer.layers.norms()["1"]
    print(
        f"trained layer: norm {norm:.3f}, loss {F.cross_entropy(model(x), y).item():.4f}",
        flush=True,
    )
    return problem, x


def unrolled(problem: Network, x: Tensor, repetitions: int) -> list[str]:
    """Our implicit training step at residual 1e-3 beside 20 unrolled ones: time, peak memory.

    Each trains a copy of its own, so that the norms that control bounds do move.
    """

    def training(norm: str = "none", **options: Any) -> Callable[[], Tensor]:
        own = copy.deepcopy(problem)
        own.layer.layers.norm = norm
        layer = Equilibrium(own.cell, tolerance=1e-3, **options)
        optimizer = torch.optim.AdamW(own.parameters(), lr=1e-3)

        def run() -> Tensor:
            optimizer.zero_grad()
            z = layer(x)
            z.square().sum().backward()
            optimizer.step()
            return z.detach()

        return run

    contestants = [
        Contestant("implicit, 1e-3", training()),
        Contestant("implicit, 1e-3, norm='scale'", training("scale")),
        Contestant("Unrolled(20)", training(gradient=Unrolled(20), on_failure="ignore")),
    ]
    for contestant in contestants:
        contestant.run()
    interleave(contestants, repetitions)
    peaks = [peak_of(contestant.run) for contestant in contestants]
    lines = []
    for contestant, peak in zip(contestants, peaks, strict=True):
        ratio = contestants[-1].milliseconds / contestant.milliseconds
        lines.append(
            f"| {contestant.name} | {contestant.milliseconds:.0f} | {ratio:.2f} | {peak:.0f} "
            f"| 1/{peaks[-1] / peak:.1f} |"
        )
        print(lines[-1], flush=True)
    return lines


def precisions(repetitions: int) -> list[str]:
    """A training step of the CIFAR-10 network in float32, and as low as autocast goes."""
    torch.manual_seed(0)
    x, y = torch.randn(128, 3, 32, 32), torch.randint(0, 10, (128,))
    network = create_model("opteq-cifar10-162k", norm="none", alpha=0.5)
    equilibrium = next(m for m in network.modules() if isinstance(m, Equilibrium))

    def training(tolerance: float, lower: torch.dtype | None) -> Callable[[], Tensor]:
        def run() -> Tensor:
            equilibrium.stop = Stop(tolerance)
            network.zero_grad()
            with torch.autocast("cpu", lower, enabled=lower is not None):
                output = network(x)
            F.cross_entropy(output.float(), y).backward()
            return torch.cat([p.grad.flatten() for p in network.parameters()])

        return run

    true = training(1e-6, None)()
    contestants = [
        Contestant("float32, 1e-2", training(1e-2, None)),
        Contestant("float32, 2e-2", training(2e-2, None)),
        Contestant("bfloat16, 1e-2: solves in float32", training(1e-2, torch.bfloat16)),
        Contestant("bfloat16, 2e-2", training(2e-2, torch.bfloat16)),
    ]
    errors = [float((each.run() - true).norm() / true.norm()) for each in contestants]
    interleave(contestants, repetitions)
    lines = []
    for contestant, error in zip(contestants, errors, strict=True):
        ratio = contestants[0].milliseconds / contestant.milliseconds
        lines.append(
            f"| {contestant.name} | {contestant.milliseconds:.0f} | {ratio:.2f} | {error:.1e} |"
        )
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("docs/results/opteq.md"))
    parser.add_argument("--repetitions", type=int, default=9)
    options = parser.parse_args()
    count = options.repetitions

    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    speed, ratios = [], []
    layer, digits = trained()
    for batch in (1, 128):
        random = OneLayer(784, norm=0.99)
        for title, problem, x, goal in (
            (f"one layer, norm 0.99, batch {batch}", random, torch.randn(batch, 784), 4),
            (f"one layer, trained on digits, batch {batch}", layer, digits[:batch], 6),
        ):
            ratios += [
                beside_products(title, problem, x, training, 9 * count)
                for training in (False, True)
            ]
            plain = "equipoise, without compiled kernels"
            challengers = {name: layer_for(problem.cell) for name in ("equipoise", plain)}
            speed += duel(
                title,
                problem,
                x,
                challengers,
                residual=1e-5,
                error=1e-4,
                goal=goal,
                repetitions=3 * count,
                contexts={plain: without_kernels},
            )
    channels = Network(0.5).layer.layers.operators[0].kernel.shape[1]
    x = torch.relu(torch.randn(32, channels, 16, 16)).requires_grad_()
    for norm in (0.5, 0.95):
        problem = Network(norm)
        title = f"199 k network, norms {norm}, batch 32"
        challengers = {"equipoise": layer_for(problem.cell)}
        speed += duel(
            title, problem, x, challengers, residual=1e-3, error=1e-2, goal=1.4, repetitions=count
        )
    memory = []
    for norm in (0.5, 0.95):
        memory += [
            line.replace("| ", f"| norms {norm}, ", 1) for line in unrolled(Network(norm), x, count)
        ]
    body = [
        "## Forward and backward, against torchdeq 0.1.0",
        "",
        "Each at the loosest tolerance of its own that brings the true residual below 1e-5 "
        "and the gradient error below 1e-4 "
        "(network: 1e-3 and 1e-2).",
        "",
        "| layer | contestant | ms | worst residual | gradient error | times torchdeq's best "
        "| times its best as users write it |",
        "|---|---|---|---|---|---|---|",
        *speed,
        "",
        "## A solve and a training step of one layer, and the matrix products they make",
        "",
        "Ratios are those of the time to that of the same products alone; goals: 2 at batch 1, and "
        "1.3 at batch 128, for a solve.",
        "",
        "| layer | mode | products of a solve | ms | ratio | products of a training step | ms "
        "| ratio |",
        "|---|---|---|---|---|---|---|---|",
        *ratios,
        "",
        "## A training step of the 199 k network's equilibrium, batch 32, 16 x 16, beside 20 "
        "unrolled steps",
        "",
        "Each with a step of AdamW at 1e-3. The goals are 5 times faster, and 1/5 of the memory.",
        "",
        "| gradient | ms | times faster | peak MB | of unrolled |",
        "|---|---|---|---|---|",
        *memory,
        "",
        "## A training step of `opteq-cifar10-162k`, alpha 0.5, batch 128, 32 x 32, by precision",
        "",
        "Solves run in bfloat16 under autocast if their tolerance is at least 0.016. The error is "
        "that of all gradients together, against float32 at 1e-6.",
        "",
        "| precision and tolerance | ms | times faster | gradient error |",
        "|---|---|---|---|",
        *precisions(count),
    ]
    write(options.output, "OptEq, measured", "benchmarks/opteq.py", count, body)


if __name__ == "__main__":
    main()
