"""Cells around cells that change the problem behind them (OptEq, Table 1); they compose."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from equipoise.core.registry import choose
from equipoise.core.transforms import is_wrapped
from equipoise.core.validate import (
    SettingError,
    require_finite,
    require_fraction,
    require_positive,
    require_type,
)
from equipoise.layers.belief import (
    certificate_of,
    error_factor_of,
    input_lipschitz_of,
    output_lipschitz_of,
    row_lipschitz_of,
)
from equipoise.layers.cell import Cell
from equipoise.layers.certificate import Certificate, averaged
from equipoise.layers.declarations import (
    contributions_of,
    lipschitz_number,
    norm_limit_of,
    norms_of,
    part_weights_of,
    problem_of,
)
from equipoise.layers.lipschitz import Bound, Chain, Part, round_up, unknown
from equipoise.layers.problem import Problem
from equipoise.prox.regularizer import Regularizer, as_regularizer

__all__ = ["ChangeOfVariable", "Regularized", "Skip", "Wrapper"]

Operation = Literal["auto", "gradient", "prox"]


class Wrapper(Cell):
    """A cell around a cell, which it asks for everything that it does not change."""

    same_equilibria: bool = True  # one to one, so that what is proved of them stays true

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        require_type(f"{type(self).__name__}.cell", cell, Cell, "a Cell")
        self.cell = cell
        self.coupled = cell.coupled

    @property
    def symmetric(self) -> bool:  # type: ignore[override]
        return self.cell.symmetric

    def inject(self, x: Any) -> Any:
        return self.cell.inject(x)

    def initial(self, x: Any, context: Any) -> Any:
        return self.cell.initial(x, context)

    def readout(self, z: Any, context: Any) -> Any:
        return self.cell.readout(z, context)

    def lipschitz(self) -> Tensor | float | None:
        inner = self.cell.lipschitz()
        lipschitz_number(self.cell, inner)  # raises, with the cell's name, if it is no bound
        return None if inner is None else self._through(inner)

    def certificate(self) -> Certificate:
        inner = certificate_of(self.cell)
        known = inner.lipschitz < math.inf
        bound = lipschitz_number(self, self._through(inner.lipschitz)) if known else None
        return inner.through(
            type(self).__name__,
            math.inf if bound is None else bound,
            same_equilibria=self.same_equilibria,
        )

    @property
    def reads_out_the_state(self) -> bool:
        return type(self).readout is Wrapper.readout and self.cell.reads_out_the_state

    def _through(self, lipschitz: Tensor | float) -> Tensor | float | None:
        """The Lipschitz constant of the step, given that of the cell's; None if not known."""
        return lipschitz

    @property
    def projects(self) -> bool:
        return self.cell.projects

    def project_(self) -> None:
        self.cell.project_()

    def norms(self) -> dict[str, float]:
        inner = norms_of(self.cell)
        # The bound of the whole step is the wrapper's own.
        return super().norms() if inner.keys() == {"step"} else inner

    @property
    def norm_limit(self) -> float | None:
        return norm_limit_of(self.cell)

    @property
    def idle_remedy(self) -> str:  # type: ignore[override]
        return self.cell.idle_remedy

    def part_weights(self) -> dict[str, list[Tensor]]:
        return part_weights_of(self.cell)

    def contributions(self, z: Any, context: Any) -> dict[str, float]:
        return contributions_of(self.cell, z, context)


