"""The cells of monotone operator networks: one map for each splitting, with the same output."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from equipoise.core.registry import choose
from equipoise.core.transforms import full_precision, is_wrapped, unwrapped
from equipoise.core.tree import Shared
from equipoise.core.validate import SettingError, require_positive
from equipoise.families.monotone.operator import MonotoneOperator
from equipoise.families.monotone.proximal import require_proximal, scaled_prox
from equipoise.families.monotone.resolvent import resolve
from equipoise.families.monotone.sensitivity import Ellipsoid, find_weights
from equipoise.families.monotone.theory import Inclusion, certify_monotone, input_bound
from equipoise.layers.cell import Cell
from equipoise.layers.certificate import Certificate
from equipoise.layers.lipschitz import Bound, Chain, Part, reciprocal_up, round_up
from equipoise.operators.operator import OperatorWeights, is_recorded
from equipoise.prox.activation import Activation, ReLU
from equipoise.solvers.problem import Linearization

__all__ = ["ForwardBackwardCell", "MonotoneCell", "ReflectionCell", "Splitting", "monotone_cell"]

Splitting = Literal["peaceman-rachford", "douglas-rachford", "forward-backward", "none"]
StepSize = float | Literal["auto"]


class MonotoneCell(Cell):
    """What the splittings share: the equation `z = s(W z + U x + b)` with `I - W >= m I`.

    With `s = prox_phi` its equilibrium is the zero of a strongly monotone operator,
    `0 in (I - W) z - U x - b + dphi(z)`, of which there is exactly one for every input (Winston &
    Kolter, 2020, Theorem 1).

    Args:
        operator: `W`.
        inputs: `x -> U x + b`.
        activation: `s`, the proximal map of a convex function.
        step_size: The `a` of the splitting, or `auto`.
    """

    linearize_keeps_graph = True
    splitting: Splitting
    enlarged: bool = False  # whether it iterates enlarged states

    def __init__(
        self,
        operator: MonotoneOperator,
        inputs: nn.Module,
        activation: Activation,
        step_size: StepSize = "auto",
    ) -> None:
        super().__init__()
        require_proximal("Monotone", activation)
        if step_size != "auto":
            require_positive("Monotone.step_size", step_size)
            step_size = float(step_size)
        self.operator = operator
        self.inputs = inputs
        self.activation = activation
        self.step_size: StepSize = step_size

    @property
    def margin(self) -> float:
        """The margin `m` of `I - W >= m I`."""
        return self.operator.margin

    def effective_step_size(self, weights: OperatorWeights | None = None) -> float:
        """Return the step size `a` at the present weights, which may be given."""
        raise NotImplementedError  # abstract

    @torch.no_grad()
    def factor_bound(self) -> float:
        """Return a proven bound of the step's Lipschitz constant; infinite if there is none."""
        raise NotImplementedError  # abstract

    @torch.no_grad()
    def certificate(self) -> Certificate:
        """Return that there is one equilibrium, how it moves, and how fast the splitting is."""
        basis = "the equation itself"
        if self.splitting != "none":
            basis = f"{self.splitting} splitting with step size {self.effective_step_size():.4g}"
        return certify_monotone(self, self.margin, self.factor_bound(), self.inputs, basis)

    def output_lipschitz(self) -> Part:
        """Return `|U|/m` (Pabbaraju et al., 2021, Theorem 1), or less where that is proved."""
        response = Bound(
            "1/m", reciprocal_up(self.margin), "Pabbaraju, Winston & Kolter, 2021, Theorem 1"
        )
        matrix, norm = self._dense_inputs(), input_bound(self.inputs)
        found = None if matrix is None else Ellipsoid.make(*matrix)
        if found is not None and norm is not None and found.state() < norm * response.value:
            theorem = "ellipsoid of d^T (I - W) d <= d^T U e; |U|/m would be "
            theorem += f"{norm / self.margin:.4g}"
            return Bound(type(self).__name__, found.state(), theorem)
        return Chain((self.inputs, response))

    def row_lipschitz(self, rows: Tensor) -> Tensor | None:
        """Return the bounds of `Ellipsoid`, with weights that make them small."""
        matrix = self._dense_inputs()
        if matrix is None:
            return None
        found = Ellipsoid.make(*matrix, find_weights(*matrix, rows)) or Ellipsoid.make(*matrix)
        return None if found is None else found.rows(rows)

    def _dense_inputs(self) -> tuple[Tensor, Tensor] | None:
        """`I - W` and `U` as matrices in float64, where both are matrices."""
        gap = self.operator.gap_matrix()
        if gap is None or type(self.inputs) is not nn.Linear:
            return None
        return gap, self.inputs.weight.detach().double()

    @torch.no_grad()
    def error_factor(self) -> float:
        """Return `1/(1 - L)` of the splitting, whose read-out is nonexpansive."""
        factor = round_up(self.factor_bound())
        return round_up(1 / (1 - factor)) if factor < 1 else math.inf

    @torch.no_grad()
    def norms(self) -> dict[str, float]:
        """Return bounds of `|I - W|` and, where it is known, `|U|`."""
        bound = input_bound(self.inputs)
        return {"I - W": self.operator.gap_bound()} | ({} if bound is None else {"U": bound})

    def problem(self, x: Tensor) -> Inclusion:
        """Return the monotone inclusion at the input `x`."""
        self.operator.check(x)
        return Inclusion(self.margin, self.activation)

    def _weights(self, x: Tensor) -> OperatorWeights:
        """The weights of `W`: in full precision, without which `I - W` need not be monotone."""
        self.operator.check(x)
        with full_precision(x.device.type):
            return self.operator.weights()

    def _parameters_of_operator(self) -> tuple[Tensor, ...]:
        return tuple(self.operator.parameters())


