"""Bounds of depthwise-separable convolutions, by their composed symbol."""

import pytest
import torch

from equipoise.operators import Composed, Convolution, Operator, separable


def matrix(operator: Operator, channels: int, size: tuple[int, int]) -> torch.Tensor:
    basis = torch.eye(channels * size[0] * size[1], dtype=torch.float64)
    with torch.no_grad():
        return operator(basis.view(-1, channels, *size)).flatten(1)


def make(out: int, kernel: int | tuple[int, int], multiplier: int, padding: str) -> Composed:
    return separable(3, out, kernel, multiplier=multiplier, padding=padding).double()


@pytest.mark.parametrize("padding", ["zeros", "circular"])
@pytest.mark.parametrize("multiplier", [1, 2])
@pytest.mark.parametrize(("out", "kernel"), [(5, 3), (2, 3), (4, 5), (3, (1, 4)), (3, 2)])
def test_separable_bound_is_above_the_true_norm_and_close_to_the_supremum(
    out, kernel, multiplier, padding
):
    for _ in range(3):
        operator = make(out, kernel, multiplier, padding)
        bound = operator.bound(operator.weights()).item()
        true = [
            torch.linalg.svdvals(matrix(operator, 3, size))[0].item()
            for size in ((5, 5), (6, 7), (9, 8))
        ]
        assert max(true) <= bound
        fused = torch.einsum(
            "ocj,cjhw->ochw",
            operator.parts[1].kernel.reshape(out, 3, multiplier),
            operator.parts[0].kernel.reshape(3, multiplier, *operator.parts[0].kernel.shape[2:]),
        ).detach()
        grid = torch.fft.fft2(fused, s=(97, 97)).permute(2, 3, 0, 1)
        supremum = torch.linalg.matrix_norm(grid, 2).max().item()
        assert supremum <= bound <= 1.02 * supremum
        assert bound <= operator.quick_bound(operator.weights())
        product = torch.stack([part.bound(part.weights()) for part in operator.parts]).prod()
        assert operator.quick_bound(operator.weights()) <= product.item() * (1 + 1e-12)


def test_separable_bound_is_far_below_the_product_where_channels_differ():
    torch.manual_seed(0)
    operator = separable(48, 48, multiplier=2).double()
    product = torch.stack([part.bound(part.weights()) for part in operator.parts]).prod().item()
    assert operator.bound(operator.weights()).item() <= product / 1.8


def test_two_separable_convolutions_with_borders_are_bounded_by_a_product():
    # The symbol of the two together is zero, but their borders see each other.
    first, second = (Convolution(1, 1, (1, 2)).double() for _ in range(2))
    with torch.no_grad():
        first.kernel.copy_(torch.tensor([1.0, 1.0]).view(1, 1, 1, 2))
        second.kernel.copy_(torch.tensor([1.0, -1.0]).view(1, 1, 1, 2))
    both = Composed([first, second])
    true = torch.linalg.svdvals(matrix(both, 1, (2, 4)))[0].item()
    assert true <= both.bound(both.weights()).item()
    pair = Composed([separable(3, 3, 5, multiplier=2), separable(3, 4)]).double()
    true = torch.linalg.svdvals(matrix(pair, 3, (7, 7)))[0].item()
    assert true <= pair.bound(pair.weights()).item()


def test_separable_bound_of_many_channels_uses_a_coarser_grid_with_its_own_slack(monkeypatch):
    operator = make(4, 3, 2, "zeros")
    fine = operator.bound(operator.weights()).item()
    monkeypatch.setattr("equipoise.operators.convolution_norm.MANY", 2)
    coarse = operator.bound(operator.weights()).item()
    true = torch.linalg.svdvals(matrix(operator, 3, (9, 9)))[0].item()
    assert true <= coarse <= 1.16 * fine
    moved = tuple(weight + 0.01 * torch.randn_like(weight) for weight in operator.weights())
    gain = operator.bound(moved).item() - coarse
    assert gain <= operator.drift(moved, operator.weights())


def test_separable_bound_has_derivatives():
    torch.manual_seed(0)
    operator = make(4, 3, 2, "zeros")
    weights = tuple(weight.detach().requires_grad_() for weight in operator.weights())
    assert torch.autograd.gradcheck(lambda *w: operator.bound(w), weights)
    batch = tuple(torch.stack([weight, 2 * weight]).detach() for weight in weights)
    one, four = torch.func.vmap(lambda *w: operator.bound(w))(*batch)
    assert four.item() == pytest.approx(4 * one.item())


@pytest.mark.parametrize("multiplier", [1, 2])
def test_separable_convolutions_begin_with_a_norm_of_about_one_half(multiplier):
    for channels in (4, 64):
        operator = separable(channels, channels, multiplier=multiplier)
        assert 0.45 <= operator.bound(operator.weights()).item() <= 0.65
