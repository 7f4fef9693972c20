"""The monotone inclusion that the equilibrium of an OptEq of several layers solves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from equipoise.core.tree import row_norm
from equipoise.families.opteq.conjugate import envelope, invert, objective_value
from equipoise.families.opteq.layer_problem import LayerProblem, OptEqProblem
from equipoise.layers.certificate import averaged

__all__ = ["DeepObjective", "WideLimit"]


class WideLimit(NamedTuple):
    """The problem of the wide network at a point.

    Attributes:
        value: `sum_l h_l(y)`, shape (batch,).
        residual: Norm of its gradient `sum_l (y - f_l(y))`, shape (batch,).
    """

    value: Tensor
    residual: Tensor


class DeepObjective(OptEqProblem):
    """The problem of an OptEq of several layers (OptEq, Theorem 2).

    `z = F_L o ... o F_1(z)` with `F_l = alpha_l f_l + (1 - alpha_l) I`.

    Its blocks `z_l = F_l(z_(l-1))`, with `z_0 = z_L` last, solve `0 in dPhi(z~) + (I - P) z~`,
    where `P` hands every layer the block before it, `(P z~)_l = z_(l-1)`, and
    `Phi(z~) = sum_l alpha_l M_(phi_l)^(1 - alpha_l)(z_l)`; `alpha_l = 1` means `phi_l` itself. `P`
    is not symmetric for more than two layers, so there is no function that the blocks minimise.

    **With a regulariser** the first layer is `z_1 = F_1(T_R(z_0))`, and the inclusion gains
    `z_0 - T_R(z_0)`, which is `gamma grad R(z_0)` for a gradient step, *in the row of the first
    block*. OptEq v3 (after Theorem 4) writes `Phi + R(z_L)`, which would have it in the row of the
    last block: the two agree for one layer only. With a proximal map `T_R` is a layer like the
    others: `gamma R(z_R)` joins `Phi` at a block of its own, `z_R = T_R(z_0)`.

    Blocks are in the coordinates of the innermost cell: after a change of variable the last one is
    `A(z)`. Numbers have shape (batch,). Made by `objective`.
    """

    def __init__(self, statement: LayerProblem) -> None:
        super().__init__(statement)
        self._potentials = statement.potentials

    @property
    def alphas(self) -> tuple[float, ...]:
        """The fraction of the new value in each layer."""
        return self._statement.alphas

    @torch.no_grad()
    def blocks(self, z: Tensor) -> list[Tensor]:
        """Return `[z_1, ..., z_(L-1), z_0]` for the layer's state `z` (OptEq, Lemma 3)."""
        last = self._statement.enter(z, "DeepObjective.blocks.z")
        found, w = [], last if self._term is None else self._term.step(last)
        for layer in range(len(self._potentials) - 1):
            w = self._layer(layer, w)
            found.append(w)
        return [self._shaped(w) for w in [*found, last]]

    @torch.no_grad()
    def blockwise(self, blocks: Sequence[Tensor]) -> list[Tensor]:
        """Return the right-hand side of the one-layer equation that the blocks solve.

        OptEq v1, eq. 6; Lemma 3.

        `alpha W~^T s(W~ P z~ + U~ x + b~) + (1 - alpha) P z~`, with `W~` block diagonal: layer `l`
        acts on the block before it.
        """
        before = self._before(self._rows(blocks))
        return [self._shaped(self._layer(layer, w)) for layer, w in enumerate(before)]

    @torch.no_grad()
    def value(self, blocks: Sequence[Tensor], tolerance: float | None = None) -> Tensor:
        """Return `Phi(z~) = sum_l alpha_l M_(phi_l)^(1 - alpha_l)(z_l)`, without the regulariser.

        Args:
            blocks: As `blocks` returns them.
            tolerance: For layers with `alpha_l = 1`, as for `Objective.value`.
        """
        rows = self._rows(blocks)
        tolerance = self._tolerance(blocks) if tolerance is None else tolerance
        total = torch.zeros_like(rows[0][:, 0])
        for potential, alpha, w in zip(self._potentials, self.alphas, rows, strict=True):
            total += (
                alpha * envelope(potential, w, 1 - alpha)
                if alpha < 1
                else objective_value(potential, w, tolerance)
            )
        return total

    @torch.no_grad()
    def regularization(self, z: Tensor) -> Tensor:
        """Return the regulariser's term at the layer's state; zeros without one.

        That is `gamma R(z)`, or its Moreau envelope.

        One number for the batch if it couples the samples. It is no part of `Phi`; see the class.
        """
        w = self._statement.enter(z, "DeepObjective.regularization.z")
        return torch.zeros_like(w[:, 0]) if self._term is None else self._term.value(w)

    @torch.no_grad()
    def inclusion(self, blocks: Sequence[Tensor]) -> Tensor:
        """Return the distance of 0 from `dPhi(z~) + (I - P) z~` (OptEq, Theorem 2).

        It is zero exactly at equilibria.

        Each layer is inverted: `dPhi_l(z_l) = F_l^-1(z_l) - z_l`, one vector if `alpha_l < 1`. If
        `alpha_l = 1` it is the set of all `y - z_l` with `f_l(y) = z_l`, of which the nearest is
        taken, up to the square root of the machine epsilon; the distance is infinite if there is
        none, to within `eps^(1/4) |z_l|`. With a regulariser, `z_0 - T_R(z_0)` joins the first row.
        """
        rows = self._rows(blocks)
        parts = []
        for potential, alpha, w, before in zip(
            self._potentials, self.alphas, rows, self._before(rows), strict=True
        ):
            if alpha < 1:
                parts.append(row_norm(invert(potential, w, 1 - alpha, before) - before))
                continue
            t = self._tolerance(blocks)
            distance = torch.full_like(w[:, 0], math.inf)
            inside = objective_value(potential, w, t).isfinite()
            part, w, before = potential.select_rows(inside), w[inside], before[inside]
            # As t tends to 0, the solution of (1 - t) f(y) + t y = (1 - t) z_l + t z_(l-1) tends to
            # the nearest y with f(y) = z_l.
            y = invert(part, (1 - t) * w + t * before, t, before)
            reached = row_norm(part.prox(y) - w) <= math.sqrt(t) * row_norm(w)
            distance[inside] = torch.where(reached, row_norm(y - before), math.inf)
            parts.append(distance)
        return torch.stack(parts).square().sum(dim=0).sqrt()

    @torch.no_grad()
    def two_blocks(self, z1: Tensor, z0: Tensor) -> Tensor:
        """Return the function that the two blocks of an equilibrium minimise.

        OptEq, Corollary 1.

        `alpha_1 M_(phi_1)^(1 - alpha_1)(z_1) + alpha_2 M_(phi_2)^(1 - alpha_2)(z_0)
        + |z_1 - z_0|^2/2`; the two `alpha` need not be equal, since the gradient of each layer's
        term is `F_l^-1 - I` whatever its `alpha_l`.
        """
        if len(self._potentials) != 2 or self._term is not None:
            got = f"{len(self._potentials)} layers" + (
                " and a regulariser" if self._term is not None else ""
            )
            raise ValueError(
                f"two_blocks must be asked of two layers without a regulariser; got {got}, "
                "whose blocks minimise no function. "
                "Use inclusion."
            )
        first, last = self._rows([z1, z0])
        return self.value([z1, z0]) + (first - last).square().sum(dim=1) / 2

    @torch.no_grad()
    def wide_limit(self, y: Tensor) -> WideLimit:
        """Return the problem that all blocks solve in the limit of small `alpha`.

        OptEq, Theorem 3.

        `sum_l phi_l(x_l) + |x_l - y|^2/2`, minimised over the `x_l`, is `sum_l h_l(y)`,
        `h_l(y) = |y|^2/2 - psi_l(y)`, with the gradient `L y - sum_l f_l(y)`. If the `alpha_l`
        differ and shrink together, each term has the weight of its `alpha_l` in units of their
        mean.
        """
        if self._term is not None:
            raise ValueError(
                "wide_limit must be asked of layers without a regulariser, whose step would "
                "not shrink with alpha."
            )
        w = self._statement.enter(y, "DeepObjective.wide_limit.y")
        mean = sum(self.alphas) / len(self.alphas)
        value, slope = torch.zeros_like(w[:, 0]), torch.zeros_like(w)
        for potential, alpha in zip(self._potentials, self.alphas, strict=True):
            value += alpha / mean * potential.merit(w)
            slope += alpha / mean * (w - potential.prox(w))
        return WideLimit(value, row_norm(slope))

    def describe(self) -> str:
        """Return the problem in sentences."""
        count = len(self._potentials)
        fractions = sorted({f"{alpha:.3g}" for alpha in self.alphas})
        factor = math.prod(
            averaged(own.smoothness, alpha)
            for own, alpha in zip(self._potentials, self.alphas, strict=True)
        )
        lines = [
            f"The {count} blocks z_l = F_l(z_(l-1)) of an equilibrium solve 0 in dPhi(z~) + "
            "(I - P) z~, where P shifts the blocks "
            "by one and Phi is the sum of the Moreau envelopes alpha M_phi_l^(1-alpha)(z_l), "
            f"alpha = {', '.join(fractions)}, of "
            "convex functions phi_l "
            f"({', '.join(potential.name for potential in self._potentials)})."
        ]
        if self._term is not None:
            kind = "The proximal map" if self._term.change.by_prox else "A gradient step"
            lines.append(f"{kind} of {self._term.formula} stands before the first layer.")
        elif count == 2:
            lines.append("For two layers, the pair (z_1, z_0) minimises Phi + |z_1 - z_0|^2/2.")
        else:
            lines.append(
                "For small alpha all blocks come near to the minimiser of the sum of the "
                "|y|^2/2 - psi_l(y)."
            )
        known = f"contract by a factor of {factor:.3g}" if factor < 1 else "do not expand"
        lines.append(
            f"The layers together {known}"
            + (": the equilibrium is unique." if factor < 1 and self._term is None else ".")
        )
        return " ".join(lines)

    def __repr__(self) -> str:
        return (
            f"DeepObjective({len(self._potentials)} layers, alpha = "
            f"{', '.join(f'{alpha:.3g}' for alpha in self.alphas)})"
        )

    def _layer(self, layer: int, w: Tensor) -> Tensor:
        return torch.lerp(w, self._potentials[layer].prox(w), self.alphas[layer])

    def _before(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """What each layer gets: the block before its own.

        The first one gets the last block after the regulariser's step.
        """
        return [rows[-1] if self._term is None else self._term.step(rows[-1]), *rows[:-1]]

    def _shaped(self, w: Tensor) -> Tensor:
        return w.reshape(-1, *self._potentials[0].shape)

    def _rows(self, blocks: Sequence[Tensor]) -> list[Tensor]:
        given: object = blocks
        if isinstance(given, Tensor):
            raise ValueError(
                "DeepObjective.blocks must be a list of blocks; got one tensor. Make them of "
                "a state by blocks(z)."
            )
        if len(blocks) != len(self._potentials):
            raise ValueError(
                f"DeepObjective.blocks must be {len(self._potentials)}, one for each layer; "
                f"got {len(blocks)}."
            )
        wanted = (len(self._potentials[0].c), *self._potentials[0].shape)
        for block in blocks:
            if block.shape != wanted:
                raise ValueError(
                    f"DeepObjective.blocks must be states of shape {wanted}; got "
                    f"{tuple(block.shape)}."
                )
        return [block.detach().double().flatten(1) for block in blocks]

    @staticmethod
    def _tolerance(blocks: Sequence[Tensor]) -> float:
        return math.sqrt(max(torch.finfo(block.dtype).eps for block in blocks))
