"""Any feed-forward network as one weight-tied, input-injected layer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple, Unpack

import torch
from torch import Tensor, nn

from equipoise.core.validate import SettingError, require_type
from equipoise.gradients import Implicit
from equipoise.layers.cell import Cell
from equipoise.layers.certificate import Certificate, Link, Statement
from equipoise.layers.equilibrium import Equilibrium
from equipoise.layers.options import SolveOptions
from equipoise.solvers import FixedPoint, Neumann

__all__ = ["BlockMatrices", "FeedForwardCell", "to_weight_tied"]

REFUSED = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd, nn.RNNBase)


class BlockMatrices(NamedTuple):
    """The matrices of `f(z, x) = s(W_z z + W_x x + b)` on the stacked state (Theorem B.0.1).

    Attributes:
        W_z: The layers' matrices below the diagonal of blocks, so that `W_z^L = 0`.
        W_x: The first layer's matrix, and zeros.
        b: The layers' biases.
    """

    W_z: Tensor
    W_x: Tensor
    b: Tensor


class FeedForwardCell(Cell):
    """`f(z, x) = (g_1(x), g_2(z_1), ..., g_L(z_{L-1}))`, the layers of a network side by side.

    The state holds the outputs of all layers. Each step applies all layers at once; after `L` steps
    from any start the state is `z_1 = g_1(x)`, `z_2 = g_2(z_1)`, ..., and stays there: the one
    equilibrium, whose last block is the network's output (Bai, Kolter & Koltun, 2019; mon-NTK
    thesis, Theorem B.0.1). The Jacobian is nilpotent, so that the adjoint equation is
    solved by `L` plain steps as well.

    Args:
        blocks: `g_1, ..., g_L`; each maps one tensor to one, row by row.

    Shape:
        What the network takes to what it returns; the state is the tuple of all blocks' outputs.
    """

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def inject(self, x: Tensor) -> Tensor:
        """Return `g_1(x)`."""
        first: Tensor = self.blocks[0](x)
        return first

    @torch.no_grad()
    def initial(self, x: Tensor, context: Tensor) -> tuple[Tensor, ...]:
        """Return zeros of the shapes of the blocks' outputs."""
        z, row = [torch.zeros_like(context)], context[:1]
        for block in list(self.blocks)[1:]:
            row = block(row)
            z.append(row.new_zeros(len(context), *row.shape[1:]))
        return tuple(z)

    def step(self, z: tuple[Tensor, ...], context: Tensor) -> tuple[Tensor, ...]:
        later = list(self.blocks)[1:]
        # A copy, so that nothing that overwrites the state overwrites the context.
        return (context.clone(), *(block(own) for block, own in zip(later, z[:-1], strict=True)))

    def readout(self, z: tuple[Tensor, ...], context: Tensor) -> Tensor:
        """Return the last block, the network's output."""
        return z[-1]

    def certificate(self) -> Certificate:
        """Return that there is one equilibrium, reached after as many steps as there are blocks."""
        return Certificate(
            (Link(type(self).__name__, math.inf),),
            further=(
                Statement(
                    "each block depends on the one before it alone, so that as many steps as there "
                    "are blocks lead to the one equilibrium from any start",
                    holds=True,
                    number=float(len(self.blocks)),
                    theorem="Bai, Kolter & Koltun, 2019; mon-NTK thesis, Theorem B.0.1",
                    unique=True,
                ),
            ),
        )

    @torch.no_grad()
    def matrices(self) -> BlockMatrices:
        """Return the matrices of the theorem, for a network of linear maps and activations."""
        maps = [
            next((part for part in block.modules() if isinstance(part, nn.Linear)), None)
            for block in self.blocks
        ]
        linear = [one for one in maps if one is not None]
        others = [
            type(part).__name__
            for part in self.modules()
            if not isinstance(part, nn.Linear) and any(True for _ in part.parameters(recurse=False))
        ]
        if others or len(linear) < len(maps):
            raise SettingError(
                "FeedForwardCell.matrices",
                "be asked of linear maps and activations",
                self,
                got=others[0] if others else "a block without a linear map",
            )
        first = linear[0]
        sizes = [one.out_features for one in linear]
        ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
        W_z = first.weight.new_zeros(ends[-1], ends[-1])
        W_x = first.weight.new_zeros(ends[-1], first.in_features)
        b = first.weight.new_zeros(ends[-1])
        W_x[: ends[1]] = first.weight
        for place, one in enumerate(linear):
            rows = slice(ends[place], ends[place + 1])
            if place:
                W_z[rows, ends[place - 1] : ends[place]] = one.weight
            if one.bias is not None:
                b[rows] = one.bias
        return BlockMatrices(W_z, W_x, b)


def to_weight_tied(net: nn.Sequential, **solve: Unpack[SolveOptions]) -> Equilibrium:
    """Return a feed-forward network as one equilibrium layer with the same parameters and output.

    A theorem, and not a faster way: each of the `L` steps applies all `L` layers.

    Args:
        net: Linear maps or convolutions, each followed by what has no parameters of its own, such
            as activations, pooling, `Flatten`. Batch normalisation and dropout are refused, because
            a step must be the same at every call and for every batch.
        **solve: See `SolveOptions`; by default plain steps, forward and backward, down to rounding.
    """
    require_type("to_weight_tied.net", net, nn.Sequential, "an nn.Sequential")
    blocks: list[list[nn.Module]] = []
    for part in _flatten(net):
        if isinstance(part, REFUSED):
            raise SettingError(
                "to_weight_tied.net",
                "treat rows alike at every call",
                part,
                "Fold batch normalisation into the linear maps, and leave dropout out.",
                got=type(part).__name__,
            )
        heavy = any(True for _ in part.parameters())
        if not blocks or (heavy and any(True for own in blocks[-1] for _ in own.parameters())):
            blocks.append([])
        blocks[-1].append(part)
    if not blocks:
        raise SettingError("to_weight_tied.net", "have at least one module", net, got="none")
    cell = FeedForwardCell(nn.Sequential(*block) for block in blocks)
    own: SolveOptions = {"solver": FixedPoint(), "gradient": Implicit(solver=Neumann())}
    if solve.get("stop") is None:
        dtype = next((p.dtype for p in net.parameters()), torch.get_default_dtype())
        # One step more than blocks, to see that nothing moves.
        own["tolerance"], own["max_steps"] = 8 * torch.finfo(dtype).eps, len(blocks) + 1
    chosen: SolveOptions = {**own, **solve}
    return Equilibrium(cell, **chosen).train(net.training)


def _flatten(net: nn.Sequential) -> Iterable[nn.Module]:
    for part in net:
        if type(part) is nn.Sequential:
            yield from _flatten(part)
        else:
            yield part
