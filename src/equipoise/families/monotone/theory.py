"""What is proved of monotone operator networks, and what their equilibria solve."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from equipoise.layers.cell import Cell
from equipoise.layers.certificate import Certificate, Link, Statement
from equipoise.layers.lipschitz import reciprocal_up, round_up
from equipoise.layers.problem import Problem
from equipoise.operators import convolution_bound, dense_norm
from equipoise.prox.activation import Activation

__all__ = ["Inclusion", "certify_monotone", "input_bound"]


@dataclass(frozen=True)
class Inclusion(Problem):
    """`0 in (I - W) z - U x - b + dphi(z)`, with `s = prox_phi` (Winston & Kolter, Theorem 1).

    Args:
        margin: The margin `m` of `I - W >= m I`.
        activation: `s`.
    """

    margin: float
    activation: Activation

    def describe(self) -> str:
        return (
            "The equilibrium is the one zero of the monotone operator (I - W) z - U x - b + "
            f"dphi(z), where {type(self.activation).__name__} is the proximal map of phi and "
            f"I - W >= {self.margin:g} I. No function falls along the way, because W is not "
            "symmetric."
        )


def input_bound(inputs: nn.Module) -> float | None:
    """Return a proven bound of `|U|`, for `x -> U x + b`; None where none is known."""
    if isinstance(inputs, nn.Linear):
        return float(dense_norm(inputs.weight.detach().double()))
    if isinstance(inputs, nn.Conv2d):
        return float(convolution_bound(inputs.weight.detach().double(), groups=inputs.groups))
    return None


def certify_monotone(
    cell: Cell, margin: float, factor: float, inputs: nn.Module, basis: str
) -> Certificate:
    """Return the certificate of a cell.

    Args:
        cell: The cell.
        margin: `m`.
        factor: A bound of the step's Lipschitz constant.
        inputs: `x -> U x + b`.
        basis: What the step is.
    """
    norm = input_bound(inputs)
    response = reciprocal_up(margin)
    statements = [
        Statement(
            "I - W is strongly monotone, so that there is one equilibrium for every input",
            holds=True,
            number=margin,
            margin=margin,
            theorem="Winston & Kolter, 2020, Theorem 1",
            unique=True,
        ),
        Statement(
            "the equilibrium is Lipschitz continuous in U x + b with the constant 1/m",
            holds=True,
            number=response,
            theorem="Pabbaraju, Winston & Kolter, 2021, Theorem 1",
        ),
    ]
    if norm is not None:
        statements.append(
            Statement(
                "the equilibrium is Lipschitz continuous in x with the constant |U|/m",
                holds=True,
                number=round_up(norm * response),
                theorem="Pabbaraju, Winston & Kolter, 2021, Theorem 1",
            )
        )
    known = factor if math.isfinite(factor) else math.inf
    return Certificate((Link(type(cell).__name__, known),), further=tuple(statements), basis=basis)
