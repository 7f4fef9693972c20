"""The cell of implicit networks whose equilibrium is unique by a bound of the entries of `A`."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from equipoise.core.registry import choose
from equipoise.core.transforms import full_precision
from equipoise.core.tree import Shared
from equipoise.core.validate import SettingError, require_between, require_count
from equipoise.families.well_posed.bound import (
    PerronBound,
    bound_response,
    is_below,
    largest_response,
    perron_bound,
    perron_vector,
    project_rows,
)
from equipoise.layers.cell import Cell
from equipoise.layers.certificate import Certificate, Link, Statement
from equipoise.layers.lipschitz import Bound, Part, round_up, unknown
from equipoise.operators import dense_norm
from equipoise.operators.operator import is_recorded
from equipoise.prox.activation import Activation, ReLU
from equipoise.solvers.problem import Linearization

__all__ = ["Condition", "Norm", "WellPosedCell"]

Condition = Literal["infinity", "perron-frobenius"]
Norm = Literal["scale", "project", "none"]

ROOM = 1e-4
"""How far below `kappa` a projection onto the Perron-Frobenius condition ends, relative to it."""


class WellPosedCell(Cell):
    """`z = s(A z + B x + b)`, where `|A|` is small entry by entry (El Ghaoui et al., 2021).

    Let `s` be componentwise nonexpansive, `|s(a) - s(b)| <= |a - b|`. Then
    `|f(z) - f(z')| <= |A| |z - z'|` entry by entry, and with a positive vector `v` and
    `|A| v <= kappa v`, `kappa < 1`, the step contracts by `kappa` in the norm `max_i |z_i|/v_i`:
    one equilibrium for every input, found by plain iteration. Such a `v` exists for
    `kappa > lambda_pf(|A|)`, the Perron-Frobenius eigenvalue, and for no smaller one. `v = 1` is
    the stricter condition `|A|_inf <= kappa`. Neither asks that the Euclidean norm be below 1.

    Args:
        in_features: Length of the input.
        features: Length of the state.
        kappa: The prescribed bound, in (0, 1).
        condition: What is bounded by `kappa`: `infinity`, the largest row sum of `|A|`, or
            `perron-frobenius`, its eigenvalue.
        norm: How: `scale` (rows of `A` are divided where their sums exceed `kappa`, in the layer;
            for `perron-frobenius` between learned diagonal matrices, `A = D R D^-1`), `project`
            (see `project_norms`) or `none`.
        activation: `s`.
        bias: Whether there is `b`.

    Shape:
        Input (batch, in_features), state (batch, features).
    """

    linearize_keeps_graph = True

    def __init__(
        self,
        in_features: int,
        features: int,
        kappa: float = 0.95,
        condition: Condition = "infinity",
        norm: Norm = "scale",
        activation: Activation | None = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__()
        require_count("WellPosed.in_features", in_features)
        require_count("WellPosed.features", features)
        require_between("WellPosed.kappa", kappa, 0, 1, "()")
        choose("WellPosed.condition", condition, get_args(Condition))
        choose("WellPosed.norm", norm, get_args(Norm))
        activation = ReLU() if activation is None else activation
        _require_nonexpansive(activation)
        self.kappa = float(kappa)
        self.condition: Condition = condition
        self.norm: Norm = norm
        self.activation = activation
        self.A = nn.Parameter(torch.empty(features, features))
        # Row sums of about kappa/2.
        nn.init.uniform_(self.A, -self.kappa / features, self.kappa / features)
        self.inputs = nn.Linear(in_features, features, bias=bias)
        self.d: nn.Parameter | None = None
        if norm == "scale" and condition == "perron-frobenius":
            self.d = nn.Parameter(torch.zeros(features))

    def matrix(self) -> Tensor:
        """Return the matrix that the step multiplies by, differentiable: `A`, controlled."""
        if self.norm != "scale":
            return self.A
        sums = self.A.abs().sum(dim=1, keepdim=True)
        limit = self._radius()
        rows = self.A * (limit / sums.clamp_min(limit))
        return rows if self.d is None else rows * (self.d[:, None] - self.d).exp()

    def _radius(self) -> float:
        """`kappa` less the rounding of a row."""
        return self.kappa * (1 - (len(self.A) + 4) * torch.finfo(self.A.dtype).eps)

    def inject(self, x: Tensor) -> Any:
        with full_precision(x.device.type):  # row sums must be right
            A = self.matrix()
        return self.inputs(x), Shared(A)

    def initial(self, x: Tensor, context: Any) -> Tensor:
        return torch.zeros_like(context[0])

    def step(self, z: Tensor, context: Any) -> Tensor:
        c, A = context
        pre = torch.addmm(c, z, A.T)
        return self.activation(pre) if is_recorded(pre) else self.activation.overwrite(pre)

    def linearize(self, z: Tensor, context: Any) -> Linearization:
        """`J = S A`, `S` the slopes of the activation."""
        c, A = context
        pre = torch.addmm(c, z, A.T)
        slope = self.activation.derivative(pre.detach())
        return _linearized(self.activation(pre), slope, A.detach())

    @torch.no_grad()
    def bound(self) -> PerronBound:
        """Return `r` and `v` with `|A| v <= r v`, proved: `r` bounds `lambda_pf(|A|)`."""
        also = [] if self.d is None else [(self.d.double() - self.d.double().max()).exp()]
        return perron_bound(self.matrix(), also)

    @torch.no_grad()
    def certificate(self) -> Certificate:
        """Return whether `lambda_pf(|A|) < 1` is proved, and how far the equilibrium moves."""
        bound, v = self.bound()
        A = self.matrix().double()
        proved = bound < 1
        statements = [
            Statement(
                "the Perron-Frobenius eigenvalue of |A| is below 1, so that there is one "
                "equilibrium for every input",
                holds=True if proved else None,
                number=bound,
                margin=1 - bound,
                theorem="El Ghaoui et al., 2021, section 2; Collatz-Wielandt bound",
                unique=True,
            )
        ]
        if proved:
            statements.append(
                Statement(
                    "the equilibrium is Lipschitz continuous in x, in maximum norms",
                    holds=True,
                    number=largest_response(A, self.inputs.weight, bound, v),
                    theorem="|z - z'| <= (I - |A|)^-1 |B| |x - x'| entry by entry",
                )
            )
        # In the Euclidean norm, which solvers measure by.
        euclidean = float(dense_norm(A)) if bool(A.isfinite().all()) else math.inf
        return Certificate(
            (Link(type(self).__name__, euclidean),),
            further=tuple(statements),
            remedy="Use norm='scale' or norm='project'.",
        )

    @torch.no_grad()
    def output_lipschitz(self) -> Part:
        """Return the less of `|(I - |A|)^-1 |B||` and `|B|/(1 - |A|_2)`."""
        name = type(self).__name__
        inside = self._response(self.inputs.weight)
        if inside is None:
            return unknown(name, "the Perron-Frobenius eigenvalue of |A| is not proved below 1")
        by_entries = float(dense_norm(inside))
        euclidean = round_up(float(dense_norm(self.matrix().double())))
        direct = math.inf
        if euclidean < 1:
            norm = float(dense_norm(self.inputs.weight.double()))
            direct = round_up(norm / (1 - euclidean))
        return Bound(
            name,
            min(by_entries, direct),
            "|z - z'| <= (I - |A|)^-1 |B| |x - x'| entry by entry"
            if by_entries <= direct
            else "|B|/(1 - |A|) in Euclidean norms",
        )

    @torch.no_grad()
    def row_lipschitz(self, rows: Tensor) -> Tensor | None:
        """Return `|c|^T (I - |A|)^-1 |B|` for each row `c`, in length."""
        inside = self._response(self.inputs.weight)
        if inside is None:
            return None
        found: Tensor = torch.linalg.vector_norm(rows.abs() @ inside, dim=1)
        return found * (1 + 1e-9)

    @torch.no_grad()
    def error_factor(self) -> float:
        """Return `|(I - |A|)^-1|`, since `|z - z*| <= (I - |A|)^-1 |f(z) - z|` entry by entry."""
        inside = self._response(torch.eye(len(self.A), dtype=torch.float64, device=self.A.device))
        return math.inf if inside is None else float(dense_norm(inside))

    def _response(self, B: Tensor) -> Tensor | None:
        """A matrix above `(I - |A|)^-1 |B|`, if the condition is proved."""
        bound, v = self.bound()
        return bound_response(self.matrix(), B, bound, v) if bound < 1 else None

    @torch.no_grad()
    def norms(self) -> dict[str, float]:
        """Return the bound that `condition` is about, by its name."""
        A = self.matrix().double()
        if self.condition == "infinity":
            return {"|A|_inf": float(A.abs().sum(dim=1).max())}
        return {"lambda_pf(|A|)": self.bound()[0]}

    @property
    def norm_limit(self) -> float:
        return 1.0

    @property
    def projects(self) -> bool:
        return self.norm == "project"

    @torch.no_grad()
    def project_(self) -> None:
        """Bring `A` back to where `condition` holds with `kappa`, if it does not.

        For `infinity` to the nearest such matrix. The set of matrices with `lambda_pf <= kappa` is
        not convex; for `perron-frobenius` it is the nearest matrix with `|A| v <= kappa v`, where
        `v` is about the eigenvector at the present weights.
        """
        if self.condition == "infinity":
            self.A.copy_(project_rows(self.A, self._radius()))
        elif bool(self.A.isfinite().all()) and not is_below(self.A, self.kappa):
            v = perron_vector(self.A)
            self.A.copy_(project_rows(self.A, (1 - ROOM) * self._radius() * v, v))

    def extra_repr(self) -> str:
        return f"kappa={self.kappa:g}, condition={self.condition!r}, norm={self.norm!r}"


def _require_nonexpansive(activation: Activation) -> None:
    if not activation.elementwise:
        raise SettingError(
            "WellPosed.activation", "be elementwise", activation, got=type(activation).__name__
        )
    low, high = activation.slopes
    if not max(-low, high) <= 1:
        raise SettingError(
            "WellPosed.activation",
            "have slopes in [-1, 1]",
            activation,
            got=f"{type(activation).__name__} with slopes in {activation.slopes}",
        )


def _linearized(value: Tensor, slope: Tensor, A: Tensor) -> Linearization:
    return Linearization(
        value.detach(),
        jvp=lambda v: functional.linear(v, A).mul_(slope),
        vjp=lambda v: (v * slope) @ A,
        select_rows=lambda rows: _linearized(
            value.detach().index_select(0, rows), slope.index_select(0, rows), A
        ),
        graph=value if value.requires_grad else None,
    )
