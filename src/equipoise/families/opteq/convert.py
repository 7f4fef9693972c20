"""Feed-forward networks as OptEqs, and deep OptEqs as wide ones (OptEq, Lemmas 1 to 3)."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Unpack

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from equipoise.core.validate import SettingError
from equipoise.families.opteq.cell import OptEqCell
from equipoise.families.opteq.conv import OptEqConv2d
from equipoise.families.opteq.convert_network import convert_network
from equipoise.families.opteq.feedforward import factorize, read
from equipoise.families.opteq.layer import OptEq
from equipoise.layers.cell import Cell
from equipoise.layers.options import SolveOptions
from equipoise.operators import Convolution, Dense
from equipoise.prox.activation import Activation, Identity

__all__ = ["Blocks", "HiddenUnits", "to_blocks", "to_hidden_units", "to_opteq", "to_wide"]

SINGLE_PASS: SolveOptions = {"solver": "fixed_point"}
"""How a converted network is solved by default: its equilibrium is reached in one pass."""


class HiddenUnits(nn.Module):
    """A feed-forward network whose every layer has the form of an OptEq (OptEq, Lemma 1).

    `z_1 = Wb_0^T x`, `z_k+1 = Wb_k^T s_k(Wb_k z_k + b_k)`, `y = Wb_K+1 z_K+1 + b_K+1`.

    A feed-forward network whose every layer has the form of an OptEq; `to_hidden_units` makes it.

    Args:
        weights: `Wb_0, ..., Wb_K+1`, of shape (n_k, m); copied.
        biases: `b_1, ..., b_K+1`; copied.
        activations: `s_1, ..., s_K`.
        first: What is done to the input before.
        last: What is done to the output after.

    Shape:
        (batch, n_0) to (batch, n_K+1).
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor],
        activations: Sequence[Activation],
        first: nn.Module | None = None,
        last: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if not len(weights) == len(biases) + 1 == len(activations) + 2:
            raise ValueError(
                "HiddenUnits.weights must be two more than the activations, and the biases "
                "one more; "
                f"got {len(weights)}, {len(biases)} and {len(activations)}."
            )
        self.weights = nn.ParameterList([nn.Parameter(W.detach().clone()) for W in weights])
        self.biases = nn.ParameterList([nn.Parameter(b.detach().clone()) for b in biases])
        self.activations = tuple(activations)
        self.first = first or nn.Identity()
        self.last = last or nn.Identity()

    @property
    def state_features(self) -> int:
        """The length `m` of the states."""
        return int(self.weights[0].shape[1])

    def forward(self, x: Tensor) -> Tensor:
        """Return `y`."""
        into, *own, out = self.weights
        z = self.first(x) @ into
        for W, b, activation in zip(own, self.biases, self.activations, strict=False):
            z = activation(F.linear(z, W, b)) @ W
        y: Tensor = self.last(F.linear(z, out, self.biases[-1]))
        return y


def to_hidden_units(net: object, state_features: int | None = None) -> HiddenUnits:
    """Rewrite a network so that each of its layers has the form of an OptEq (OptEq, Lemma 1).

    `A_k = Wb_k Wb_k-1^T` for the weights `A_k` of the network, to a few roundings. The weights are
    copies, in its precision.

    Args:
        net: An `nn.Sequential` of `nn.Linear` and admissible activations, or a fitted
            `MLPClassifier` or `MLPRegressor` of scikit-learn, which becomes float64 and gives what
            `predict_proba` gives, or `predict` as a column for each output. `nn.Flatten` may come
            first, `nn.Identity` and dropout in evaluation mode anywhere, an activation or softmax
            last.
        state_features: The length `m` of the states; by default the largest sum of the widths of
            two neighbouring hidden layers. If that would lose digits, as for units of one layer
            that differ much in scale, three neighbours, with which the products are exact. The
            least possible is the largest `n_k + n_k+1 - rank(A_k+1)`.
    """
    parts = read(net, "to_hidden_units")
    return HiddenUnits(
        factorize(parts, state_features, "to_hidden_units"),
        parts.biases,
        parts.activations,
        parts.first,
        parts.last,
    )