class Skip(Wrapper):
    """`alpha f(z) + (1 - alpha) z`, a skip connection (OptEq, Table 1, row 2).

    It puts the Moreau envelope `alpha M_phi^(1 - alpha)` in place of `phi`.

    The equilibria are the same. The step is strongly monotone and averaged: plain iteration
    converges for nonexpansive maps too.

    Args:
        cell: The cell, with one tensor as its state.
        alpha: Fraction of the new value, in (0, 1].
    """

    def __init__(self, cell: Cell, alpha: float) -> None:
        super().__init__(cell)
        require_fraction("Skip.alpha", alpha)
        self.alpha = alpha

    def step(self, z: Tensor, context: Any) -> Tensor:
        return torch.lerp(z, self.cell.step(z, context), self.alpha)

    def _through(self, lipschitz: Tensor | float) -> Tensor | float:
        return averaged(lipschitz, self.alpha)

    def input_lipschitz(self) -> Part:
        return Chain((input_lipschitz_of(self.cell), Bound("Skip", self.alpha)))

    def output_lipschitz(self) -> Part:
        return output_lipschitz_of(self.cell)  # the equilibria are the same

    def row_lipschitz(self, rows: Tensor) -> Tensor | None:
        return row_lipschitz_of(self.cell, rows)

    def error_factor(self) -> float:
        return round_up(error_factor_of(self.cell) / self.alpha)  # alpha f(z) + (1 - alpha) z - z

    def problem(self, x: Any) -> Problem:
        return problem_of(self.cell, x).skipped(self.alpha)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}"


