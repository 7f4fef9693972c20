"""Problems whose fate is known: what becomes of plain iteration, and NaN at any moment."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.solvers.protocol import Status

__all__ = [
    "AFFINE",
    "FAMILIES",
    "SYMMETRIC_FAMILIES",
    "Maker",
    "Poison",
    "Sample",
    "draw_batch",
    "stack",
    "step",
]

WIDTH = 4
AFFINE, LOGISTIC, SQUARE, EXPONENTIAL, ROOT, POLE = range(6)


def step(z: Tensor, context: tuple[Tensor, ...]) -> Tensor:
    """Each sample's own map.

    Arguments of the other samples are made harmless, so that no derivative is 0 times infinity.
    """
    kind, A, c, rate = context
    is_a = kind[:, None] == torch.arange(6)
    value = torch.einsum("bij,bj->bi", A, z) + c
    value = torch.where(is_a[:, [LOGISTIC]], rate * z * (1 - z), value)
    value = torch.where(is_a[:, [SQUARE]], z * z, value)
    value = torch.where(
        is_a[:, [EXPONENTIAL]], torch.where(is_a[:, [EXPONENTIAL]], z, 0.0).exp(), value
    )
    value = torch.where(is_a[:, [ROOT]], (torch.where(is_a[:, [ROOT]], z, 2.0) - 1).sqrt(), value)
    return torch.where(is_a[:, [POLE]], 1 / torch.where(is_a[:, [POLE]], z, 1.0), value)


@dataclass(frozen=True)
class Sample:
    """A problem of which it is known how plain iteration ends.

    Attributes:
        family: What it is called.
        fate: How plain iteration ends.
        start: Where it begins.
        kind: Which map it has.
        A: The matrix of an affine map.
        c: Its constant.
        rate: The rate of the logistic map.
    """

    family: str
    fate: Status
    start: Tensor
    kind: int
    A: Tensor
    c: Tensor
    rate: float


class Maker:
    """Draws problems of each family from one seeded generator."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def uniform(self, low: float, high: float) -> float:
        """A number in an interval."""
        return low + (high - low) * float(
            torch.rand((), generator=self.generator, dtype=torch.float64)
        )

    def normal(self, *shape: int) -> Tensor:
        """Normal numbers."""
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def direction(self) -> Tensor:
        """A unit vector."""
        return torch.nn.functional.normalize(self.normal(WIDTH), dim=0)

    def basis(self) -> Tensor:
        """An orthogonal matrix."""
        basis: Tensor = torch.linalg.qr(self.normal(WIDTH, WIDTH))[0]
        return basis

    def affine(
        self, family: str, fate: Status, A: Tensor, c: Tensor, start: Tensor | None = None
    ) -> Sample:
        """A sample `z = A z + c`."""
        return Sample(
            family, fate, self.normal(WIDTH) if start is None else start, AFFINE, A, c, 0.0
        )

    def other(
        self, family: str, fate: Status, kind: int, start: Tensor, rate: float = 0.0
    ) -> Sample:
        """A sample of another kind."""
        nothing = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
        return Sample(family, fate, start, kind, nothing, nothing[0], rate)

    def contraction(self) -> Sample:
        """One fixed point, and every step comes nearer."""
        A = self.normal(WIDTH, WIDTH)
        return self.affine(
            "contraction",
            Status.CONVERGED,
            self.uniform(0, 0.85) * A / torch.linalg.matrix_norm(A, 2),
            self.normal(WIDTH),
        )

    def to_zero(self) -> Sample:
        """A fixed point at zero, where no relative residual is small."""
        return self.affine(
            "to_zero",
            Status.CONVERGED,
            self.uniform(0.1, 0.7) * self.basis(),
            torch.zeros(WIDTH, dtype=torch.float64),
        )

    def at_rest(self) -> Sample:
        """Expansive, but it starts at its fixed point."""
        A, start = 3 * self.basis(), self.normal(WIDTH)
        return self.affine("at_rest", Status.CONVERGED, A, start - A @ start, start)

    def slow_contraction(self) -> Sample:
        """A contraction that takes more steps than it has."""
        return self.affine(
            "slow_contraction",
            Status.MAX_STEPS,
            self.uniform(0.97, 0.995) * self.basis(),
            self.normal(WIDTH),
        )

    def rotation(self) -> Sample:
        """Turns around a fixed point for ever."""
        Q, turn = self.basis(), torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
        for corner in (0, 2):
            angle = self.uniform(0.3, math.pi)
            cos, sin = math.cos(angle), math.sin(angle)
            turn[corner : corner + 2, corner : corner + 2] = torch.tensor(
                [[cos, -sin], [sin, cos]], dtype=torch.float64
            )
        return self.affine("rotation", Status.STALLED, Q @ turn @ Q.T, self.normal(WIDTH))

    def reflection(self) -> Sample:
        """Jumps from one side of a mirror to the other, shifted."""
        v = self.direction()
        mirror = torch.eye(WIDTH, dtype=torch.float64) - 2 * torch.outer(v, v)
        return self.affine(
            "reflection", Status.STALLED, mirror, self.uniform(0.5, 2) * v, v + self.normal(WIDTH)
        )

    def permutation(self) -> Sample:
        """Numbers that change places for ever."""
        order = torch.randperm(WIDTH, generator=self.generator)
        while bool((order == torch.arange(WIDTH)).all()):
            order = torch.randperm(WIDTH, generator=self.generator)
        start = torch.arange(WIDTH, dtype=torch.float64) + self.uniform(1, 3)
        return self.affine(
            "permutation",
            Status.STALLED,
            torch.eye(WIDTH, dtype=torch.float64)[order],
            torch.zeros_like(start),
            start,
        )

    def logistic(self) -> Sample:
        """A cycle of length two."""
        start = torch.tensor([self.uniform(0.15, 0.35) for _ in range(WIDTH)], dtype=torch.float64)
        return self.other("logistic", Status.STALLED, LOGISTIC, start, self.uniform(3.2, 3.4))

    def translation(self) -> Sample:
        """No fixed point: every step is as long as the last."""
        c = self.uniform(0.1, 10) * self.direction()
        return self.affine("translation", Status.STALLED, torch.eye(WIDTH, dtype=torch.float64), c)

    def inconsistent(self) -> Sample:
        """No fixed point: one direction is a translation."""
        Q = self.basis()
        values = torch.tensor(
            [1.0, *(self.uniform(0, 0.5) for _ in range(WIDTH - 1))], dtype=torch.float64
        )
        return self.affine(
            "inconsistent",
            Status.STALLED,
            (Q * values) @ Q.T,
            Q[:, 0] * self.uniform(0.5, 2) + 0.1 * self.normal(WIDTH),
        )

    def slow_expansion(self) -> Sample:
        """Grows by a few percent a step."""
        rate = self.uniform(1.02, 1.3)
        return self.affine(
            "slow_expansion",
            Status.DIVERGED,
            rate * torch.eye(WIDTH, dtype=torch.float64),
            self.normal(WIDTH),
        )

    def spiral(self) -> Sample:
        """Grows while it turns."""
        return self.affine(
            "spiral", Status.DIVERGED, self.uniform(1.05, 1.5) * self.basis(), self.normal(WIDTH)
        )

    def fast_expansion(self) -> Sample:
        """Grows by a large factor."""
        return self.affine(
            "fast_expansion",
            Status.DIVERGED,
            self.uniform(2, 100) * self.basis(),
            self.normal(WIDTH),
        )

    def square(self) -> Sample:
        """Squares numbers above one."""
        start = torch.tensor([self.uniform(1.2, 30) for _ in range(WIDTH)], dtype=torch.float64)
        return self.other("square", Status.DIVERGED, SQUARE, start)

    def exponential(self) -> Sample:
        """Overflows after a few steps."""
        start = torch.tensor([self.uniform(0.95, 1.05) for _ in range(WIDTH)], dtype=torch.float64)
        return self.other("exponential", Status.NONFINITE, EXPONENTIAL, start)

    def root(self) -> Sample:
        """Ends at the root of a negative number."""
        start = torch.tensor([self.uniform(1.5, 3) for _ in range(WIDTH)], dtype=torch.float64)
        return self.other("root", Status.NONFINITE, ROOT, start)

    def pole(self) -> Sample:
        """Divides by zero at once."""
        start = torch.ones(WIDTH, dtype=torch.float64)
        start[0] = 0
        return self.other("pole", Status.NONFINITE, POLE, start)

    def symmetric(
        self, low: float, high: float, family: str, fate: Status, top: float | None = None
    ) -> Sample:
        """A symmetric matrix with eigenvalues in [low, high], the first one `top`."""
        Q = self.basis()
        values = torch.tensor([self.uniform(low, high) for _ in range(WIDTH)], dtype=torch.float64)
        values[0] = values[0] if top is None else top
        return self.affine(family, fate, (Q * values) @ Q.T, Q[:, 0] + 0.1 * self.normal(WIDTH))


