"""Which problem a layer stands for: its proximal maps, and what the changes around them do to it (OptEq, Table 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from equipoise.families.opteq.cell import OptEqCell
from equipoise.families.opteq.layer import OptEqLayer
from equipoise.families.opteq.potential import Potential
from equipoise.layers import Cell, ChangeOfVariable, Equilibrium, Regularized, Skip
from equipoise.prox import AbsoluteSum, NuclearNorm, SquaredNorm

__all__ = ["Reading", "Term", "changes_of", "read", "require_finite", "stretch"]

FORMULAS: dict[type, str] = {
    SquaredNorm: "|z|^2/2",
    AbsoluteSum: "|z|_1",
    NuclearNorm: "|z|_* (nuclear norm)",
}


@dataclass(frozen=True)
class Term:
    """What a regulariser adds to the problem, as a function of the innermost cell's state `w`.

    `gamma R(z)` for a gradient step (OptEq, Theorem 4), and the Moreau envelope `M_(gamma R)(z)`
    for the proximal map. Under a change of variable `w = A(z)`, `A` a multiple `s` of an orthogonal
    map plus a shift, the term is multiplied by `s^2`: the layer `A^-1 o prox_phi o A` is the
    proximal map of `phi o A/s^2`.

    Args:
        change: The regulariser's place.
        inner: The changes of variable between it and the innermost cell, outermost first.
        shape: The shape of one state.
        outer: Whether there are changes of variable around the regulariser, too.
    """

    change: Regularized
    inner: tuple[ChangeOfVariable, ...]
    shape: torch.Size
    outer: bool = False

    @property
    def coupled(self) -> bool:
        """Whether the term is one number for the whole batch."""
        return self.change.regularizer.coupled

    def value(self, w: Tensor) -> Tensor:
        """Return the term, shape (batch,), or () if it couples the samples."""
        z, gamma, R = self._there(w), self.change.strength, self.change.regularizer
        value = R.envelope(z, gamma) if self.change.by_prox else gamma * R.value(z)
        return self._factor * value

    def step(self, w: Tensor) -> Tensor:
        """Return `w - grad(term)(w)`, which is the regulariser's operation `T_R` in the innermost coordinates."""
        z = self.change.operate(self._there(w))
        for change in self.inner:
            z = change.change(z)
        return z.flatten(1)

    def _there(self, w: Tensor) -> Tensor:
        z = w.reshape(-1, *self.shape)
        for change in reversed(self.inner):
            z = change.invert(z)
        return z

    @property
    def _factor(self) -> float:
        return math.prod(stretch(change)[1] ** 2 for change in self.inner)

    @property
    def formula(self) -> str:
        """The regulariser, to be read by people."""
        R = self.change.regularizer
        factor = self.change.strength * (1 if self.change.by_prox else self._factor)
        return f"{factor:.3g} {FORMULAS.get(type(R), f'{type(R).__name__}(z)')}"

    def __str__(self) -> str:
        times = "" if self._factor == 1 else f"{self._factor:.3g} times "
        own = (
            f"{times}the Moreau envelope of {self.formula}" if self.change.by_prox else self.formula
        )
        return f"{own}, taken at the changed variable" if self.outer else own


@dataclass(frozen=True)
class Reading:
    """A layer's problem at one input.

    Attributes:
        potentials: The layers `f_1, ..., f_L`.
        alphas: Their shares of the new value; for one layer together with those of skips that the
            regulariser sees.
        term: What a regulariser adds, if there is one.
        changes: All changes of variable, outermost first: `w = A(z)` is the innermost cell's state.
    """

    potentials: tuple[Potential, ...]
    alphas: tuple[float, ...]
    term: Term | None
    changes: tuple[ChangeOfVariable, ...]

    def enter(self, z: Tensor, owner: str) -> Tensor:
        """Return a state of the layer as one of the innermost cell: float64, one row for each sample."""
        first = self.potentials[0]
        wanted = (len(first.c), *first.shape)
        if not isinstance(z, Tensor) or z.shape != wanted:
            got = f"shape {tuple(z.shape)}" if isinstance(z, Tensor) else type(z).__name__
            raise ValueError(f"{owner} must be a state of shape {wanted}; got {got}.")
        z = z.detach().double()
        for change in self.changes:
            z = change.change(z)
        return z.flatten(1)

    def leave(self, w: Tensor) -> Tensor:
        """Return a state of the innermost cell as one of the layer."""
        z = w.reshape(-1, *self.potentials[0].shape)
        for change in reversed(self.changes):
            z = change.invert(z)
        return z