class ChangeOfVariable(Wrapper):
    """`A^-1(f(A(z)))` for an invertible affine `A(z) = scale Q z + shift` (OptEq, Table 1, row 3).

    It puts `phi o A` in place of `phi`.

    The equilibria are `A^-1` of the cell's. The Jacobian stays symmetric, and the step a proximal
    map, only if `Q` is a multiple of an orthogonal matrix (a rotation or reflection); otherwise the
    cell does not declare it.

    Args:
        cell: The cell, with one tensor as its state.
        matrix: `Q`, invertible, for states of shape (batch, m); the identity by default.
        scale: A number other than 0.
        shift: A tensor of the shape of one state, or a number.

    Attributes:
        conformal: Whether `Q` is a multiple of an orthogonal matrix.
        stretch: By how much `A` stretches lengths at most.
        condition: The condition number of `Q`.
    """

    def __init__(
        self,
        cell: Cell,
        *,
        matrix: Tensor | None = None,
        scale: float = 1.0,
        shift: Tensor | float | None = None,
    ) -> None:
        super().__init__(cell)
        require_finite("ChangeOfVariable.scale", scale)
        if scale == 0:
            raise SettingError("ChangeOfVariable.scale", "not be 0", scale)
        self.scale = float(scale)
        self.matrix: Tensor | None
        self.inverse: Tensor | None
        self.shift: Tensor | None
        self.register_buffer("matrix", None)
        self.register_buffer("inverse", None)
        # A number in full precision, so that layers in float64 get all of it.
        given = (
            torch.tensor(shift, dtype=torch.float64) if isinstance(shift, int | float) else shift
        )
        self.register_buffer("shift", given)
        for name, tensor in (("matrix", matrix), ("shift", given)):
            if tensor is not None:
                _require_finite_tensor(name, tensor)
        self._measured: tuple[Tensor, float, float] | None = None
        if matrix is not None:
            if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1]:
                raise ValueError(
                    f"ChangeOfVariable.matrix must be square; got shape {tuple(matrix.shape)}."
                )
            self.matrix = matrix.detach().clone()
            self.inverse = torch.empty_like(self.matrix)
            self._singular_values()

    @property
    def symmetric(self) -> bool:  # type: ignore[override]
        return self.cell.symmetric and self.conformal

    @property
    def conformal(self) -> bool:
        """Whether `Q` is a multiple of an orthogonal matrix."""
        if self.matrix is None:
            return True
        largest, smallest = self._singular_values()
        rounding = 100 * len(self.matrix) * torch.finfo(self.matrix.dtype).eps
        return largest <= smallest * (1 + rounding)

    @property
    def stretch(self) -> float:
        """By how much `A` stretches lengths at most."""
        return abs(self.scale) * self._singular_values()[0]

    @property
    def condition(self) -> float:
        """The condition number of `Q`."""
        largest, smallest = self._singular_values()
        return largest / smallest

    @torch.no_grad()
    def _singular_values(self) -> tuple[float, float]:
        """The largest and the smallest one of `Q`, and its inverse brought up to date.

        The matrix is a buffer, which may be loaded or written to: it is compared with what was
        measured last.
        """
        matrix, inverse = self.matrix, self.inverse
        if matrix is None or inverse is None:
            return 1.0, 1.0
        last = self._measured
        if last is not None and (is_wrapped(matrix) or _same(last[0], matrix)):
            return last[1:]
        _require_finite_tensor("matrix", matrix)
        values = torch.linalg.svdvals(matrix.double())
        largest, smallest = float(values[0]), float(values[-1])
        # Lower precisions keep what was invertible: a model may be cast to them.
        rounding = min(torch.finfo(dtype).eps for dtype in (matrix.dtype, torch.float32))
        if not smallest > len(matrix) * rounding * largest:
            raise ValueError(
                "ChangeOfVariable.matrix must be invertible; got singular values from "
                f"{largest:.3g} down to {smallest:.3g}."
            )
        inverse.copy_(torch.linalg.inv(matrix.double()))
        self._measured = matrix.clone(), largest, smallest
        return largest, smallest

    def inject(self, x: Any) -> Any:
        self._singular_values()  # brings the inverse up to date, once for each solve
        return super().inject(x)

    def change(self, z: Tensor) -> Tensor:
        """Return `A(z)`."""
        self._fit(z)
        z = z if self.matrix is None else z @ self.matrix.to(z).T
        z = z if self.scale == 1 else z * self.scale
        return z if self.shift is None else z + self.shift.to(z)

    def invert(self, y: Tensor) -> Tensor:
        """Return `A^-1(y)`."""
        self._fit(y)
        y = y if self.shift is None else y - self.shift.to(y)
        y = y if self.scale == 1 else y / self.scale
        return y if self.inverse is None else y @ self.inverse.to(y).T

    def _fit(self, z: Tensor) -> None:
        if self.matrix is not None and (z.dim() != 2 or z.shape[1] != len(self.matrix)):
            raise ValueError(
                "ChangeOfVariable.matrix must fit states of shape (batch, m); got "
                f"{tuple(self.matrix.shape)} for a state of shape "
                f"{tuple(z.shape)}."
            )
        if self.shift is not None and self.shift.shape not in (torch.Size(), z.shape[1:]):
            raise ValueError(
                "ChangeOfVariable.shift must have the shape of one state, "
                f"{tuple(z.shape[1:])}; got {tuple(self.shift.shape)}."
            )

    def initial(self, x: Any, context: Any) -> Tensor:
        return self.invert(self.cell.initial(x, context))

    def step(self, z: Tensor, context: Any) -> Tensor:
        return self.invert(self.cell.step(self.change(z), context))

    def contributions(self, z: Tensor, context: Any) -> dict[str, float]:
        return contributions_of(self.cell, self.change(z), context)

    def readout(self, z: Tensor, context: Any) -> Tensor:
        return z

    def _through(self, lipschitz: Tensor | float) -> Tensor | float:
        # A stretched norm says nothing about the Euclidean one beyond the condition number.
        return self.condition * lipschitz

    @property
    def reads_out_the_state(self) -> bool:
        return True

    def _shrunk(self) -> Bound:
        """`A^-1`, whose norm is that of the inverse."""
        smallest = abs(self.scale) * self._singular_values()[1]
        # Singular values are computed to rounding times the largest, and matrices are invertible
        # to float32's precision at least.
        return Bound("ChangeOfVariable", (1 + 1e-6) / smallest, "the norm of the inverse of A")

    def input_lipschitz(self) -> Part:
        return Chain((input_lipschitz_of(self.cell), self._shrunk()))

    def output_lipschitz(self) -> Part:
        if not self.cell.reads_out_the_state:
            return unknown(type(self).__name__, "it changes what its cell reads out")
        return Chain((output_lipschitz_of(self.cell), self._shrunk()))

    def problem(self, x: Any) -> Problem:
        return problem_of(self.cell, x).changed(self)


