"""The convex function that the equilibrium of a one-layer OptEq minimises."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equipoise.core.errors import ConvergenceError
from equipoise.core.tree import row_norm, to_numpy
from equipoise.core.validate import require_fraction
from equipoise.families.opteq.conjugate import envelope, objective_value
from equipoise.families.opteq.deep_objective import DeepObjective
from equipoise.families.opteq.layer_problem import LayerProblem, OptEqProblem, state_layers
from equipoise.families.opteq.potential import Potential
from equipoise.layers import Descent
from equipoise.prox import HardTanh, Identity, ReLU
from equipoise.solvers import Newton, Stop, Trace, solve

__all__ = ["Objective", "QuadraticProgram", "state_problem"]


def state_problem(
    potentials: Sequence[Potential], alphas: Sequence[float]
) -> Objective | DeepObjective:
    """Return what the equilibria of one or several layers at one input solve.

    Args:
        potentials: The layers; each must have `mu >= L_s |W|^2`.
        alphas: Their fractions of the new value.
    """
    statement = state_layers(potentials, alphas)
    return Objective(statement) if len(potentials) == 1 else DeepObjective(statement)


@dataclass(frozen=True)
class QuadraticProgram:
    """Minimise `q^T P q/2 - c^T q` over `lower <= q <= upper` (OptEq, eq. 4).

    The layer's equilibrium is then `back @ q`.

    Attributes:
        P: `I - W W^T/mu`, shape (n, n), positive semidefinite.
        c: `U x + b`, shape (n,).
        lower: Lower bound of every entry of `q`, which may be minus infinity.
        upper: Upper bound of every entry of `q`, which may be infinity.
        back: `W^T/mu`, shape (m, n).
    """

    P: np.ndarray
    c: np.ndarray
    lower: float
    upper: float
    back: np.ndarray


class Objective(OptEqProblem):
    """The convex function that an OptEq of one layer minimises (OptEq, Theorem 1 and Table 1).

    It is `phi = psi* - |.|^2/2`.

    `psi(z) = (1/mu) 1^T S(W z + c)` with `c = U x + b` and the potential `S` of the activation; the
    layer without its skip connection, `f(z) = (1/mu) W^T s(W z + c)`, is the gradient of `psi` and
    the proximal map of `phi`. States are those of the layer everywhere, shape (batch, ...); numbers
    have shape (batch,).

    A skip connection, `alpha < 1`, replaces `phi` by `alpha M_phi^(1 - alpha)`, whose minimisers
    are the same: `value` is that of `phi` itself, and `alpha * envelope(z, 1 - alpha)` that of the
    skip's. A change of variable makes it `phi(A(z))`.

    A regulariser `T_R` before the layer adds `gamma R` if it makes gradient steps (Theorem 4), and
    the Moreau envelope of `gamma R`, which is another function, if it is a proximal map. It acts on
    the layer with its skip connection, so the sum is `alpha M_phi^(1 - alpha) + gamma R`:
    minimisers of `phi + gamma R` are found with `alpha = 1`. Inside a change of variable by a
    multiple `s` of an orthogonal map it is `s^2 gamma R`. If the regulariser couples the samples,
    values are one number for the batch: the sum over the samples plus the regulariser's.

    Made by `objective`.
    """

    def __init__(self, statement: LayerProblem) -> None:
        super().__init__(statement)
        (self._potential,) = statement.potentials
        (self._alpha,) = statement.alphas

    @torch.no_grad()
    def value(self, z: Tensor, tolerance: float | None = None) -> Tensor:
        """Return the objective at any `z`, infinite outside of its domain.

        If `W^T` is injective, `phi(z) = (1/mu) (1^T S*(q) - <c, q>) - |z|^2/2` with
        `q = mu (W^T)^+ z`, exactly; otherwise the supremum `psi*(z) = sup_y <z, y> - psi(y)` is
        found numerically; samples for which it is not are NaN, with a `ConvergenceWarning`.

        Args:
            z: A state.
            tolerance: How far from the domain a state may lie by rounding, relative to
                `|z| + |f(z)| + |W^T c|/mu`; its value is then that of a state within this distance.
                By default the square root of the machine epsilon of `z`. The iterates of a solve
                may lie farther out, on the wrong side of the edge of the domain: use `on_step` for
                them.
        """
        w = self._statement.enter(z, "Objective.value.z")
        if self._term is not None and self._alpha < 1:
            return self._total(self._alpha * envelope(self._potential, w, 1 - self._alpha), w)
        tolerance = math.sqrt(torch.finfo(z.dtype).eps) if tolerance is None else tolerance
        return self._total(objective_value(self._potential, w, tolerance), w)

    @torch.no_grad()
    def step(self, y: Tensor) -> Tensor:
        """Return `f(y)`, the proximal map of `phi`.

        With a regulariser, the layer's whole step, skip connection included.
        """
        return self._statement.leave(self._step(self._statement.enter(y, "Objective.step.y")))

    def _step(self, w: Tensor) -> Tensor:
        if self._term is None:
            return self._potential.prox(w)
        return torch.lerp(w := self._term.step(w), self._potential.prox(w), self._alpha)

    @torch.no_grad()
    def on_step(self, y: Tensor) -> Tensor:
        """Return the value at `step(y)`, for one inner product and no search.

        That is `f(y)`, the layer's next state without its skip connection, and with it only if
        there is a regulariser.

        `phi(f(y)) = <f(y), y> - psi(y) - |f(y)|^2/2`, by Fenchel and Young's equality. It is finite
        for every `y`.
        """
        w = self._statement.enter(y, "Objective.on_step.y")
        if self._term is None:
            return self._potential.at_step(w)
        before = self._term.step(w)
        jump = (self._potential.prox(before) - before).square().sum(dim=1)
        # The envelope at alpha f(y) + (1 - alpha) y is attained at f(y).
        own = self._alpha * (self._potential.at_step(before) + (1 - self._alpha) / 2 * jump)
        return self._total(own, self._step(w))

    @torch.no_grad()
    def merit(self, z: Tensor) -> Tensor:
        """Return the merit function `h(z) = |z|^2/2 - psi(z)`, the Moreau envelope `M_phi^1`.

        It is finite and smooth and has the minimisers of `phi`.

        Its gradient is `z - f(z)`. With a regulariser `g`, the forward-backward envelope of the sum
        (Patrinos & Bemporad, 2013), `alpha h(z - grad g(z)) + g(z) - |grad g(z)|^2/2`, which equals
        the objective at its minimisers.
        """
        w = self._statement.enter(z, "Objective.merit.z")
        if self._term is None:
            return self._potential.merit(w)
        before = self._term.step(w)
        return self._total(
            self._alpha * self._potential.merit(before) - (w - before).square().sum(dim=1) / 2, w
        )

    @torch.no_grad()
    def envelope(self, z: Tensor, t: float) -> Tensor:
        """Return the Moreau envelope `M_phi^t(z) = min_u phi(u) + |u - z|^2/(2 t)`.

        `phi` is taken without a regulariser.

        Args:
            z: A state; after a change of variable the envelope is taken at `A(z)`.
            t: In (0, 1]; 1 gives the merit function.
        """
        require_fraction("Objective.envelope.t", t)
        return envelope(self._potential, self._statement.enter(z, "Objective.envelope.z"), t)

    @torch.no_grad()
    def minimizer_gap(self, z: Tensor) -> Tensor:
        """Return `|step(z) - z|` for each sample, zero exactly at the minimisers."""
        w = self._statement.enter(z, "Objective.minimizer_gap.z")
        return row_norm((self._statement.leave(self._step(w)) - z).flatten(1))

    @torch.no_grad()
    def minimizer(self, start: Tensor | None = None) -> Tensor:
        """Return a minimiser to the accuracy of float64, found by Newton's method.

        Args:
            start: A state to begin at; zero by default.
        """
        potential = self._potential
        w = (
            potential.adjoint(torch.zeros_like(potential.c))
            if start is None
            else self._statement.enter(start, "Objective.minimizer.start")
        )
        coupled = self._term is not None and self._term.coupled
        found = solve(
            self._step,
            w,
            Newton(forcing=1e-2, inner_steps=500),
            Stop(1e-13, max_steps=300),
            symmetric=self._term is None,
            coupled=coupled,
        )
        if not bool((found.converged | (found.residual <= 1e-10)).all()):
            raise ConvergenceError(
                f"Objective.minimizer was not found: {found!r}. Start nearer, at the layer's "
                "output."
            )
        return self._statement.leave(found.value)

    def quadratic_program(self, sample: int = 0) -> QuadraticProgram:
        """Return the problem in the hidden values `q = s(W z + c)`, for a check by another solver.

        `q = argmin q^T (I - W W^T/mu) q/2 - c^T q` over `q >= 0`, and `z = W^T q/mu`, for the ReLU
        (OptEq, eq. 4, without its inverse). Hard tanh has the box `|q| <= 1`, identity and matrix
        activation none. After a change of variable `z` is `A(z)`.

        Args:
            sample: The row of the batch.
        """
        boxes = {ReLU: (0.0, math.inf), HardTanh: (-1.0, 1.0), Identity: (-math.inf, math.inf)}
        potential = self._potential
        box = boxes.get(type(potential.activation))
        if box is None:
            raise ValueError(
                "quadratic_program must be asked of a layer with ReLU, HardTanh, Identity or "
                "MatrixActivation; got "
                f"{potential.name}, whose problem is not quadratic."
            )
        if self._term is not None:
            raise ValueError(
                "quadratic_program must be asked of a layer without a regulariser; got one "
                f"that adds {self._term}."
            )
        W = potential.matrix
        if W is None:
            size = potential.shape.numel()
            raise ValueError(
                "quadratic_program must be asked of a small layer; got a convolution on "
                f"states of {size} numbers."
            )
        P = torch.eye(len(W), dtype=W.dtype, device=W.device) - W @ W.T / potential.mu
        return QuadraticProgram(
            to_numpy(P), to_numpy(potential.c[sample]), *box, back=to_numpy(W.T / potential.mu)
        )

    def along(self, states: Sequence[Tensor]) -> Descent:
        """Return how objective, merit function and residual went along `states`."""
        residual = [self.minimizer_gap(z) / row_norm(self.step(z).flatten(1)) for z in states]
        return self._descent(states, torch.stack(residual))

    def descent(self, trace: Trace | None) -> Descent:
        """Return how a solve went down, with the residuals of the solve itself.

        The trace is `layer.last.trace` of a solve with `trace=True`.
        """
        if not isinstance(trace, Trace):
            got = type(trace).__name__
            raise ValueError(
                f"Objective.descent.trace must be the path of a solve; got {got}. Call "
                "layer(x, trace=True) first."
            )
        return self._descent(trace.state, trace.residual)

    def _descent(self, states: Sequence[Tensor], residual: Tensor) -> Descent:
        value, merit = (torch.stack([one(z) for z in states]) for one in (self.on_step, self.merit))
        rows = len(value)
        return Descent(
            value=to_numpy(value.reshape(rows, -1)),
            residual=to_numpy(residual.detach().double()),
            merit=to_numpy(merit.reshape(rows, -1)),
        )

    def _total(self, own: Tensor, w: Tensor) -> Tensor:
        """The layer's part and the regulariser's."""
        if self._term is None:
            return own
        return (own.sum() if self._term.coupled else own) + self._term.value(w)

    @property
    def title(self) -> str:
        """The problem in a few words."""
        own, skip = self._own()
        return (
            f"minimise {own}{'' if self._term is None else f' + {self._term}'}: "
            f"{self._potential.name}, {self._size()}"
            + (
                f", {modulus:.3g}-strongly convex"
                if (modulus := self._potential.modulus(skip)) > 0
                else ""
            )
        )

    def describe(self) -> str:
        """Return the problem in sentences."""
        potential, term, changes = self._potential, self._term, self._statement.changes
        own, skip = self._own()
        mu = "" if potential.mu == 1 else f"(1/{potential.mu:g}) "
        lines = [
            f"The equilibrium minimises {own}{'' if term is None else f' + {term}'} over z, "
            "where phi(z) = psi*(z) - |z|^2/2, "
            f"psi(z) = {mu}sum S(W z + c) and S' = {potential.name}."
        ]
        if skip < 1:
            lines.append(
                f"M_phi^{1 - skip:.3g} is the Moreau envelope of phi, which the skip "
                "connection makes of it."
            )
        if changes:
            lines.append("A is the layer's change of variable.")
        modulus = potential.modulus(skip)
        lines.append(
            f"{self._size()} with L_s |W|^2/mu <= {potential.smoothness:.3g}, so that "
            f"{own.split('(')[0]} is "
            + (f"{modulus:.3g}-strongly convex" if modulus > 0 else "convex")
            + self._conclusion(modulus)
        )
        return " ".join(lines)

    def _conclusion(self, modulus: float) -> str:
        convex = True if self._term is None else self._term.change.regularizer.convex
        if not convex:
            unknown = "is not convex" if convex is False else "may not be convex"
            return (
                f"; the regulariser {unknown}, so that an equilibrium is a stationary "
                "point, perhaps one of several."
            )
        return (
            " and the minimiser is unique." if modulus > 0 else "; there may be several minimisers."
        )

    def _own(self) -> tuple[str, float]:
        """The layer's term of the objective, and the fraction of the new value in it."""
        at = "A(z)" if self._statement.changes else "z"
        skip = 1.0 if self._term is None else self._alpha
        return (f"phi({at})" if skip == 1 else f"{skip:g} M_phi^{1 - skip:.3g}({at})"), skip

    def _size(self) -> str:
        if self._potential.matrix is not None:
            rows, columns = self._potential.matrix.shape
            return f"W is {rows} x {columns}"
        return (
            f"W maps {self._potential.shape.numel()} to "
            f"{self._potential.inner_shape.numel()} numbers"
        )

    def __repr__(self) -> str:
        return f"Objective({self.title})"
