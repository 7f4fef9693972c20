"""OptEq on vectors: the equilibrium minimises a convex function that can be written down."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from torch import Tensor, nn

from equipoise.core.validate import require_count, require_positive
from equipoise.families.opteq.cell import OptEqCell
from equipoise.families.opteq.norm_control import BOUND, Init, Norm
from equipoise.layers.equilibrium import Equilibrium
from equipoise.layers.options import SolveOptions
from equipoise.layers.wrappers import Regularized
from equipoise.operators import Dense
from equipoise.prox.activation import Activation
from equipoise.prox.matrix import MatrixActivation
from equipoise.prox.regularizer import Regularizer
from equipoise.prox.resolve import as_activation
from equipoise.solvers.protocol import SOLVERS
from equipoise.solvers.sam import SAM

__all__ = [
    "ActivationLike",
    "OptEq",
    "OptEqLayer",
    "RegularizerLike",
    "Shape",
    "each_activation",
    "each_width",
]

Shape = tuple[int | str, ...]
RegularizerLike = str | Mapping[str, Any] | Regularizer | Callable[[Tensor], Tensor]
ActivationLike = str | Mapping[str, Any] | Activation | nn.Module | Callable[[Tensor], Tensor]


class OptEqLayer(Equilibrium):
    """What the two kinds of OptEq share: a cell of operators, perhaps with a regulariser."""

    def __init__(
        self,
        cell: OptEqCell,
        regularizer: RegularizerLike | None,
        strength: float,
        **solve: Unpack[SolveOptions],
    ) -> None:
        solver = solve.get("solver", "auto")
        if solver != "auto":
            solve["solver"] = solver = SOLVERS.resolve(solver, also=["auto"])
        if isinstance(solver, SAM) and solver.couples:
            cell.coupled = True
        require_positive("OptEq.strength", strength)
        whole = cell if regularizer is None else Regularized(cell, regularizer, strength)
        super().__init__(whole, **solve)

    @property
    def layers(self) -> OptEqCell:
        """The cell of the layers themselves, without the regulariser."""
        cell = self.cell.cell if isinstance(self.cell, Regularized) else self.cell
        assert isinstance(cell, OptEqCell)
        return cell

    def check(self, x: Tensor, z0: Tensor | None = None) -> None:
        """Raise unless `x` is an input of this layer, and `z0` a state to start at."""
        sizes: dict[str, int] = {}
        for name, given, wanted in zip(("input", "z0"), (x, z0), self._shapes(), strict=True):
            if name == "z0" and z0 is None:
                continue
            if not isinstance(given, Tensor):
                raise ValueError(
                    f"{type(self).__name__} {name} must be a tensor; got {type(given).__name__}."
                )
            if not wanted:
                continue
            wanted = tuple(sizes.get(m, m) if isinstance(m, str) else m for m in wanted)
            fits = given.dim() == len(wanted) and all(
                n == m for n, m in zip(given.shape, wanted, strict=True) if isinstance(m, int)
            )
            if fits:
                pairs = zip(wanted, given.shape, strict=True)
                sizes |= {m: n for m, n in pairs if isinstance(m, str)}
            else:
                shape = ", ".join(map(str, wanted))
                raise ValueError(
                    f"{type(self).__name__} {name} must have shape ({shape}); got "
                    f"{tuple(given.shape)}."
                )

    def _shapes(self) -> tuple[Shape, Shape]:
        """The shapes of inputs and states, where they are known.

        Names stand for any number, the same in both.
        """
        return (), ()

    def project_(self) -> None:
        """Divide the weights whose norm is larger than the limit, in place."""
        self.layers.project_()


class OptEq(OptEqLayer):
    """An equilibrium layer on vectors that solves a convex problem (OptEq, eq. 5 and 6).

    `z = f_L o ... o f_1(z)`,
    `f_l(z) = (alpha_l/mu) W_l^T s(W_l z + U_l x + b_l) + (1 - alpha_l) z`. One layer minimises a
    convex function of `z` (Theorem 1); see `equipoise.objective`. With as many inputs as states a
    solve starts at the input.

    Args:
        in_features: Length of the input.
        state_features: Length of the state, which is the output.
        hidden: Rows of `W_l`, one number for each layer of the composition; a number means one
            layer.
        activation: `s`: a name (`relu`, `tanh`, ...), an `Activation`, a torch module; or one for
            each layer.
        alpha: Fraction of the new value in (0, 1], for all layers or one for each.
        norm: `none`, `scale` (divide by the exact norm where it exceeds `bound`, in the layer) or
            `project` (see `project_norms`); `orthogonal` is a projection that brings all singular
            values to `bound`, exactly, so that all layers of a composition count.
        regularizer: A feature regulariser added to the problem: a name, a `Regularizer` or a
            function (Theorem 4; see `Regularized` for what exactly is minimised). To choose among
            several equilibria instead, use `solver=SAM(regularizer)`.
        strength: Factor of the regulariser.
        mu: The scale `mu` of Theorem 1.
        bound: Largest norm of a controlled `W_l`, in units of `sqrt(mu/L_s)`, at most 1.
        learn_alpha: Whether `alpha` is trained.
        bias: Whether there are `b_l`.
        init: Weights to begin with: `small` (Gaussian, of norm about one half), `orthogonal` (all
            singular values as large as `bound` allows) or `auto`, which is `orthogonal` for
            `norm="orthogonal"`, else `small`.
        **solve: `solver`, `gradient`, `tolerance`, `max_steps`, `on_failure`, `stop`,
            `eval_options`; see `SolveOptions`.

    Shape:
        (batch, in_features) to (batch, state_features).
    """

    def __init__(
        self,
        in_features: int,
        state_features: int,
        hidden: int | Sequence[int],
        activation: ActivationLike | Sequence[ActivationLike] = "relu",
        alpha: float | Sequence[float] = 0.8,
        norm: Norm = "scale",
        regularizer: RegularizerLike | None = None,
        *,
        strength: float = 0.1,
        mu: float = 1.0,
        bound: float = BOUND,
        learn_alpha: bool = False,
        bias: bool = True,
        init: Init = "auto",
        **solve: Unpack[SolveOptions],
    ) -> None:
        widths = each_width("OptEq", hidden)
        for name, value in (("in_features", in_features), ("state_features", state_features)):
            require_count(f"OptEq.{name}", value)
        activations = each_activation(activation, len(widths))
        require_sizes("OptEq", activations, widths)
        cell = OptEqCell(
            [Dense(state_features, width) for width in widths],
            [nn.Linear(in_features, width, bias=bias) for width in widths],
            activations,
            alpha=alpha,
            learn_alpha=learn_alpha,
            mu=mu,
            norm=norm,
            bound=bound,
            start=in_features == state_features,
        )
        cell.draw_(init)
        super().__init__(cell, regularizer, strength, **solve)
        self.in_features = in_features
        self.state_features = state_features

    def _shapes(self) -> tuple[Shape, Shape]:
        return ("batch", self.in_features), ("batch", self.state_features)


def each_width(owner: str, hidden: int | Sequence[int]) -> list[int]:
    """Return the width of each layer, from one number or several."""
    widths = list(hidden) if isinstance(hidden, Sequence) else [hidden]
    if not widths:
        raise ValueError(f"{owner}.hidden must name at least one layer; got none.")
    for width in widths:
        require_count(f"{owner}.hidden", width)
    return widths


def each_activation(
    given: ActivationLike | Sequence[ActivationLike], layers: int
) -> list[Activation]:
    """Return the activation of each layer, from one for all or one for each."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        return [as_activation(given)] * layers
    if len(given) != layers:
        raise ValueError(
            f"OptEq.activation must be one or one for each of the {layers} layers; got "
            f"{len(given)}."
        )
    return [as_activation(one) for one in given]


def require_sizes(owner: str, activations: Sequence[Activation], widths: Sequence[int]) -> None:
    """Raise unless matrix activations have the sizes of their layers."""
    for activation, width in zip(activations, widths, strict=True):
        if isinstance(activation, MatrixActivation) and len(activation.S) != width:
            raise ValueError(
                f"{owner}.activation must have a matrix of the size of its layer, {width}; "
                f"got {len(activation.S)}."
            )
