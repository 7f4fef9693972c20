"""Monotone layers beside Peaceman-Rachford splitting as its authors wrote it; ratios in one run.

Run: python benchmarks/monotone.py   (one thread; prints a table)

The contestant follows the algorithms of Winston & Kolter (2020) and their settings: `a = 1`, the
inverse formed at each forward pass, iterations of the whole batch until its relative change is
below the tolerance, backward by the same splitting on masks, and kernels in Fourier space as real
matrices of twice the size at all frequencies. Both do forward and backward of the sum of squares,
at the same weights, which change between any two rounds as in training; rounds alternate, and
times are minima of processor time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from sklearn.datasets import load_digits
from torch import Tensor, nn

from equipoise.families.monotone import MonotoneConv2d, MonotoneDense, MonotoneLayer

STEP = 1.0  # the authors' default


class PeacemanRachford(nn.Module):
    """The splitting as published: a linear part, and ReLU.

    Args:
        layer: Ours, whose weights it uses.
        tolerance: Relative change of the batch at which it stops.
        limit: Iterations at most.
    """

    def __init__(self, layer: MonotoneLayer, tolerance: float, limit: int = 500) -> None:
        super().__init__()
        self.layer, self.tolerance, self.limit = layer, tolerance, limit
        self.operator = layer.cell.operator
        self.steps = (0, 0)

    def multiply(self, z: Tensor, *, transpose: bool) -> Tensor:
        """Return `W z` or `W^T z`."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Form the inverse of `I + a (I - W)`."""
        raise NotImplementedError

    def inverse(self, z: Tensor, *, transpose: bool) -> Tensor:
        """Return its product with `z`."""
        raise NotImplementedError

    def iterate(self, start: Tensor, half: Callable, project: Callable) -> tuple[Tensor, int]:
        """Iterate until the change of the batch is small."""
        z = torch.zeros_like(start)
        u = torch.zeros_like(start)
        error, count = 1.0, 0
        while error > self.tolerance and count < self.limit:
            reflected = 2 * z - u
            u = 2 * half(reflected) - reflected
            new = project(u)
            error = (new - z).norm().item() / (1e-6 + new.norm().item())
            z = new
            count += 1
        return z, count

    def forward(self, x: Tensor) -> Tensor:
        self.prepare()
        with torch.no_grad():
            c = self.layer.cell.inputs(x)
            z, count = self.iterate(
                c, lambda r: self.inverse(r + STEP * c, transpose=False), torch.relu
            )
        self.steps = (count, 0)
        recorded = torch.relu(self.multiply(z, transpose=False) + self.layer.cell.inputs(x))
        return _Backward.apply(recorded, self)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, network):
        ctx.network = network
        ctx.save_for_backward(z)
        return z.clone()

    @staticmethod
    def backward(ctx, g):
        network = ctx.network
        (z,) = ctx.saved_tensors
        slope = (z > 0).to(g.dtype)
        off = slope == 0
        d = (1 - slope) / slope
        v = slope * g

        def project(u: Tensor) -> Tensor:
            new = (u + STEP * (1 + d) * v) / (1 + STEP * d)
            new[off] = v[off]
            return new

        u, count = network.iterate(g, lambda r: network.inverse(r, transpose=True), project)
        network.steps = (network.steps[0], count)
        return g + network.multiply(u, transpose=True), None


class DenseContestant(PeacemanRachford):
    """On vectors."""

    def multiply(self, z: Tensor, *, transpose: bool) -> Tensor:
        A, B, m = self.operator.A, self.operator.B, self.operator.margin
        skew = z @ B.T - z @ B
        return (1 - m) * z - (z @ A.T) @ A + (-skew if transpose else skew)

    def prepare(self) -> None:
        A, B, m = self.operator.A, self.operator.B, self.operator.margin
        identity = torch.eye(len(A))
        W = (1 - m) * identity - A.T @ A + B - B.T
        self.inverted = torch.inverse((1 + STEP) * identity - STEP * W)

    def inverse(self, z: Tensor, *, transpose: bool) -> Tensor:
        return z @ (self.inverted if transpose else self.inverted.T)