class ForwardBackwardCell(MonotoneCell):
    """`z = prox_{a phi}(z - a ((I - W) z - U x - b))`: forward-backward splitting.

    It contracts by `sqrt(1 - 2 a m + a^2 L^2)` for `0 < a < 2 m/L^2`, `L = |I - W|`; best is
    `a = m/L^2`. With `a = 1` it is the network's own equation, which need not contract.

    Args:
        operator: `W`.
        inputs: `x -> U x + b`.
        activation: `s`.
        step_size: `a`; `auto` is `m/L^2` with a proven bound of `L`.
    """

    splitting: Splitting = "forward-backward"

    def __init__(
        self,
        operator: MonotoneOperator,
        inputs: nn.Module,
        activation: Activation,
        step_size: StepSize = "auto",
    ) -> None:
        super().__init__(operator, inputs, activation, step_size)
        if step_size != 1:
            scaled_prox(activation, 0.5)  # raises if no splitting knows it
        if step_size == 1:
            self.splitting = "none"

    def effective_step_size(self, weights: OperatorWeights | None = None) -> float:
        if self.step_size != "auto":
            return self.step_size
        if unwrapped(self._parameters_of_operator()) is None:
            raise SettingError(
                "Monotone.step_size",
                "be a number under vmap, for forward-backward splitting",
                self.step_size,
                "Or use splitting='peaceman-rachford'.",
            )
        return self.margin / self.operator.gap_bound() ** 2

    @torch.no_grad()
    def factor_bound(self) -> float:
        a = self.effective_step_size()
        gap = self.operator.gap_bound()
        factor = math.sqrt(max(1 - 2 * a * self.margin + (a * gap) ** 2, 0.0))
        doubled = tuple(weight.double() for weight in self.operator.weights())
        direct = float(self.operator.bound(self.operator.combined(doubled, 1 - a, a)))
        return min(factor * (1 + 1e-12), direct)

    @torch.no_grad()
    def error_factor(self) -> float:
        """Return the less of `1/(1 - L)` and `1 + |I - a (I - W)|/(a m)`.

        Let `r = f(z) - z` and `q = f(z) - z*`. Monotonicity of `dphi` at `f(z)` and `z*` is
        `a <q, (I - W) q> <= -<q, (I - a (I - W)) r>`, so that `a m |q| <= |I - a (I - W)| |r|`.
        """
        a = self.effective_step_size()
        doubled = tuple(weight.double() for weight in self.operator.weights())
        direct = float(self.operator.bound(self.operator.combined(doubled, 1 - a, a)))
        return min(super().error_factor(), round_up(1 + direct / (a * self.margin)))

    def inject(self, x: Tensor) -> Any:
        weights = self._weights(x)
        a = self.effective_step_size(weights)
        c = self.inputs(x)
        if a != 1:
            weights, c = self.operator.combined(weights, 1 - a, a), a * c
        return c, tuple(map(Shared, weights)), a

    def initial(self, x: Tensor, context: Any) -> Tensor:
        return torch.zeros_like(context[0])

    def readout(self, z: Tensor, context: Any) -> Tensor:
        return self.operator.present(z)

    def step(self, z: Tensor, context: Any) -> Tensor:
        c, weights, a = context
        pre = self.operator.affine_with(weights, z, c)
        prox = scaled_prox(self.activation, a)
        return prox(pre) if is_recorded(pre) else prox.overwrite(pre)

    def linearize(self, z: Tensor, context: Any) -> Linearization:
        c, weights, a = context
        prox = scaled_prox(self.activation, a)
        pre = self.operator.affine_with(weights, z, c)
        slope = prox.derivative(pre.detach())
        held = tuple(weight.detach() for weight in weights)
        return self._linearization(prox(pre), slope, held, self.operator.transposed(held))

    def _linearization(
        self, value: Tensor, slope: Tensor, weights: OperatorWeights, turned: OperatorWeights
    ) -> Linearization:
        operator = self.operator
        return Linearization(
            value.detach(),
            jvp=lambda v: operator.apply_with(weights, v) * slope,
            vjp=lambda v: operator.adjoint_with(turned, v * slope),
            select_rows=lambda rows: self._linearization(
                value.detach().index_select(0, rows),
                slope.index_select(0, rows),
                weights,
                turned,
            ),
            graph=value if value.requires_grad else None,
        )


