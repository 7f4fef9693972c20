"""Feed-forward networks of any shape as the layers of one deep OptEq (OptEq, Lemma 2).

A layer of an OptEq writes `W^T s(W z + U x + b)` over the whole state. Let the state have three
regions, used in turn: layer `l` reads region `l - 1` and has region `l` for its own units,

    W z = A z_(l-1) + z_l,    W^T y = A^T y in region l - 1, y in region l, 0 elsewhere.

If region `l` was zero before, it holds `s(A z_(l-1) + U x + b)` afterwards; what is left in region
`l - 1` is read by nobody, and the third region is zero, ready for the next layer. A value that is
needed later, such as the shortcut of a residual block, is carried along by units of its own:
`relu(a) = a` where `a >= 0`, and `relu(a) - relu(-a) = a` everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from equipoise.core.validate import SettingError
from equipoise.families.opteq.affine_map import Affine, LinearMap, Shape, Term
from equipoise.operators.operator import Operator, OperatorWeights

__all__ = ["Injection", "Readout", "Slot", "Units", "Wiring"]

_NO_VALUE = Affine((), torch.empty(0))


@dataclass(frozen=True)
class Slot:
    """Where a value stands in the state.

    Attributes:
        first: Its first entry.
        shape: The shape of a sample.
    """

    first: int
    shape: Shape

    @property
    def size(self) -> int:
        """How many entries it has."""
        return math.prod(self.shape)

    def read(self, z: Tensor) -> Tensor:
        """Return the value in a state."""
        return z[:, self.first : self.first + self.size].reshape(-1, *self.shape)


@dataclass(frozen=True)
class Units:
    """Units of a layer that make one value.

    Attributes:
        own: Where their value is written.
        value: What they are applied to.
        factor: A number on all of it.
        carried: Whether they only pass a value on, without a bias.
    """

    own: Slot
    value: Affine
    factor: float = 1.0
    carried: bool = False


class _Chains(nn.Module):
    """The maps of some terms, with the weights that are trained."""

    def __init__(self, terms: Sequence[Term]) -> None:
        super().__init__()
        flat = [own for term in terms for own in term.maps]
        self.maps: list[list[LinearMap]] = [[_bare(own) for own in term.maps] for term in terms]
        self.trained = nn.ParameterList([nn.Parameter(own.weight) for own in flat if own.trained])
        for place, own in enumerate(flat):
            if not own.trained:
                self.register_buffer(f"fixed_{place}", own.weight, persistent=False)

    def weights(self) -> list[list[Tensor]]:
        """Return the weights of each map of each term."""
        trained, place = iter(self.trained), 0
        found: list[list[Tensor]] = []
        for maps in self.maps:
            found.append([])
            for own in maps:
                weight = next(trained) if own.trained else getattr(self, f"fixed_{place}")
                found[-1].append(weight)
                place += 1
        return found

    def split(self, weights: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return flat weights by terms and maps."""
        found: list[list[Tensor]] = []
        place = 0
        for maps in self.maps:
            found.append(list(weights[place : place + len(maps)]))
            place += len(maps)
        return found

    def apply_to(self, term: int, weights: Sequence[Tensor], value: Tensor) -> Tensor:
        """Return the value of a term."""
        for own, weight in zip(self.maps[term], weights, strict=True):
            value = own.apply(weight, value)
        return value