class ConvolutionContestant(PeacemanRachford):
    """On periodic images."""

    side = 16

    def kernels(self) -> tuple[Tensor, Tensor]:
        operator = self.operator
        A = operator.size_A * operator.A / operator.A.norm()
        return A, operator.size_B * operator.B / operator.B.norm()

    def multiply(self, z: Tensor, *, transpose: bool) -> Tensor:
        A, B = self.kernels()

        def forward(z: Tensor, kernel: Tensor) -> Tensor:
            return F.conv2d(F.pad(z, (1, 1, 1, 1), mode="circular"), kernel)

        def backward(z: Tensor, kernel: Tensor) -> Tensor:
            padded = F.pad(z, (1, 1, 1, 1), mode="circular")
            return F.conv_transpose2d(padded, kernel)[:, :, 2:-2, 2:-2]

        skew = forward(z, B) - backward(z, B)
        rest = (1 - self.operator.margin) * z - backward(forward(z, A), A)
        return rest + (-skew if transpose else skew)

    def prepare(self) -> None:
        A, B = (self.blocks(kernel) for kernel in self.kernels())
        identity = torch.eye(A.shape[1])
        W = (1 - self.operator.margin) * identity - A.mT @ A + B - B.mT
        self.inverted = torch.inverse((1 + STEP) * identity - STEP * W)

    def blocks(self, kernel: Tensor) -> Tensor:
        """Return the kernel at all frequencies, as real matrices of twice the size."""
        padded = F.pad(kernel.flip(2, 3), (0, self.side - 3, 0, self.side - 3)).roll(
            (-1, -1), (2, 3)
        )
        symbol = torch.fft.fft2(padded).flatten(2).permute(2, 0, 1)
        upper = torch.cat([symbol.real, -symbol.imag], dim=2)
        return torch.cat([upper, torch.cat([symbol.imag, symbol.real], dim=2)], dim=1)

    def inverse(self, z: Tensor, *, transpose: bool) -> Tensor:
        spectrum = torch.fft.fft2(z).flatten(2).permute(2, 0, 1)
        rows = torch.cat([spectrum.real, spectrum.imag], dim=2)
        found = rows.bmm(self.inverted if transpose else self.inverted.mT)
        real, imaginary = found.chunk(2, dim=2)
        image = torch.complex(real, imaginary).permute(1, 2, 0).reshape(z.shape)
        return torch.fft.ifft2(image).real


def compare(name: str, layer: MonotoneLayer, contestant: PeacemanRachford, x: Tensor) -> None:
    """Print the times of both, and check that they agree."""
    runs = {"authors": contestant, "ours": layer}
    best = dict.fromkeys(runs, float("inf"))
    found: dict[str, list[Tensor]] = {}
    parameters = list(layer.parameters())
    for _ in range(7):
        with torch.no_grad():
            for one in parameters:
                one.mul_(1 + 1e-4 * torch.randn(()))  # an optimiser's step: nothing is kept
        for own, run in runs.items():
            for one in parameters:
                one.grad = None
            start = time.process_time()
            z = run(x)
            z.square().sum().backward()
            best[own] = min(best[own], time.process_time() - start)
            found[own] = [z.detach(), *(one.grad for one in parameters)]
    apart = max(float((a - b).norm() / b.norm()) for a, b in zip(*found.values(), strict=True))
    last = layer.last
    steps = (int(last.evaluations.max()), int(last.adjoint.evaluations.max()))
    print(
        f"| {name} | {1e3 * best['authors']:.1f} ms | {1e3 * best['ours']:.1f} ms "
        f"| {best['authors'] / best['ours']:.1f} | {contestant.steps[0]} + {contestant.steps[1]} "
        f"| {steps[0]} + {steps[1]} | {apart:.0e} |",
        flush=True,
    )


def trained(batch: int, steps: int = 300) -> tuple[MonotoneDense, Tensor]:
    """Return a layer after some training on scikit-learn's digits, and samples of these."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.from_numpy(digits.data).float() / 16
    labels = torch.from_numpy(digits.target)
    layer, head = MonotoneDense(64, 512, tolerance=1e-2), nn.Linear(512, 10)
    optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()], lr=3e-3)
    for _ in range(steps):
        rows = torch.randint(len(images), (batch,))
        optimizer.zero_grad()
        F.cross_entropy(head(layer(images[rows])), labels[rows]).backward()
        optimizer.step()
    made = MonotoneDense(64, 512, tolerance=1e-5, max_steps=500)
    made.load_state_dict(layer.state_dict())
    return made, images[:batch]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=128)
    batch = parser.parse_args().batch
    torch.set_num_threads(1)
    print("| network | authors' | ours | ratio | their steps | our steps | largest difference |")
    print("|---|---|---|---|---|---|---|")
    tolerance = 1e-5
    for margin, size in ((1.0, 1.0), (0.1, 1.0), (1.0, 2.0), (1.0, 4.0)):
        torch.manual_seed(0)
        layer = MonotoneDense(784, 512, margin, tolerance=tolerance, max_steps=500)
        with torch.no_grad():
            layer.cell.operator.A.mul_(size)
            layer.cell.operator.B.mul_(size)
        x = torch.randn(batch, 784)
        name = f"dense, 512, m = {margin:g}, {size:g} times torch's weights"
        compare(name, layer, DenseContestant(layer, tolerance), x)
    layer, x = trained(batch)
    compare("dense, 512, m = 1, trained on digits", layer, DenseContestant(layer, tolerance), x)
    for size in (1.0, 8.0):
        torch.manual_seed(0)
        layer = MonotoneConv2d(3, 81, padding="circular", tolerance=tolerance, max_steps=500)
        with torch.no_grad():
            layer.cell.operator.size_A.fill_(size)
            layer.cell.operator.size_B.fill_(size)
        x = torch.randn(batch // 4, 3, 16, 16)
        name = f"convolution, 81 channels, 16 x 16, batch {batch // 4}, kernels of norm {size:g}"
        compare(name, layer, ConvolutionContestant(layer, tolerance), x)


if __name__ == "__main__":
    main()