def to_opteq(
    net: object,
    state_features: int | None = None,
    *,
    input_shape: Sequence[int] | None = None,
    **solve: Unpack[SolveOptions],
) -> nn.Sequential:
    """Return a deep OptEq and a head that compute what a network computes (OptEq, Lemma 2).

    `W_1 = 0`, `U_2 = A_1`, all other `U = 0`, `alpha = 1`, and the biases are `b_l`: the first
    layer forgets the state, so that a single pass reaches the equilibrium. Gradient descent leaves
    the first layer as it is and trains all others. The parts of the result are called `first`
    (where there is an `nn.Flatten`), `equilibrium`, `head` and `last` (where something follows).

    With an `input_shape` the network may have convolutions and shortcuts (`x + f(x)`), whatever its
    class: its `forward` is followed. Convolutions, linear layers, average pooling, batch
    normalisation in evaluation mode (which becomes part of the weights before it), flattening and
    sums are affine; max pooling is made of `max(a, b) = a + relu(b - a)`, which takes a layer for
    each doubling of the window. Each layer has the operator of `equipoise.families.opteq.wiring`,
    whose matrices are the network's own: its kernels are trained as kernels.

    Args:
        net: As for `to_hidden_units`; with an `input_shape` any such `nn.Module`.
        state_features: As for `to_hidden_units`; follows from the network with an `input_shape`.
        input_shape: The shape of a sample, such as (3, 32, 32), for convolutional and residual
            networks.
        **solve: See `SolveOptions`; the solver is `fixed_point` by default.
    """
    if input_shape is not None:
        if state_features is not None:
            rule = "be left out with an input_shape, from which it follows"
            raise SettingError("to_opteq.state_features", rule, state_features)
        return convert_network(net, input_shape, SINGLE_PASS | solve)
    parts = read(net, "to_opteq")
    _, *own, out = factorize(parts, state_features, "to_opteq")
    A = parts.matrices[0]
    layer = OptEq(
        A.shape[1],
        out.shape[1],
        [1, *(len(W) for W in own)],
        # One unit that is zero at zero: its weight's gradient vanishes too.
        activation=[Identity(), *parts.activations],
        alpha=1.0,
        norm="none",
        **(SINGLE_PASS | solve),
    )
    cell = layer.layers
    forgetting = out.new_zeros(1, out.shape[1])
    for place, (W, b) in enumerate(
        zip([forgetting, *own], [forgetting[0, :1], *parts.biases[:-1]], strict=True)
    ):
        _set(cell.operators[place], weight=W)
        _set(
            cell.inputs[place], weight=A if place == 1 else A.new_zeros(len(W), A.shape[1]), bias=b
        )
    head = nn.Linear(out.shape[1], out.shape[0])
    _set(head, weight=out, bias=parts.biases[-1])
    named = {"first": parts.first, "equilibrium": layer, "head": head, "last": parts.last}
    return nn.Sequential(
        OrderedDict((name, module) for name, module in named.items() if module is not None)
    )


def to_wide(deep: OptEq | OptEqConv2d) -> OptEq | OptEqConv2d:
    """Return the wide layer that a deep OptEq tends to as `alpha` goes to 0 (OptEq, Theorem 3).

    `alpha` must be the same in all layers.

    `L mu y = sum_l W_l^T s(W_l y + U_l x + b_l)`: the weights of all layers in one, with `L mu` for
    `mu` and 1 for `alpha`. It gets copies of the weights after norm control, and the same control:
    as `|W|^2 <= sum_l |W_l|^2`, the wide layer is within its bound.

    Args:
        deep: An `OptEq` or `OptEqConv2d` with one activation, no regulariser and no separable or
            pooled convolutions.
    """
    cell = _layers(deep, "to_wide")
    one, *others = set(cell.activations)
    if others or not one.elementwise:
        names = ", ".join(str(own) for own in cell.activations)
        raise ValueError(
            f"to_wide.deep must have one elementwise activation for all layers; got {names}."
        )
    fractions = sorted({float(own) for own in cell.alpha})
    if len(fractions) > 1:
        rule = "have one alpha for all layers, which tend to a wide layer together"
        raise SettingError("to_wide.deep", rule, None, got=", ".join(map(str, fractions)))
    operators = list(cell.operators)
    if not all(isinstance(own, Dense | Convolution) for own in operators):
        raise ValueError(
            "to_wide.deep must have plain matrices or convolutions as weights; got separable or "
            "pooled ones."
        )
    inner: list[Any] = [
        own[-1] if isinstance(own, nn.Sequential) else own for own in cell.inputs
    ]  # an even kernel needs padding
    options: dict[str, Any] = {
        "activation": one,
        "alpha": 1.0,
        "norm": cell.norm,
        "solver": deep.solver or "auto",
        "gradient": deep.gradient,
        "on_failure": deep.solves.on_failure,
        "eval_options": deep.eval_options,
        "mu": len(operators) * cell.mu,
        "bound": cell.bound,
        "bias": inner[0].bias is not None,
        "stop": deep.stop,
    }
    weights = [own for (own,) in cell.effective_weights()]
    width = sum(len(W) for W in weights)
    wide: OptEq | OptEqConv2d
    if isinstance(deep, OptEq):
        wide, groups = OptEq(deep.in_features, deep.state_features, width, **options), 1
        _set(wide.layers.operators[0], weight=_stack(weights, 1))
    else:
        operator: Any = operators[0]
        groups = operator.groups
        options |= {
            "kernel_size": tuple(operator.kernel.shape[2:]),
            "padding": operator.padding,
            "groups": groups,
        }
        wide = OptEqConv2d(deep.in_channels, deep.state_channels, width, **options)
        _set(wide.layers.operators[0], kernel=_stack(weights, groups))
    target: Any = wide.layers.inputs[0]
    target = target[-1] if isinstance(target, nn.Sequential) else target
    for name in ("weight", "bias") if options["bias"] else ("weight",):
        _set(target, **{name: _stack([getattr(own, name) for own in inner], groups)})
    return wide


