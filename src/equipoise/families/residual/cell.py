"""The residual cell whose equilibria and loss surfaces the thesis looks at."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, get_args

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from equipoise.core.registry import choose
from equipoise.core.transforms import require_dtype
from equipoise.core.tree import Shared, Structure
from equipoise.core.validate import SettingError, require_count, require_flag, require_positive
from equipoise.layers.cell import Cell
from equipoise.layers.certificate import Certificate, Link, Statement, significant
from equipoise.layers.dropout import VariationalDropout
from equipoise.layers.lipschitz import Bound, Part, round_up
from equipoise.models.group_norm import GroupNorm, mark_overflow
from equipoise.models.normalized_convolution import Normalization, NormalizedConvolution
from equipoise.operators.convolution_norm import convolution_bound

__all__ = ["ResidualCell", "WeightTied"]


class _Context(NamedTuple):
    """What does not change in a solve.

    Attributes:
        x: The input.
        kernel1: Of the first convolution, if kernels are normalised.
        kernel2: Of the second one.
        mask: Of dropout, (batch, channels, 1, 1), in training.
    """

    x: Tensor
    kernel1: Any = None  # Shared from inject, tensors in step
    kernel2: Any = None
    mask: Tensor | None = None


class ResidualCell(Cell):
    """`f(z, x) = n3(relu(z + n2(x + m W2 * n1(relu(W1 * z)))))` (mon-NTK thesis, eq. 4.1).

    `n1`, `n2` and `n3` are group normalisations, which keep samples independent and states bounded;
    `m` is the mask of dropout, 1 as in the thesis unless that is asked for. There is an
    equilibrium; see `certificate` for when there is only one.

    Args:
        channels: Channels of state and input.
        inner: Channels between the two convolutions.
        kernel_size: Side of the convolutions, odd.
        groups: Groups of the group normalisations; must divide `channels` and `inner`.
        deviation: Standard deviation of the convolutions' first weights; small ones begin near an
            equilibrium.
        normalization: How the kernels of the convolutions are normalised, once for each solve:
            `none`, `weight` or `spectral`; see `NormalizedConvolution`.
        spectral_norm: What the norms of both convolutions are at most under `spectral`, where
            `deviation` does not matter; one half is about what first weights have otherwise.
        dropout: Probability of dropping a channel between `W2` and the input in training; the mask
            of a solve is drawn once.

    Shape:
        Input and state (batch, channels, height, width).
    """

    def __init__(
        self,
        channels: int,
        inner: int,
        kernel_size: int = 3,
        groups: int = 8,
        *,
        deviation: float = 0.01,
        normalization: Normalization = "none",
        spectral_norm: float = 0.5,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        for name, count in (("channels", channels), ("inner", inner), ("groups", groups)):
            require_count(f"ResidualCell.{name}", count)
        for name, count in (("channels", channels), ("inner", inner)):
            if count % groups:
                raise SettingError(
                    f"ResidualCell.{name}", f"be a multiple of groups, {groups}", count
                )
        require_count("ResidualCell.kernel_size", kernel_size)
        if kernel_size % 2 == 0:
            raise SettingError("ResidualCell.kernel_size", "be odd", kernel_size)
        require_positive("ResidualCell.deviation", deviation)
        choose("ResidualCell.normalization", normalization, get_args(Normalization))
        require_positive("ResidualCell.spectral_norm", spectral_norm)
        self.conv1, self.conv2 = (
            NormalizedConvolution(
                *sizes, kernel_size, normalization=normalization, norm=spectral_norm
            )
            for sizes in ((channels, inner), (inner, channels))
        )
        self.normalization = normalization
        self.norm1 = GroupNorm(groups, inner)
        self.norm2 = GroupNorm(groups, channels)
        self.norm3 = GroupNorm(groups, channels)
        self.dropout = VariationalDropout(dropout, owner="ResidualCell.dropout")
        for part in (self.conv1, self.conv2):
            part.draw_(deviation)

    def inject(self, x: Tensor) -> _Context:
        require_dtype(x, self.conv1.weight, "The input of ResidualCell")
        x = mark_overflow(x)
        mask = self.dropout.draw(x, x.shape[1], 1, 1)
        if self.normalization == "none":
            return _Context(x, mask=mask)
        return _Context(x, Shared(self.conv1.kernel()), Shared(self.conv2.kernel()), mask)

    def initial(self, x: Tensor, context: _Context) -> Tensor:
        """Return zeros like the input."""
        return torch.zeros_like(context.x)

    def step(self, z: Tensor, context: _Context) -> Tensor:
        inner = self.norm1(torch.relu(self.conv1(z, context.kernel1)))
        change = self.dropout(self.conv2(inner, context.kernel2), context.mask)
        y: Tensor = self.norm3(torch.relu(z + self.norm2(context.x + change)))
        return y

    @torch.no_grad()
    def norms(self) -> dict[str, float]:
        """Return proven bounds of the norms of both convolutions, at any image size."""
        parts = {"conv1": self.conv1, "conv2": self.conv2}
        return {name: float(convolution_bound(part.kernel())) for name, part in parts.items()}

    @torch.no_grad()
    def certificate(self) -> Certificate:
        """Return that there is an equilibrium, and a bound of the step's Lipschitz constant.

        Normalised values of a group have a root mean square of at most 1, so `n3` maps all states
        into a ball, and by Brouwer's theorem the step has a fixed point there.

        The Jacobian of `u -> (u - mean(u))/s`, `s^2 = var(u) + epsilon`, is `(P - v v^T/n)/s` with
        the projection `P` onto sums of zero and the value `v`, `|v|^2 <= n`: its norm is at most
        `1/s <= epsilon^(-1/2)`. So the constants of the parts give

            l3 (1 + l2 |W2| l1 |W1|),   l = max |g|/epsilon^(1/2) with gains g,

        which is below 1 for small gains of `n3` alone. Dropout counts in training mode.
        """
        norms = self.norms()
        l1, l2, l3 = map(_group_norm_constant, (self.norm1, self.norm2, self.norm3))
        kept = 1 - self.dropout.probability if self.training else 1.0
        bound = round_up(l3 * (1 + l2 * norms["conv2"] / kept * l1 * norms["conv1"]))
        bound = bound if math.isfinite(bound) else math.inf
        gain, bias = self.norm3.weight.double(), self.norm3.bias.double()
        size = float(gain.abs().max() + bias.abs().max())
        shown = {name: significant(value, up=True) for name, value in norms.items()}
        return Certificate(
            (Link(type(self).__name__, bound),),
            further=(
                Statement(
                    "there is an equilibrium, whose values have a root mean square of at most this "
                    "number in each group of channels, since the last group normalisation maps all "
                    "states into that ball",
                    holds=math.isfinite(size),
                    number=size,
                    theorem="Brouwer, 1911",
                ),
            ),
            basis=(
                f"|W1| <= {shown['conv1']}, |W2| <= {shown['conv2']}, and group normalisations "
                "have constants up to max |g|/epsilon^(1/2)"
            ),
            remedy="Take an OptEq or a monotone network where a unique equilibrium is needed.",
        )

    def input_lipschitz(self) -> Part:
        """Return `l3 l2`, the constants of the group normalisations that the input passes."""
        bound = _group_norm_constant(self.norm2) * _group_norm_constant(self.norm3)
        theorem = "group normalisations have constants up to max |g|/epsilon^(1/2)"
        return Bound(type(self).__name__, bound if math.isfinite(bound) else math.inf, theorem)


@torch.no_grad()
def _group_norm_constant(norm: nn.GroupNorm) -> float:
    return round_up(float(norm.weight.double().abs().max()) / math.sqrt(norm.eps))


class WeightTied(nn.Module):
    """A cell applied `steps` times from zero: the explicit network that an equilibrium extends.

    Args:
        cell: The cell.
        steps: How often.
        checkpoint: Whether to keep only the iterates, and to compute each step again in backward:
            about a third more time, and a fraction of the memory.
    """

    def __init__(self, cell: Cell, steps: int, *, checkpoint: bool = False) -> None:
        super().__init__()
        require_count("WeightTied.steps", steps)
        require_flag("WeightTied.checkpoint", checkpoint)
        self.cell = cell
        self.steps = steps
        self.checkpoint = checkpoint

    def forward(self, x: Tensor) -> Tensor:
        """Return the last iterate."""
        structure = Structure(self.cell.inject(x), "Cell.inject")
        context = structure.rebuild(structure.leaves)
        z: Tensor = self.cell.initial(x, context)
        for _ in range(self.steps):
            if self.checkpoint and torch.is_grad_enabled():
                z = torch.utils.checkpoint.checkpoint(self.cell, z, context, use_reentrant=False)
            else:
                z = self.cell(z, context)
        return self.cell.readout(z, context)  # type: ignore[no-any-return]
