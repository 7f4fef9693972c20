"""A family of networks outside of the package: a cell with a theory, and two models of it.

    z = tanh(W z + V x + b),   |W| <= 0.9

The test of outside families copies this file into an empty folder, and uses it from there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from equipoise import Cell, Equilibrium, Model
from equipoise.layers import Certificate, Link, Problem, Statement

BOUND = 0.9


class ToyProblem(Problem):
    """What an equilibrium of the toy cell solves."""

    def describe(self) -> str:
        return "The toy cell balances a spring against a toy force."


class ToyCell(Cell):
    """`z = tanh(W z + V x + b)` with a weight that begins far too large.

    Args:
        inputs: Length of the input.
        width: Length of the state.
        project: Whether the weight is projected.
    """

    def __init__(self, inputs: int, width: int, project: bool) -> None:
        super().__init__()
        self.W = nn.Parameter(3 * torch.eye(width))
        self.V = nn.Linear(inputs, width)
        self._project = project

    @property
    def projects(self) -> bool:
        return self._project

    def inject(self, x: Tensor) -> Tensor:
        return self.V(x)

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return torch.tanh(z @ self.W.T + context)

    def lipschitz(self) -> float:
        return float(torch.linalg.matrix_norm(self.W.detach().double(), 2))

    def certificate(self) -> Certificate:
        bound = self.lipschitz()
        toy = Statement(
            "the toy is stable", bound < 1, bound, 1 - bound, "Toy, Theorem 1", unique=True
        )
        return Certificate(chain=(Link("ToyCell", bound),), further=(toy,))

    def problem(self, x: Tensor) -> Problem:
        return ToyProblem()

    def norms(self) -> dict[str, float]:
        return {"W": self.lipschitz()}

    @torch.no_grad()
    def project_(self) -> None:
        # A little below the bound, so that rounding does not bring it above.
        self.W.mul_(min(1.0, BOUND * (1 - 1e-6) / self.lipschitz()))


class ToyTable(Model):
    """Rows of numbers to classes."""

    def __init__(self, features: int, width: int, num_classes: int, project: bool) -> None:
        super().__init__()
        self.features = features
        self.balance = Equilibrium(ToyCell(features, width, project), on_failure="ignore")
        self.head = nn.Linear(width, num_classes)

    def prepare(self, x: Tensor) -> Tensor:
        if x.dim() != 2 or x.shape[1] != self.features:
            raise ValueError(f"{self.name} takes rows of {self.features} numbers.")
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.balance(x))


class ToySequence(Model):
    """Words to next words, by two equilibria for each word, which see this word and the last."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.first = Equilibrium(ToyCell(2 * width, width, True))
        self.second = Equilibrium(ToyCell(width, width, True))
        self.head = nn.Linear(width, words)

    def prepare(self, x: Tensor) -> Tensor:
        if x.dtype != torch.int64 or x.dim() != 2:
            raise ValueError(f"{self.name} takes rows of words.")
        return x

    def parameter_counts(self) -> dict[str, int]:
        embedded = self.embed.weight.numel()
        return {"embedding": embedded, **super().parameter_counts()}

    def forward(self, x: Tensor) -> Tensor:
        e = self.embed(x)
        last = nn.functional.pad(e, (0, 0, 1, 0))[:, :-1]
        return self.head(self.second(self.first(torch.cat([e, last], dim=2))))


def table(
    *,
    input_shape: Sequence[int] = (2,),
    num_classes: int = 2,
    width: int = 16,
    project: bool = True,
) -> Model:
    """Rows of numbers, by a toy equilibrium."""
    return ToyTable(input_shape[0], width, num_classes, project)


def sequence(*, num_classes: int = 10, width: int = 12) -> Model:
    """Words, by two toy equilibria after each other."""
    return ToySequence(num_classes, width)


def plain(*, input_shape: Sequence[int] = (2,), num_classes: int = 2) -> Model:
    """Rows of numbers, without an equilibrium."""

    class Plain(Model):
        def __init__(self) -> None:
            super().__init__()
            self.map = nn.Sequential(
                nn.Linear(input_shape[0], 16), nn.ReLU(), nn.Linear(16, num_classes)
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.map(x)

    return Plain()
