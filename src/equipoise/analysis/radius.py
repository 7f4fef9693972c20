"""Certified radii: how far a sample may be moved before the predicted class can change.

Let logits `y` have the margin `y_c - y_j` of the predicted class `c` over `j`, which moves by at
most `K_cj |dx|`. Then no `dx` shorter than `min_j (y_c - y_j)/K_cj` makes `j` the winner. There are
two rules:

    2L        K = 2 L, with the Lipschitz constant `L` of the whole network;
    pairwise  K_cj, of the difference of two outputs: at most `sqrt(2) L` (Tsuzuku et al., 2018),
              and `|w_c - w_j|` times the constant of the features that the last rows `w` act on.

All is said of the network with exact equilibria. What is known of those are approximate ones, so
that margins are lowered by what the error of the solve may do to them:
`|y - y*| <= k |f(z) - z|` for each equilibrium (`Cell.error_factor`), times how far outputs move
with it. Solves are made in float64 and to a small residual, which is computed anew.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from equipoise.analysis.lipschitz import NetworkBound, SolveError, lipschitz_bound
from equipoise.core.errors import ConvergenceWarning
from equipoise.core.tree import Layout, Tree, row_norm
from equipoise.core.validate import SettingError, require_count, require_positive
from equipoise.layers import Bound, Equilibrium

__all__ = ["CertifiedRadii", "RadiusCertifier", "certified_accuracy", "require_radii"]

TOLERANCE = 1e-10
MAX_STEPS = 2000
ROUNDING = 1e-9
"""What logits and residuals may be off by, relatively, besides the error of the solve: far more
than what the sums of a network lose in float64."""


@dataclass(frozen=True)
class CertifiedRadii:
    """What is proved of some samples, one entry for each.

    Attributes:
        predicted: The predicted class.
        radius: No move shorter than this changes it: the larger of both rules.
        by_norm: What the 2L rule proves.
        pairwise: What the pairwise rule proves.
        error: How much the margin is lowered for inexact solves and rounding.
    """

    predicted: Tensor
    radius: Tensor
    by_norm: Tensor
    pairwise: Tensor
    error: Tensor

    @classmethod
    def concatenate(cls, several: Sequence[CertifiedRadii]) -> CertifiedRadii:
        """Return those of several batches as one."""
        names = ("predicted", "radius", "by_norm", "pairwise", "error")
        return cls(*(torch.cat([getattr(one, name) for one in several]) for name in names))


class RadiusCertifier:
    """Computes certified radii of samples.

    Args:
        model: The network, whose outputs are a number for each class. A copy in float64 is used.
        first: What is done to samples before the network gets them: how far that moves them.
        prepare: Does that.
        tolerance: Relative residual to which the copy solves.
        max_steps: Updates at most.
        x: A sample, for parts whose constant depends on the size of images.

    Attributes:
        bound: The Lipschitz constant, of `prepare` and the network.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        first: Sequence[Bound] = (),
        prepare: Callable[[Tensor], Tensor] | None = None,
        tolerance: float = TOLERANCE,
        max_steps: int = MAX_STEPS,
        x: Tensor | None = None,
    ) -> None:
        require_positive("RadiusCertifier.tolerance", tolerance)
        require_count("RadiusCertifier.max_steps", max_steps)
        self.model = copy.deepcopy(model).double().eval().requires_grad_(False)
        self.prepare = prepare or (lambda sample: sample)
        for module in self.model.modules():
            if isinstance(module, Equilibrium):
                module.stop = replace(module.stop, tolerance=tolerance, max_steps=max_steps)
                module.eval_options = {}
                module.solves.on_failure = "ignore"  # the error counts, whatever the status is
        seen = None if x is None else self.prepare(x.double())
        self.bound: NetworkBound = lipschitz_bound(self.model, seen).with_input(first)

    @torch.no_grad()
    def logits(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the outputs for samples, and `|f(z) - z|` of each equilibrium, in float64.

        Args:
            x: The samples, before `prepare`.
        """
        with _listening(self.model) as found, warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            y = self.model(self.prepare(x.double()))
        if not isinstance(y, Tensor) or y.dim() != 2 or y.shape[1] < 2:
            shape = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise SettingError(
                "certified radii",
                "be asked of a network with a number for each of two or more classes",
                None,
                got=f"outputs of shape {shape}",
            )
        return y, found

    @torch.no_grad()
    def radii(self, x: Tensor) -> CertifiedRadii:
        """Return the certified radii of samples, in the units of `x`.

        Args:
            x: The samples, before `prepare`.
        """
        y, residuals = self.logits(x)
        top = y.max(dim=1)
        margins = top.values[:, None] - y  # (samples, classes)
        others = torch.ones_like(margins).scatter_(1, top.indices[:, None], 0.0) > 0
        noise = 2 * ROUNDING * y.abs().amax(dim=1, keepdim=True)
        error = noise + self._solve_errors(residuals, top.indices, margins)
        proved = (margins - error).nan_to_num(-math.inf)
        by_norm = _least(proved, others, torch.full_like(margins, 2 * self.bound.value))
        spread = torch.full_like(margins, math.sqrt(2) * self.bound.value * (1 + 1e-12))
        pairs = _fitting(self.bound.pairs, y)
        if pairs is not None:
            spread = torch.minimum(spread, pairs[top.indices])
        pairwise = _least(proved, others, spread)
        worst = error.masked_fill(~others, 0.0).amax(dim=1)
        radius = torch.maximum(by_norm, pairwise)
        return CertifiedRadii(top.indices, radius, by_norm, pairwise, worst)

    def _solve_errors(
        self, residuals: dict[str, Tensor], classes: Tensor, margins: Tensor
    ) -> Tensor:
        """What inexact equilibria may do to the margins, shape (samples, classes)."""
        total = torch.zeros_like(margins)
        for error in self.bound.errors:
            off = error.factor * residuals[error.name] * (1 + ROUNDING)
            total = total + off[:, None] * _margin_factor(error, classes, margins)
        if set(residuals) != {error.name for error in self.bound.errors}:
            return total + math.inf  # an equilibrium of which nobody knows what it does
        return total


def _margin_factor(error: SolveError, classes: Tensor, margins: Tensor) -> Tensor:
    """How far margins move with the output of an equilibrium."""
    whole = torch.full_like(margins, math.sqrt(2) * error.output * (1 + 1e-12))
    pairs = _fitting(error.pairs, margins)
    return whole if pairs is None else torch.minimum(whole, pairs[classes])


def _fitting(pairs: Tensor | None, y: Tensor) -> Tensor | None:
    """Bounds of pairs, unless the last map acts on parts of a sample: they are of its outputs."""
    return None if pairs is None or len(pairs) != y.shape[1] else pairs.to(y)


def _least(margins: Tensor, others: Tensor, constants: Tensor) -> Tensor:
    """The least ratio over the other classes, rounded down; 0 where nothing is proved."""
    ratios = (margins / constants).masked_fill(~others, math.inf)
    least = ratios.amin(dim=1) * (1 - 1e-12)
    return least.nan_to_num(0.0).clamp_min(0.0)


def certified_accuracy(radius: Tensor, correct: Tensor, at: Sequence[float]) -> dict[float, float]:
    """Return the fraction of samples that are predicted right, whatever a move of a length does.

    Args:
        radius: Certified radii.
        correct: Whether samples are predicted right.
        at: Lengths, positive.
    """
    require_radii("certified_accuracy.at", at)
    return {length: float((correct & (radius > length)).double().mean()) for length in at}


def require_radii(key: str, radii: Sequence[float]) -> None:
    """Raise unless all radii are positive numbers.

    Args:
        key: What to call them.
        radii: The radii.
    """
    for radius in radii:
        require_positive(key, radius)


@contextmanager
def _listening(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Collect `|f(z) - z|` of each equilibrium layer for what is solved in the context."""
    found: dict[str, Tensor] = {}

    def listen(name: str, layer: Equilibrium, stack: ExitStack) -> None:
        def measure(_: nn.Module, inputs: tuple[Tree, ...], __: Tree) -> None:
            assert layer.last is not None
            residual = _residual(layer, inputs[0], layer.last.value)
            # A layer may be used more than once: its largest residual counts.
            found[name] = torch.maximum(found.get(name, residual), residual)

        stack.callback(layer.register_forward_hook(measure).remove)

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if isinstance(module, Equilibrium):
                listen(name or "equilibrium", module, stack)
        yield found


def _residual(layer: Equilibrium, x: Tree, z: Tree) -> Tensor:
    """`|f(z) - z|` of each sample, and what rounding may have hidden of it."""
    layout = Layout(z)
    value = layout.pack(layer.map(x)(z), "step")
    gap = row_norm(value - layout.pack(z, "z"))
    return gap + 1e-14 * math.sqrt(value.shape[1]) * row_norm(value)