def _require_finite_tensor(name: str, tensor: object) -> None:
    if not (
        isinstance(tensor, Tensor) and tensor.is_floating_point() and bool(tensor.isfinite().all())
    ):
        raise ValueError(
            f"ChangeOfVariable.{name} must be a tensor of finite floating-point "
            f"numbers; got {tensor!r}."
        )


def _same(first: Tensor, second: Tensor) -> bool:
    alike = first.dtype == second.dtype and first.device == second.device
    return alike and torch.equal(first, second)


class Regularized(Wrapper):
    """`f(T_R(z))` with `T_R(z) = z - gamma grad R(z)` (OptEq, Theorem 4).

    It puts `phi + gamma R` in place of `phi`.

    With the proximal map in place of the gradient step, `T_R = prox_(gamma R)`, the equilibrium
    minimises `phi + M_(gamma R)`, the Moreau envelope of `gamma R`, instead. The term is added to
    what the cell as a whole stands for: with a skip connection of fraction `alpha` that is
    `alpha M_phi^(1 - alpha)`, so that minimisers of `phi + gamma R` itself are found with
    `alpha = 1`. For several layers, see `DeepObjective`.

    Args:
        cell: The cell, with one real tensor as its state.
        regularizer: `R`: a regulariser, its name, a table, or a function of the state.
        strength: `gamma`.
        operation: `gradient`, `prox`, or `auto`: the proximal map where there is one, as in the
            paper's Table 2.
    """

    same_equilibria = False
    symmetric = False  # a product of two symmetric matrices is not symmetric

    def __init__(
        self,
        cell: Cell,
        regularizer: str | Mapping[str, Any] | Regularizer | Callable[[Tensor], Tensor],
        strength: float = 0.1,
        operation: Operation = "auto",
    ) -> None:
        super().__init__(cell)
        self.regularizer = as_regularizer(regularizer)
        require_positive("Regularized.strength", strength)
        choose("Regularized.operation", operation, get_args(Operation))
        if operation == "prox" and not self.regularizer.has_prox:
            raise ValueError(
                "Regularized.operation must be 'gradient' for "
                f"{type(self.regularizer).__name__}, which has no proximal map; "
                "got 'prox'."
            )
        self.strength = strength
        self.by_prox = operation == "prox" or (operation == "auto" and self.regularizer.has_prox)
        self.coupled = cell.coupled or self.regularizer.coupled

    def operate(self, z: Tensor) -> Tensor:
        """Return `T_R(z)`."""
        if z.is_complex():  # regularisers square, sign and clamp
            raise SettingError(
                "Regularized.cell",
                "have a real state",
                z,
                "Let its state be torch.view_as_real of what it is.",
                got=str(z.dtype),
            )
        if self.by_prox:
            return self.regularizer.prox(z, self.strength)
        return z - self.strength * self.regularizer.gradient(z)

    def step(self, z: Tensor, context: Any) -> Tensor:
        value: Tensor = self.cell.step(self.operate(z), context)
        return value

    def contributions(self, z: Tensor, context: Any) -> dict[str, float]:
        return contributions_of(self.cell, self.operate(z), context)

    @property
    def factor(self) -> float | None:
        """A Lipschitz constant of `T_R`, if one is known."""
        curvature = lipschitz_number(self.regularizer, self.regularizer.lipschitz)
        if self.regularizer.convex and (
            self.by_prox or (curvature is not None and self.strength * curvature <= 2)
        ):
            # Proximal maps and short gradient steps of convex functions are nonexpansive.
            return 1.0
        return None if curvature is None or self.by_prox else 1 + self.strength * curvature

    def _through(self, lipschitz: Tensor | float) -> Tensor | float | None:
        return None if self.factor is None else self.factor * lipschitz

    def input_lipschitz(self) -> Part:
        return input_lipschitz_of(self.cell)  # at `T_R(z)` in place of `z`

    def problem(self, x: Any) -> Problem:
        return problem_of(self.cell, x).regularized(self)

    def extra_repr(self) -> str:
        return (
            f"regularizer={self.regularizer}, strength={self.strength}, "
            f"operation={'prox' if self.by_prox else 'gradient'}"
        )