def changes_of(owner: str, layer: Equilibrium) -> tuple[list[Cell], OptEqCell]:
    """Return the changes around an OptEq's cell, innermost first, and the cell; refuse everything else."""
    given: object = layer
    if not isinstance(given, Equilibrium):
        raise ValueError(
            f"{owner}.layer must be an Equilibrium, such as OptEq or OptEqConv2d; got "
            f"{type(given).__name__}. "
            + (
                "Wrap it: Equilibrium(cell)."
                if isinstance(given, Cell)
                else "Give the layer inside it, such as model.equilibrium."
            )
        )
    found: list[Cell] = []
    cell: object = layer.cell
    while isinstance(cell, Skip | ChangeOfVariable | Regularized):
        found.insert(0, cell)
        cell = cell.cell
    if not isinstance(cell, OptEqCell):
        raise ValueError(
            f"{owner}.layer must have an OptEqCell, perhaps within Skip, ChangeOfVariable and "
            "Regularized, as its cell; got "
            f"{type(cell).__name__}, of which nothing is known."
        )
    return found, cell


def require_finite(owner: str, cell: OptEqCell) -> None:
    """Raise if a weight is not finite, of which nothing can be said."""
    for place, operator in enumerate(cell.operators, start=1):
        if not all(bool(weight.isfinite().all()) for weight in operator.parameters()):
            raise ValueError(
                f"{owner}.layer must have finite weights; got NaN or infinity in layer {place}."
            )


def read(layer: Equilibrium, x: Tensor) -> Reading:
    """Return the problem of a layer at the input `x`.

    Skips leave the fixed points as they are, but a regulariser outside of a skip sees
    `alpha M_phi^(1 - alpha)`. Refused, because no objective is known: two regularisers (the second
    acts on the first one's step), a regulariser outside of a change of variable that is not
    conformal (it would need `A^T A grad R` to be a gradient), and one outside of a skip around
    several layers.
    """
    found, cell = changes_of("objective", layer)
    require_finite("objective", cell)
    if isinstance(layer, OptEqLayer):
        layer.check(x)
    with torch.no_grad():
        frozen_layers = cell.frozen_layers(x)
        potentials = tuple(Potential(unit) for unit in frozen_layers)
        alphas = [float(unit.alpha) for unit in frozen_layers]
    for place, (unit, potential) in enumerate(zip(frozen_layers, potentials, strict=True), start=1):
        potential.sharpen()
        if not potential.smoothness <= 1 + 100 * torch.finfo(unit.c.dtype).eps:
            needed, sign = potential.smoothness * unit.mu, "<=" if potential.matrix is None else "="
            raise ValueError(
                "objective.layer must have mu >= L_s |W|^2 in each of its layers, or it is "
                "not a proximal map (OptEq, Theorem 1); "
                f"got L_s |W|^2 {sign} {needed:.6g} for mu = {unit.mu:.6g} in layer {place}. "
                f"Use norm='scale', or mu={math.ceil(100 * needed) / 100}."
            )
    term: Term | None = None
    turns: list[ChangeOfVariable] = []
    skipped = False
    for change in found:
        if isinstance(change, ChangeOfVariable):
            turns.insert(0, change)
        elif isinstance(change, Skip) and term is None:
            skipped = True
            alphas = [alpha * change.alpha for alpha in alphas] if len(alphas) == 1 else alphas
        elif isinstance(change, Regularized):
            _refuse_unknown(term, turns, skipped and len(alphas) > 1)
            term = Term(change, tuple(turns), potentials[0].shape)
    if term is not None and len(turns) > len(term.inner):
        term = replace(term, outer=True)
    return Reading(potentials, tuple(alphas), term, tuple(turns))


def _refuse_unknown(term: Term | None, turns: Sequence[ChangeOfVariable], skipped: bool) -> None:
    problem = ""
    if term is not None:
        problem = (
            "a second Regularized outside of a first; add the two functions to one regulariser"
        )
    elif not all(stretch(turn)[0] for turn in turns):
        problem = (
            "Regularized outside of a ChangeOfVariable that is no multiple of an "
            "orthogonal map; put it inside"
        )
    elif skipped:
        problem = (
            "Regularized outside of a Skip around several layers; put it inside, or "
            "give the layers themselves a smaller alpha"
        )
    if problem:
        raise ValueError(
            f"objective.layer must be built so that its objective is known; got {problem}."
        )


def stretch(change: ChangeOfVariable) -> tuple[bool, float, float]:
    """Return whether a change of variable is conformal, by how much it stretches lengths at most, and its condition number."""
    if change.matrix is None:
        return True, abs(change.scale), 1.0
    values = torch.linalg.svdvals(change.matrix.double())
    most, least = float(values[0]), float(values[-1])
    conformal = most <= least * (1 + 100 * len(values) * torch.finfo(change.matrix.dtype).eps)
    return conformal, abs(change.scale) * most, most / least