class Blocks(Cell):
    """The layers of a deep OptEq side by side (OptEq, Lemma 3).

    `zt = alpha Wt^T s(Wt P zt + Ut x + bt) + (1 - alpha) P zt`.

    `P` moves each block of the state on by one place, `Wt` is block diagonal. An equilibrium is
    `zt = [z_1, ..., z_L-1, z_0]`, all the states of one pass through the deep network at its
    equilibrium `z_0`.

    Args:
        layers: The layers, as cells of their own.
    """

    def __init__(self, layers: Sequence[OptEqCell]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    @property
    def _layers(self) -> list[OptEqCell]:
        return list(self.layers)  # type: ignore[arg-type]

    def inject(self, x: Any) -> Any:
        return [layer.inject(x) for layer in self._layers]

    def initial(self, x: Any, context: Any) -> Tensor:
        return torch.cat([self._layers[0].initial(x, context[0])] * len(self.layers), dim=1)

    def step(self, z: Any, context: Any) -> Tensor:
        *others, last = z.chunk(len(self.layers), dim=1)
        parts = zip(self._layers, [last, *others], context, strict=True)
        return torch.cat([layer.step(block, own) for layer, block, own in parts], dim=1)

    def lipschitz(self) -> float | None:
        bounds = [layer.lipschitz() for layer in self._layers]
        known = [bound for bound in bounds if bound is not None]
        return max(known) if len(known) == len(bounds) else None


def to_blocks(deep: OptEq | OptEqConv2d) -> Blocks:
    """Return the cell whose equilibrium holds all states of a deep OptEq (OptEq, Lemma 3).

    They are those of one pass through the deep OptEq at its equilibrium.

    The state is `[z_1, ..., z_L-1, z_0]` along its second axis, where `z_0` is the deep network's
    equilibrium and `z_l` is what its first `l` layers make of it. Weights are copied; a learned
    `alpha` becomes a fixed number.

    Args:
        deep: An `OptEq` or `OptEqConv2d` without a regulariser.
    """
    cell = _layers(deep, "to_blocks")
    parts = zip(cell.operators, cell.inputs, cell.activations, cell.alpha, strict=True)
    return Blocks(
        [
            OptEqCell(
                [copy.deepcopy(operator)],  # type: ignore[list-item]
                [copy.deepcopy(inputs)],
                [activation],
                alpha=float(alpha.detach()) if isinstance(alpha, Tensor) else alpha,
                mu=cell.mu,
                norm=cell.norm,
                bound=cell.bound,
                start=cell.start,
            )
            for operator, inputs, activation, alpha in parts
        ]
    )


def _layers(deep: object, owner: str) -> OptEqCell:
    if not isinstance(deep, OptEq | OptEqConv2d):
        raise ValueError(
            f"{owner}.deep must be an OptEq or OptEqConv2d; got {type(deep).__name__}."
        )
    if deep.cell is not deep.layers:
        raise ValueError(
            f"{owner}.deep must have no regulariser, which is not one of its layers; got one."
        )
    return deep.layers


def _set(module: nn.Module, **tensors: Tensor) -> None:
    for name, value in tensors.items():
        setattr(module, name, nn.Parameter(value.detach().clone()))


def _stack(tensors: Sequence[Tensor], groups: int) -> Tensor:
    """Join along the first axis, so that what belongs to one group of channels stays together."""
    grouped = [own.reshape(groups, -1, *own.shape[1:]) for own in tensors]
    return torch.cat(grouped, dim=1).flatten(0, 1)
