"""What a step keeps on its cell while a solve records nothing must not swallow gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cells import TanhCell
from torch import Tensor, nn

from equipoise import Cell, Equilibrium, Shared, fixed_point

FLOAT = torch.float64


class CachingCell(TanhCell):
    """Normalises its weight at the first step of a solve, and keeps it in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: Any = None

    def inject(self, x: Tensor) -> Tensor:
        self.cache = None
        return self.U(x)

    def kept(self) -> Tensor:
        if self.cache is None:
            self.cache = self.compute()
        return self.cache

    def compute(self) -> Tensor:
        return 0.5 * self.W / self.W.norm()

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return torch.tanh(z @ self.kept().T + context)


class CacheInContainer(CachingCell):
    """Keeps it in a list in a dictionary."""

    def inject(self, x: Tensor) -> Tensor:
        self.cache = {"weights": []}
        return self.U(x)

    def kept(self) -> Tensor:
        if not self.cache["weights"]:
            self.cache["weights"].append(self.compute())
        return self.cache["weights"][0]


class CacheInBuffer(CachingCell):
    """Keeps it in a buffer that a flag says is there."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("normal", None)
        self.ready = False

    def inject(self, x: Tensor) -> Tensor:
        self.ready = False
        return self.U(x)

    def kept(self) -> Tensor:
        if not self.ready:
            self.normal, self.ready = self.compute(), True
        return self.normal


class CacheOfInput(CachingCell):
    """Keeps what it computes from its context."""

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = context.square().mean()
        return torch.tanh(z @ self.W.T + self.cache)


@pytest.mark.parametrize("gradient", ["implicit", "phantom", "jacobian_free"])
@pytest.mark.parametrize("kind", [CachingCell, CacheInContainer, CacheInBuffer, CacheOfInput])
def test_cached_weight_is_refused(kind: type[CachingCell], gradient: str) -> None:
    layer = Equilibrium(kind(), gradient=gradient)
    for _ in range(2):  # the refused call leaves nothing behind
        with pytest.raises(
            ValueError,
            match=rf"^{kind.__name__}.step must not keep what it computes from trainable tensors, "
            r"because a solve records nothing; got '(cache|normal)' of shape .*Shared\.$",
        ):
            layer(torch.randn(5, 3, dtype=FLOAT))


def test_cached_weight_is_refused_by_the_transforms_of_torch() -> None:
    layer = Equilibrium(CachingCell())
    x = torch.randn(5, 3, dtype=FLOAT)

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(layer, weights, (x,)).sum()

    with pytest.raises(ValueError, match=r"must not keep what it computes from trainable tensors"):
        torch.func.grad(loss)(dict(layer.named_parameters()))


def test_cached_argument_of_a_function_is_refused() -> None:
    class Module(nn.Module):
        cache: Tensor | None = None

        def forward(self, z: Tensor, w: Tensor) -> Tensor:
            if self.cache is None:
                self.cache = w.tanh()
            return torch.tanh(0.5 * z + self.cache)

    with pytest.raises(ValueError, match=r"^fixed_point.f must not keep"):
        fixed_point(Module(), torch.zeros(3, 2), torch.ones(2, requires_grad=True))


def test_cached_weight_is_allowed_where_nothing_is_recorded() -> None:
    cell = CachingCell()
    layer, x = Equilibrium(cell), torch.randn(5, 3, dtype=FLOAT)
    with torch.no_grad():
        layer(x)
    assert cell.cache is not None
    cell.requires_grad_(False)
    layer(x)


def test_cached_weight_may_be_recorded_by_unrolling() -> None:
    cell = CachingCell()
    Equilibrium(cell, gradient="unrolled")(torch.randn(5, 3, dtype=FLOAT)).sum().backward()
    assert cell.W.grad is not None


class Harmless(TanhCell):
    """Keeps a random mask and a counter, logs what it computes, and normalises anew each time."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor | None = None
        self.log: list[Tensor] = []

    def inject(self, x: Tensor) -> Tensor:
        self.mask, self.log = None, []
        self.calls = torch.zeros(())
        return self.U(x)

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.rand(4, dtype=FLOAT)
        self.calls = self.calls + 1
        self.normal = 0.5 * self.W / self.W.norm()
        value = torch.tanh(self.mask * (z @ self.normal.T) + context)
        self.log.append(value)
        self.value = value
        return value


class Passing(Cell):
    """The same mathematics with everything passed on from inject."""

    def __init__(self, cell: Harmless, mask: Tensor) -> None:
        super().__init__()
        self.inner, self.mask = cell, mask

    def inject(self, x: Tensor) -> tuple[Tensor, Shared]:
        return self.inner.U(x), Shared(0.5 * self.inner.W / self.inner.W.norm())

    def initial(self, x: Tensor, context: Any) -> Tensor:
        return torch.zeros_like(context[0])

    def step(self, z: Tensor, context: Any) -> Tensor:
        return torch.tanh(self.mask * (z @ context[1].T) + context[0])


def test_masks_counters_and_logs_of_a_step_are_no_caches() -> None:
    torch.manual_seed(0)
    cell, x = Harmless(), torch.randn(5, 3, dtype=FLOAT)
    layer = Equilibrium(cell, tolerance=1e-12)
    before = torch.random.get_rng_state()
    z = layer(x)
    drawn = torch.random.get_rng_state()
    torch.random.set_rng_state(before)
    torch.rand(4, dtype=FLOAT)
    assert torch.equal(drawn, torch.random.get_rng_state())  # the check draws nothing
    found = torch.autograd.grad(z.sum(), list(cell.parameters()))
    assert cell.mask is not None
    z = Equilibrium(Passing(cell, cell.mask), tolerance=1e-12)(x)
    wanted = torch.autograd.grad(z.sum(), list(cell.parameters()))
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)