class ReflectionCell(MonotoneCell):
    """Peaceman-Rachford or Douglas-Rachford splitting: a map of `u`, with `z = prox_{a phi}(u)`.

    `u = (1 - t) u + t (2 R - I)(2 prox_{a phi} - I) u`, shifted by the input, with the resolvent
    `R = (I + a (I - W))^-1`:

        r = 2 prox_{a phi}(u) - u,    u = (1 - t) u + t (2 R (r + a (U x + b)) - r).

    `2 R - I` contracts for every `a > 0`, by at most `sqrt(1 - 4 a m/(1 + a L)^2)` (Lions &
    Mercier, 1979), and `2 prox - I` does not expand. The equilibrium `z` does not depend on `a` or
    `t`. The step's transposed Jacobian `(2 prox' - I)(2 R^T - I)` contracts as well, so that the
    adjoint equation is solved by the same splitting with the transposed resolvent.

    Args:
        operator: `W`.
        inputs: `x -> U x + b`.
        activation: `s`.
        step_size: `a`; `auto` lies between `1/L` and `1/m`.
        fraction: `t`: 1 is Peaceman-Rachford, 1/2 Douglas-Rachford.
    """

    enlarged = True

    def __init__(
        self,
        operator: MonotoneOperator,
        inputs: nn.Module,
        activation: Activation,
        step_size: StepSize = "auto",
        fraction: float = 1.0,
    ) -> None:
        super().__init__(operator, inputs, activation, step_size)
        scaled_prox(activation, 0.5)  # raises if no splitting knows it
        self.fraction = fraction
        self.splitting: Splitting = "peaceman-rachford" if fraction == 1 else "douglas-rachford"

    def effective_step_size(self, weights: OperatorWeights | None = None) -> float:
        if self.step_size != "auto":
            return self.step_size
        parameters = self._parameters_of_operator()
        if any(map(is_wrapped, parameters)):
            return 1.0  # as good a choice, and one that needs no values
        operator = self.operator
        return operator.remembered.get(
            "step size",
            parameters,
            lambda: operator.typical_step_size(weights or operator.weights()),
        )

    @torch.no_grad()
    def factor_bound(self) -> float:
        a, gap = self.effective_step_size(), self.operator.gap_bound()
        factor = math.sqrt(max(1 - 4 * a * self.margin / (1 + a * gap) ** 2, 0.0))
        return (1 - self.fraction) + self.fraction * min(factor * (1 + 1e-12), 1.0)

    def inject(self, x: Tensor) -> Any:
        weights = self._weights(x)
        a = self.effective_step_size(weights)
        operator = self.operator
        c = operator.enlarge(self.inputs(x))
        with full_precision(x.device.type):
            held = tuple(weight.detach() for weight in weights)
            factors = operator.remembered.get(
                ("factors", a, c.shape[1:]),
                self._parameters_of_operator(),
                lambda: operator.factor(held, a, c),
            )
        return c, tuple(map(Shared, weights)), tuple(map(Shared, factors)), a

    def initial(self, x: Tensor, context: Any) -> Tensor:
        return torch.zeros_like(context[0])

    def readout(self, z: Tensor, context: Any) -> Tensor:
        """Return `prox_{a phi}(u)`."""
        operator = self.operator
        return operator.present(operator.crop(scaled_prox(self.activation, context[3])(z)))

    def step(self, z: Tensor, context: Any) -> Tensor:
        c, weights, factors, a = context
        operator, t = self.operator, self.fraction
        reflected = self._reflect(z, a)
        b = torch.add(reflected, c, alpha=a)
        with full_precision(z.device.type):  # as the factors are
            if is_recorded(b):
                moved = 2 * resolve(operator, weights, factors, a, b) - reflected
            else:
                moved = operator.reflect_with(factors, b, reflected)
        return moved if t == 1 else torch.lerp(z, moved, t)

    def _reflect(self, u: Tensor, a: float) -> Tensor:
        """`2 prox_{a phi}(u) - u`."""
        # Recorded, |u| would have the slope 0 at 0, and not that of the activation.
        if isinstance(self.activation, ReLU) and not (self.operator.enlarges or is_recorded(u)):
            return u.abs()
        return 2 * self.operator.confine(scaled_prox(self.activation, a)(u)) - u

    def linearize(self, z: Tensor, context: Any) -> Linearization:
        factors, a = context[2], context[3]
        slope = scaled_prox(self.activation, a).derivative(z.detach())
        reflected = self.operator.confine(slope).mul_(2).sub_(1)
        held = tuple(factor.detach() for factor in factors)
        return self._linearization(self.step(z, context), reflected, held)

    def _linearization(
        self, value: Tensor, reflected: Tensor, factors: OperatorWeights
    ) -> Linearization:
        t = self.fraction

        def resolved(v: Tensor, *, transpose: bool) -> Tensor:
            with full_precision(v.device.type):
                return self.operator.resolve_with(factors, v, transpose=transpose)

        def push(v: Tensor) -> Tensor:
            w = v * reflected
            moved = 2 * resolved(w, transpose=False) - w
            return moved if t == 1 else torch.lerp(v, moved, t)

        def pull(v: Tensor) -> Tensor:
            moved = (2 * resolved(v, transpose=True) - v) * reflected
            return moved if t == 1 else torch.lerp(v, moved, t)

        return Linearization(
            value.detach(),
            jvp=push,
            vjp=pull,
            select_rows=lambda rows: self._linearization(
                value.detach().index_select(0, rows), reflected.index_select(0, rows), factors
            ),
            graph=value if value.requires_grad else None,
        )


def monotone_cell(
    owner: str,
    operator: MonotoneOperator,
    inputs: nn.Module,
    activation: Activation,
    splitting: Splitting = "peaceman-rachford",
    step_size: StepSize = "auto",
) -> MonotoneCell:
    """Return the cell of a splitting.

    Args:
        owner: Whose options these are, for messages.
        operator: `W`.
        inputs: `x -> U x + b`.
        activation: `s`.
        splitting: Its name; `none` is the network's own equation.
        step_size: `a`, or `auto`.
    """
    choose(f"{owner}.splitting", splitting, get_args(Splitting))
    if splitting == "none":
        if step_size not in ("auto", 1):
            raise SettingError(
                f"{owner}.step_size",
                "be left out for splitting='none'",
                step_size,
                "Use splitting='forward-backward'.",
            )
        return ForwardBackwardCell(operator, inputs, activation, 1.0)
    if splitting == "forward-backward":
        return ForwardBackwardCell(operator, inputs, activation, step_size)
    fraction = 1.0 if splitting == "peaceman-rachford" else 0.5
    return ReflectionCell(operator, inputs, activation, step_size, fraction)
