"""The last evaluation of a solve is the one that backward linearises."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from equipoise import OptEq, Stop


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


def make() -> tuple[OptEq, Tensor]:
    torch.manual_seed(0)
    layer = OptEq(6, 5, [7, 8], "tanh", stop=Stop(1e-9)).double()
    return layer, torch.randn(1, 6, dtype=torch.float64, requires_grad=True)


def same(tensor: Tensor) -> Tensor:
    return tensor


def count(run: Callable[[], Tensor]) -> tuple[int, int]:
    with Products() as forward:
        value = run()
    with Products() as backward:
        value.square().sum().backward()
    return forward.count, backward.count


def test_backward_uses_the_last_evaluation_of_the_solve() -> None:
    layer, x = make()

    def hooked() -> Tensor:  # whoever saves tensors in a way of his own gets them at backward only
        with saved_tensors_hooks(same, same):
            return layer(x)

    layer(x).sum().backward()
    found = []
    for run in (lambda: layer(x), hooked):
        layer.zero_grad()
        x.grad = None
        numbers = count(run)
        found.append((numbers, [x.grad, *(p.grad for p in layer.parameters())]))
    (mine, gradients), (other, expected) = found
    assert mine[0] == other[0]
    assert mine[1] == other[1] - 4  # two layers with two products each
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_recorded_evaluation_serves_every_backward() -> None:
    layer, x = make()
    weight = layer.layers.operators[0].weight
    z = layer(x).square().sum()
    (by_input,) = torch.autograd.grad(z, x, retain_graph=True)
    (by_weight,) = torch.autograd.grad(z, weight, retain_graph=True)
    again, once_more = torch.autograd.grad(z, (x, weight), create_graph=True)
    torch.testing.assert_close(by_input, again, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(by_weight, once_more, rtol=1e-7, atol=1e-9)
    assert torch.autograd.grad(again.sum(), weight)[0].isfinite().all()


def test_step_changed_by_a_hook_is_evaluated_as_it_is() -> None:
    layer, x = make()
    handle = layer.cell.register_forward_hook(lambda _module, _inputs, output: output + 1.0)
    with torch.no_grad():
        expected = layer(x)
    torch.testing.assert_close(layer(x).detach(), expected, rtol=1e-9, atol=1e-10)
    handle.remove()