FAMILIES: list[Callable[[Maker], Sample]] = [
    Maker.contraction,
    Maker.to_zero,
    Maker.at_rest,
    Maker.slow_contraction,
    Maker.rotation,
    Maker.reflection,
    Maker.permutation,
    Maker.logistic,
    Maker.translation,
    Maker.inconsistent,
    Maker.slow_expansion,
    Maker.spiral,
    Maker.fast_expansion,
    Maker.square,
    Maker.exponential,
    Maker.root,
    Maker.pole,
]
SYMMETRIC_FAMILIES: list[Callable[[Maker], Sample]] = [
    lambda maker: maker.symmetric(0, 0.8, "contraction", Status.CONVERGED),
    lambda maker: maker.symmetric(0.5, 0.999, "slow_contraction", Status.MAX_STEPS),
    lambda maker: maker.symmetric(0, 0.5, "inconsistent", Status.STALLED, top=1.0),
    lambda maker: maker.symmetric(0, 0.5, "expansion", Status.DIVERGED, top=1.2),
    Maker.translation,
    Maker.slow_expansion,
]


def draw_batch(
    seed: int, families: Sequence[Callable[[Maker], Sample]] = FAMILIES, size: int = 50
) -> list[Sample]:
    """Return a mixed batch: every family in turn, in random order."""
    maker = Maker(seed)
    samples = [families[(seed * size + i) % len(families)](maker) for i in range(size)]
    return [samples[i] for i in torch.randperm(size, generator=maker.generator).tolist()]


def stack(samples: Sequence[Sample]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the starts and the context of a batch."""
    return torch.stack([s.start for s in samples]), (
        torch.tensor([s.kind for s in samples]),
        torch.stack([s.A for s in samples]),
        torch.stack([s.c for s in samples]),
        torch.tensor([[s.rate] for s in samples], dtype=torch.float64),
    )


class Poison:
    """The step `z = A z + c`, NaN for one sample from a certain call on.

    Args:
        victim: The number of the sample, as the context gives it.
        call: The first call that gives NaN.

    Attributes:
        struck: Whether it has given NaN.
    """

    def __init__(self, victim: int, call: int) -> None:
        self.victim, self.call, self.calls, self.struck = victim, call, 0, False

    def __call__(self, z: Tensor, context: tuple[Tensor, ...]) -> Tensor:
        number, A, c = context
        value = torch.einsum("bij,bj->bi", A, z) + c
        hit = (number == self.victim) & (self.calls >= self.call)
        self.calls += 1
        self.struck |= bool(hit.any())
        return torch.where(hit[:, None], torch.nan, value)