class Wiring(Operator):
    """`W z = A z_(l-1) + z_l`, with linear maps between slots of the state for `A`.

    Args:
        units: The units, of which the terms in `slots` belong to `A`.
        slots: Where the values that they read stand.
        state_features: The length of the state.
        input_shape: The shape of a sample of the input.
        like: A tensor of the type of the weights.
    """

    def __init__(
        self,
        units: Sequence[Units],
        slots: dict[int, Slot],
        state_features: int,
        input_shape: Shape,
        like: Tensor,
    ) -> None:
        super().__init__()
        self.units = [replace(own, value=_NO_VALUE) for own in units]
        self.state_features = state_features
        self.input_shape = input_shape
        self.rows = [
            (row, slots[term.source])
            for row, own in enumerate(units)
            for term in own.value.terms
            if term.source in slots
        ]
        self.chains = _Chains(
            [term for own in units for term in own.value.terms if term.source in slots]
        )
        self.register_buffer("gain", like.new_ones(()), persistent=False)

    gain: Tensor

    def weights(self) -> OperatorWeights:
        return (*(own for maps in self.chains.weights() for own in maps), self.gain)

    def transposed(self, weights: OperatorWeights) -> OperatorWeights:
        return weights

    def apply_with(self, weights: OperatorWeights, z: Tensor) -> Tensor:
        parts = [own.own.read(z) for own in self.units]
        chains = self.chains.split(weights[:-1])
        for place, (row, slot) in enumerate(self.rows):
            value = self.chains.apply_to(place, chains[place], slot.read(z))
            parts[row] = parts[row] + value
        rows = [
            part.flatten(1) if own.factor == 1 else own.factor * part.flatten(1)
            for own, part in zip(self.units, parts, strict=True)
        ]
        return torch.cat(rows, dim=1) * weights[-1]

    def adjoint_with(self, transposed: OperatorWeights, y: Tensor) -> Tensor:
        y = y * transposed[-1]
        chains = self.chains.split(transposed[:-1])
        sizes = [own.own.size for own in self.units]
        given = [
            part if own.factor == 1 else own.factor * part
            for own, part in zip(self.units, torch.split(y, sizes, dim=1), strict=True)
        ]
        pieces: dict[tuple[int, int], Tensor] = {}

        def add(slot: Slot, value: Tensor) -> None:
            key = slot.first, slot.size
            pieces[key] = pieces[key] + value if key in pieces else value

        for own, part in zip(self.units, given, strict=True):
            add(own.own, part)
        for place, (row, slot) in enumerate(self.rows):
            value = given[row].reshape(-1, *self.units[row].own.shape)
            for linear, weight in zip(
                reversed(self.chains.maps[place]), reversed(chains[place]), strict=True
            ):
                value = linear.adjoint(weight, value)
            add(slot, value.flatten(1))
        columns, end = [], 0
        for (first, size), value in sorted(pieces.items(), key=lambda item: item[0]):
            columns += [y.new_zeros(len(y), first - end)] if first > end else []
            columns.append(value)
            end = first + size
        rest = self.state_features - end
        return torch.cat([*columns, y.new_zeros(len(y), rest)] if rest else columns, dim=1)

    def bound(self, weights: OperatorWeights) -> Tensor:
        """Return `sqrt(sum_i f_i^2 (1 + sum_j |A_ij|^2))` over units `i` and slots `j`."""
        chains = self.chains.split(weights[:-1])
        norms: dict[tuple[int, int], Tensor] = {}
        for place, (row, slot) in enumerate(self.rows):
            norm = weights[-1].new_ones(())
            for own, weight in zip(self.chains.maps[place], chains[place], strict=True):
                norm = norm * own.bound(weight)
            norms[row, slot.first] = norms.get((row, slot.first), 0) + norm
        total = weights[-1].new_tensor(sum(own.factor**2 for own in self.units))
        for (row, _), norm in norms.items():
            total = total + (self.units[row].factor * norm) ** 2
        return total.sqrt() * weights[-1]

    def zeros(self, c: Tensor) -> Tensor:
        return c.new_zeros(c.shape[0], self.state_features)

    def check(self, x: Tensor) -> None:
        super().check(x)
        if tuple(x.shape[1:]) != self.input_shape:
            wanted = ", ".join(map(str, self.input_shape))
            got = str(tuple(x.shape))
            raise SettingError("The input", f"have shape (batch, {wanted})", x, got=got)

    def extra_repr(self) -> str:
        return f"{self.state_features}, {sum(own.own.size for own in self.units)}"


class Injection(nn.Module):
    """`U x + b` of a layer, as one row for each sample.

    Args:
        units: The units, of which the terms in the input belong to `U`.
    """

    def __init__(self, units: Sequence[Units]) -> None:
        super().__init__()
        self.factors = [own.factor for own in units]
        self.rows = [
            row for row, own in enumerate(units) for term in own.value.terms if term.source == 0
        ]
        self.chains = _Chains(
            [term for own in units for term in own.value.terms if term.source == 0]
        )
        self.biases = nn.ParameterList(
            [nn.Parameter(_compact(own.value.bias)) for own in units if not own.carried]
        )
        self.carried = [own.carried for own in units]
        self.shapes = [own.own.shape for own in units]

    def forward(self, x: Tensor) -> Tensor:
        """Return `U x + b`, shape (batch, units)."""
        biases = iter(self.biases)
        parts = [
            x.new_zeros(len(x), *shape) if carried else next(biases).expand(len(x), *shape)
            for carried, shape in zip(self.carried, self.shapes, strict=True)
        ]
        for place, (weights, row) in enumerate(zip(self.chains.weights(), self.rows, strict=True)):
            parts[row] = parts[row] + self.chains.apply_to(place, weights, x)
        rows = zip(self.factors, parts, strict=True)
        return torch.cat([factor * part.flatten(1) for factor, part in rows], dim=1)


class Readout(nn.Module):
    """An affine function of values in the state: the output of a network.

    Args:
        value: The function.
        slots: Where the values stand.
    """

    def __init__(self, value: Affine, slots: dict[int, Slot]) -> None:
        super().__init__()
        self.slots = [slots[term.source] for term in value.terms]
        self.chains = _Chains(value.terms)
        self.bias = nn.Parameter(_compact(value.bias))
        self.shape = value.shape

    def forward(self, z: Tensor) -> Tensor:
        """Return the output for a state."""
        y = self.bias.expand(len(z), *self.shape)
        for place, (weights, slot) in enumerate(
            zip(self.chains.weights(), self.slots, strict=True)
        ):
            y = y + self.chains.apply_to(place, weights, slot.read(z))
        return y


def _bare(linear: LinearMap) -> LinearMap:
    """The map without its weight, which the module holds."""
    return replace(linear, weight=linear.weight.new_empty(0))


def _compact(bias: Tensor) -> Tensor:
    """A bias with one number for each channel, where it is the same at all positions."""
    bias = bias.detach().clone()
    if bias.dim() == 3 and bool((bias == bias[:, :1, :1]).all()):
        return bias[:, :1, :1].clone()
    return bias
