"""The cell of an OptEq: one or several proximal maps in a row."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn

from equipoise.core.registry import choose
from equipoise.core.transforms import is_wrapped
from equipoise.core.tree import Shared
from equipoise.core.validate import require_flag, require_fraction, require_positive
from equipoise.families.opteq.compiled import run_products, run_values
from equipoise.families.opteq.coordinates import HiddenUnits, hidden_system
from equipoise.families.opteq.gram import Gram
from equipoise.families.opteq.layer_bounds import frame_statements, input_part, layer_factors
from equipoise.families.opteq.linearization import LinearLayer, add_skip, linearize_layers
from equipoise.families.opteq.norm_control import (
    BOUND,
    Init,
    Norm,
    NormControl,
    draw_frames_,
    orthogonalize_,
    require_norm_control,
)
from equipoise.families.opteq.objective import state_problem
from equipoise.families.opteq.potential import Potential
from equipoise.layers.cell import Cell
from equipoise.layers.certificate import Certificate, Factor, Link, averaged
from equipoise.layers.lipschitz import Part, round_up
from equipoise.layers.problem import Problem
from equipoise.operators.operator import Operator, OperatorWeights, is_recorded
from equipoise.prox.activation import Activation
from equipoise.solvers.ahead import CompiledRuns
from equipoise.solvers.coordinates import Coordinates, ReducedSystem
from equipoise.solvers.problem import Linearization

__all__ = ["OptEqCell"]


class OptEqCell(Cell):
    """`z = f_L o ... o f_1(z)`, layers of the form `W^T s(W z + U x + b)` (OptEq, eq. 5 and 6).

    `f_l(z) = (alpha_l/mu) W_l^T s_l(W_l z + U_l x + b_l) + (1 - alpha_l) z`.

    Effective weights and injections are computed once for each solve. One layer is a proximal map,
    so that its Jacobian is symmetric; several are not.

    Args:
        operators: `W_1, ..., W_L`.
        inputs: `x -> U_l x + b_l`, for each layer.
        activations: `s_1, ..., s_L`.
        alpha: `alpha`, shared or one for each layer, in (0, 1].
        learn_alpha: Whether `alpha` is trained, one number if it is shared. A fraction of exactly 1
            starts at 0.9999, from where it moves slowly.
        mu: The scale `mu`.
        norm: How norms are controlled: `none`; `scale` divides each weight by its norm where that
            is too large, within the layer and differentiably; `project` leaves that to
            `project_norms`, after each optimiser step; `orthogonal` lets that bring all singular
            values to the bound, so that no layer loses what the others made.
        bound: The largest `|W_l|` that control allows, in units of `sqrt(mu/L_s)`, where layers
            stop being nonexpansive.
        start: Whether a solve starts at the input, as the paper's does, or at zero.
    """

    linearize_keeps_graph = True
    idle_remedy = "Try norm='orthogonal', or a smaller alpha."

    def __init__(
        self,
        operators: Sequence[Operator],
        inputs: Sequence[nn.Module],
        activations: Sequence[Activation],
        *,
        alpha: float | Sequence[float] = 0.8,
        learn_alpha: bool = False,
        mu: float = 1.0,
        norm: Norm = "scale",
        bound: float = BOUND,
        start: bool = False,
    ) -> None:
        super().__init__()
        if not len(operators) == len(inputs) == len(activations):
            counts = f"{len(operators)}, {len(inputs)} and {len(activations)}"
            raise ValueError(
                f"OptEqCell must have as many operators as inputs and activations; got {counts}."
            )
        self.operators = nn.ModuleList(operators)
        self.inputs = nn.ModuleList(inputs)
        self.activations = tuple(activations)
        require_positive("OptEq.mu", mu)
        require_flag("OptEq.learn_alpha", learn_alpha)
        require_norm_control(norm, bound)
        self.mu = float(mu)
        self.norm = norm
        self.bound = float(bound)
        self.start = start
        self._control = NormControl()
        self._gram = Gram()
        self.symmetric = len(operators) == 1
        self.shared_alpha = not isinstance(alpha, list | tuple)
        values = _numbers(alpha)
        if not self.shared_alpha and len(values) != len(operators):
            raise ValueError(
                f"OptEq.alpha must be one number or one for each of the {len(operators)} "
                f"layers; got {len(values)}."
            )
        self.fixed_alpha: tuple[float, ...] | None = tuple(values)
        if learn_alpha:
            inside = torch.tensor(values).clamp(max=1 - 1e-4)  # 1 itself is at the end of the line
            self.alpha_logit = nn.Parameter(torch.logit(inside))
            self.fixed_alpha = None

    @property
    def alpha(self) -> tuple[Tensor | float, ...]:
        """The fraction of the new value in each layer: numbers if they are fixed, else tensors."""
        values: Sequence[Tensor | float] = self.fixed_alpha or tuple(
            torch.sigmoid(self.alpha_logit)
        )
        return tuple(values) * len(self.operators) if self.shared_alpha else tuple(values)

    def limit(self, layer: int) -> float:
        """The largest norm that control allows a layer's weight: `bound sqrt(mu/L_s)`."""
        slope = self.activations[layer].slopes[1]
        return self.bound * math.sqrt(self.mu / slope) if slope > 0 else math.inf

    def effective_weights(self) -> list[OperatorWeights]:
        """Return the weights of each layer after norm control, differentiable."""
        made = [operator.weights() for operator in self._operators]
        if self.norm != "scale":
            return made
        return [
            self._control.scale(layer, operator, weights, self.limit(layer))
            for layer, (operator, weights) in enumerate(zip(self._operators, made, strict=True))
        ]

    @torch.no_grad()
    def norms(self) -> dict[str, float]:
        """Return a proven upper bound of `|W_l|` for each layer, after norm control."""
        pairs = zip(self._operators, self.effective_weights(), strict=True)
        return {
            str(layer): float(operator.bound(weights))
            for layer, (operator, weights) in enumerate(pairs, start=1)
        }

    @property
    def norm_limit(self) -> float | None:
        """`sqrt(mu/L_s)`, beyond which a layer expands, if it is the same for all layers."""
        slopes = {activation.slopes[1] for activation in self.activations}
        slope = slopes.pop()
        return None if slopes or slope <= 0 else math.sqrt(self.mu / slope)

    @torch.no_grad()
    def certificate(self) -> Certificate:
        """Return `prod_l (alpha_l L_s |W_l|^2/mu + 1 - alpha_l)` with all that it is made of."""
        factors = self._factors()
        infinite = any(factor.value == math.inf for factor in factors)  # 0 times it is NaN
        bound = math.inf if infinite else round_up(math.prod(factor.value for factor in factors))
        return Certificate(
            (Link(type(self).__name__, bound),),
            factors,
            frame_statements(self._operators) if self.norm == "orthogonal" else (),
            remedy="Call project_norms after each optimiser step."
            if self.projects
            else "Use norm='scale', or norm='project' with project_norms.",
        )

    def _factors(self) -> tuple[Factor, ...]:
        weights = self.effective_weights()
        return layer_factors(self._operators, weights, self.activations, self.alpha, self.mu)

    @torch.no_grad()
    def input_lipschitz(self) -> Part:
        """Return how far the step moves with the input, by the layers' proven norms."""
        inputs = list(self.inputs)
        return input_part(self._factors(), self.activations, self.alpha, inputs, self.mu)

    @torch.no_grad()
    def problem(self, x: Tensor) -> Problem:
        """Return the convex problem of one layer, or the inclusion of several, at the input `x`."""
        return state_problem(self.potentials(x), [float(alpha) for alpha in self.alpha])

    @torch.no_grad()
    def potentials(self, x: Tensor) -> list[Potential]:
        """Return the layers at the input `x` as gradients of their potentials, in float64."""
        self._check(x)
        return [
            Potential(operator, weights, activation, inject(x), self.mu)
            for operator, weights, activation, inject in zip(
                self._operators,
                self.effective_weights(),
                self.activations,
                self.inputs,
                strict=True,
            )
        ]

    @property
    def _operators(self) -> list[Operator]:
        return list(self.operators)  # type: ignore[arg-type]

    def _check(self, x: Tensor) -> None:
        for operator in self._operators:
            operator.check(x)

    def inject(self, x: Tensor) -> Any:
        self._check(x)
        x = _channels_last(x)
        parts = []
        for operator, weights, inject, alpha in zip(
            self._operators, self.effective_weights(), self.inputs, self.alpha, strict=True
        ):
            turned = operator.transposed(weights)
            # alpha and mu ride on the adjoint's weights: one pass over the state less in each step.
            factor = alpha / self.mu
            turned = (
                turned
                if isinstance(factor, float) and factor == 1
                else operator.scaled(turned, factor)
            )
            rest = Shared(1 - alpha) if isinstance(alpha, Tensor) else None
            # Weights in the layout of the states, or each convolution would copy them.
            weights, turned = (tuple(map(_channels_last, group)) for group in (weights, turned))
            parts.append((inject(x), tuple(map(Shared, weights)), tuple(map(Shared, turned)), rest))
        return parts

    def initial(self, x: Tensor, context: Any) -> Tensor:
        if self.start:
            return _channels_last(x)
        return self._operators[0].zeros(context[0][0])

    def step(self, z: Tensor, context: Any) -> Tensor:
        for layer in zip(self._operators, self.activations, self._rest, context, strict=True):
            z = _apply(z, *layer)
        return z

    def part_weights(self) -> dict[str, list[Tensor]]:
        """Return the weights `W_l` of each layer, if there are several."""
        several = len(self.operators) > 1
        pairs = enumerate(self._operators if several else (), start=1)
        return {str(number): list(operator.weights()) for number, operator in pairs}

    @torch.no_grad()
    def contributions(self, z: Tensor, context: Any) -> dict[str, float]:
        """Return `|T(z) - T_l(z)| / |T(z)|` for each layer, with it left out of `T` as `T_l`."""
        layers = list(zip(self._operators, self.activations, self._rest, context, strict=True))
        states = [z]
        for layer in layers:
            states.append(_apply(states[-1], *layer))
        size = torch.linalg.vector_norm(states[-1])
        found = {}
        for number in range(1, len(layers) + 1 if len(layers) > 1 else 1):
            without = states[number - 1]
            for layer in layers[number:]:
                without = _apply(without, *layer)
            found[str(number)] = float(torch.linalg.vector_norm(states[-1] - without) / size)
        return found

    @property
    def _rest(self) -> Sequence[float | None]:
        """`1 - alpha` of each layer, where it is fixed."""
        if self.fixed_alpha is None:
            return (None,) * len(self.operators)
        values = [1 - value for value in self.fixed_alpha]
        return values * len(self.operators) if self.shared_alpha else values

    def linearize(self, z: Tensor, context: Any) -> Linearization | None:
        if not all(activation.elementwise for activation in self.activations):
            return None
        slopes: list[Tensor] = []
        linear: list[LinearLayer] = []
        for operator, activation, fixed, (c, weights, turned, rest) in zip(
            self._operators, self.activations, self._rest, context, strict=True
        ):
            rest = fixed if rest is None else rest
            a = operator.affine_with(weights, z, c)
            slopes.append(activation.derivative(a.detach()))
            linear.append(LinearLayer(operator, weights, turned, rest).detach())
            hidden = activation(a) if is_recorded(a) else activation.overwrite(a)
            z = add_skip(operator.adjoint_with(turned, hidden), z, rest)
        return linearize_layers(
            z,
            slopes,
            linear,
            self._reduce(slopes, linear),
            lambda: run_products(linear, self.activations[0], slopes[0]),
        )

    def compiled_runs(self, z: Tensor, context: Any) -> CompiledRuns | None:
        if type(self).step is not OptEqCell.step or len(self.operators) > 1:
            return None
        ((c, weights, turned, rest),) = context
        rest = self._rest[0] if rest is None else rest
        layer = LinearLayer(self._operators[0], weights, turned, rest).detach()
        return run_values(layer, self.activations[0], c.detach())

    def _reduce(
        self, slopes: Sequence[Tensor], layers: Sequence[LinearLayer]
    ) -> Callable[[Tensor], ReducedSystem] | None:
        """Return how one layer's linear equations are written in hidden units, where that pays."""
        if len(layers) > 1 or is_wrapped(slopes[0]):
            return None
        layer, slope = layers[0], slopes[0]
        K = self._gram.find(layer.operator, layer.weights, len(slope), stays=not self.training)
        return None if K is None else lambda g: hidden_system(g, layer, slope, K, self.mu)

    def coordinates(self, z: Tensor, context: Any) -> Coordinates | None:
        if type(self).step is not OptEqCell.step or len(self.operators) > 1:
            return None
        ((c, weights, turned, rest),) = context
        (operator,), (activation,) = self._operators, self.activations
        K = self._gram.find(operator, weights, len(z), stays=not self.training)
        if K is None:
            return None
        rest = self._rest[0] if rest is None else rest
        layer = LinearLayer(operator, weights, turned, rest).detach()
        part = float(rest or 0.0)
        units = HiddenUnits(layer, activation, c.detach(), K, (1 - part) / self.mu, part)
        return units.coordinates(z)

    def lipschitz(self) -> float | None:
        """Return `prod_l (alpha_l bound^2 + 1 - alpha_l)` where norms are divided, at no cost."""
        if self.norm != "scale":
            return None
        if any(isinstance(alpha, Tensor) and is_wrapped(alpha) for alpha in self.alpha):
            return None
        fractions = [
            float(alpha.detach()) if isinstance(alpha, Tensor) else alpha for alpha in self.alpha
        ]
        return math.prod(averaged(self.bound**2, alpha) for alpha in fractions)

    @property
    def projects(self) -> bool:
        return self.norm in ("project", "orthogonal")

    @torch.no_grad()
    def project_(self) -> None:
        """Divide weights whose norm is too large, or make them orthogonal, in place."""
        bring = orthogonalize_ if self.norm == "orthogonal" else self._control.project_
        for layer, operator in enumerate(self._operators):
            bring(layer, operator, self.limit(layer))

    def draw_(self, init: Init) -> None:
        """Draw the operators' weights, all singular values equal if that is wanted.

        Args:
            init: `small` leaves them as their own classes drew them; `orthogonal` draws frames, for
                a convolution at the kernel's centre, as large as the norm's limit allows; `auto` is
                `orthogonal` where norms are controlled so, else `small`.
        """
        choose("OptEq.init", init, get_args(Init))
        if init == "orthogonal" or (init == "auto" and self.norm == "orthogonal"):
            draw_frames_(self._operators, [self.limit(n) for n in range(len(self.operators))])


def _apply(
    z: Tensor, operator: Operator, activation: Activation, fixed: float | None, context: Any
) -> Tensor:
    """One layer: `alpha W^T s(W z + c) + (1 - alpha) z`."""
    c, weights, turned, rest = context
    a = operator.affine_with(weights, z, c)
    hidden = activation(a) if is_recorded(a) else activation.overwrite(a)
    return add_skip(operator.adjoint_with(turned, hidden), z, fixed if rest is None else rest)


def _numbers(alpha: float | Sequence[float]) -> list[float]:
    given: list[object] = list(alpha) if isinstance(alpha, list | tuple) else [alpha]
    for value in given:
        require_fraction("OptEq.alpha", value)
    return [float(value) for value in given]  # type: ignore[arg-type]


def _channels_last(x: Tensor) -> Tensor:
    """Lay images out as convolutions on a CPU run fastest; everything that follows keeps it."""
    return (
        x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 and not is_wrapped(x) else x
    )
