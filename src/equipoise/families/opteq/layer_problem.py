"""Which problem a layer solves: proximal maps, and what wrappers make of them (OptEq, Table 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from equipoise.families.opteq.potential import Potential
from equipoise.layers import ChangeOfVariable, Problem, Regularized
from equipoise.prox import AbsoluteSum, NuclearNorm, SquaredNorm

__all__ = ["LayerProblem", "OptEqProblem", "Term", "state_layers"]

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
        """Return `w - grad(term)(w)`: the operation `T_R` in the innermost coordinates."""
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
        return math.prod(change.stretch**2 for change in self.inner)

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
class LayerProblem:
    """A layer's problem at one input.

    Attributes:
        potentials: The layers `f_1, ..., f_L`.
        alphas: Their fractions of the new value; for one layer together with those of skips that
            the regulariser sees.
        term: What a regulariser adds, if there is one.
        changes: All changes of variable, outermost first: `w = A(z)` is the innermost cell's state.
        skipped: Whether there is a skip connection around the layers.
    """

    potentials: tuple[Potential, ...]
    alphas: tuple[float, ...]
    term: Term | None = None
    changes: tuple[ChangeOfVariable, ...] = ()
    skipped: bool = False

    def enter(self, z: Tensor, owner: str) -> Tensor:
        """Return a state of the layer as one of the innermost cell, in float64 and flat."""
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

    def refuse_unknown(self) -> None:
        """Raise if nothing is known of the problem with a regulariser outside of everything."""
        problem = ""
        if self.term is not None:
            problem = (
                "a second Regularized outside of a first; add the two functions to one regulariser"
            )
        elif not all(change.conformal for change in self.changes):
            problem = (
                "Regularized outside of a ChangeOfVariable that is no multiple of an "
                "orthogonal map; put it inside"
            )
        elif self.skipped and len(self.alphas) > 1:
            problem = (
                "Regularized outside of a Skip around several layers; put it inside, or "
                "give the layers themselves a smaller alpha"
            )
        if problem:
            raise ValueError(
                f"objective.layer must be built so that its objective is known; got {problem}."
            )


def state_layers(potentials: Sequence[Potential], alphas: Sequence[float]) -> LayerProblem:
    """Return the problem of layers at one input, without wrappers around them.

    Args:
        potentials: The layers; each must have `mu >= L_s |W|^2`, or it is not a proximal map.
        alphas: Their fractions of the new value.
    """
    for number, potential in enumerate(potentials, start=1):
        potential.sharpen()
        if not potential.smoothness <= 1 + 100 * potential.epsilon:
            needed, mu = potential.smoothness * potential.mu, potential.mu
            sign = "<=" if potential.matrix is None else "="
            # The layer that forgets the state is how to_opteq begins.
            converted = (
                " A network made by to_opteq computes what it was made from, with weights of any "
                "norm (Lemma 2); it minimises nothing."
            )
            raise ValueError(
                "objective.layer must have mu >= L_s |W|^2 in each of its layers, or it is "
                "not a proximal map (OptEq, Theorem 1); "
                f"got L_s |W|^2 {sign} {needed:.6g} for mu = {mu:.6g} in layer {number}. "
                f"Use norm='scale', or mu={math.ceil(100 * needed) / 100}."
                + (converted if potentials[0].smoothness == 0 else "")
            )
    return LayerProblem(tuple(potentials), tuple(alphas))


class OptEqProblem(Problem):
    """What the problems of one and of several layers share: what wrappers make of them.

    Skips leave the fixed points as they are, but a regulariser outside of a skip sees
    `alpha M_phi^(1 - alpha)`. Refused, because no objective is known: two regularisers (the second
    acts on the first one's step), a regulariser outside of a change of variable that is not
    conformal (it would need `A^T A grad R` to be a gradient), and one outside of a skip around
    several layers.
    """

    def __init__(self, statement: LayerProblem) -> None:
        self._statement = statement
        self._term = statement.term

    def skipped(self, alpha: float) -> Self:
        own = self._statement
        if own.term is not None:
            return self
        several = len(own.alphas) > 1
        alphas = own.alphas if several else (own.alphas[0] * alpha,)
        return type(self)(replace(own, alphas=alphas, skipped=True))

    def changed(self, change: ChangeOfVariable) -> Self:
        own = self._statement
        term = None if own.term is None else replace(own.term, outer=True)
        return type(self)(replace(own, changes=(change, *own.changes), term=term))

    def regularized(self, wrapper: Regularized) -> Self:
        own = self._statement
        own.refuse_unknown()
        term = Term(wrapper, own.changes, own.potentials[0].shape)
        return type(self)(replace(own, term=term))
