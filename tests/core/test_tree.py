from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from equipoise.core import Layout, Shared, Structure, row_dot, row_norm

Pair = namedtuple("Pair", ["left", "right"])


def a(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype)


TREES = {
    "matrix": lambda n: a(n, 3),
    "vector": lambda n: a(n),
    "image": lambda n: a(n, 2, 4, 5),
    "tuple": lambda n: (a(n, 3), a(n, 2, 2)),
    "list": lambda n: [a(n, 3), a(n)],
    "dict": lambda n: {"b": a(n, 3), "a": a(n, 2)},
    "namedtuple": lambda n: Pair(a(n, 3), a(n, 1)),
    "one in a tuple": lambda n: (a(n, 2, 2),),
    "complex matrix": lambda n: a(n, 3, dtype=torch.complex128),
    "complex image": lambda n: a(n, 2, 4, 5, dtype=torch.complex128),
    # The complex tensor begins at an odd number of a row of odd length.
    "complex and real": lambda n: (a(n, 3), a(n, 2, dtype=torch.complex128), a(n, 2, 2)),
    "nested": lambda n: {"x": [a(n, 3), (a(n, 2), Pair(a(n), a(n, 1, 1)))], "y": None},
}


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return (
            isinstance(right, Tensor) and left.shape == right.shape and bool((left == right).all())
        )
    if isinstance(left, dict):
        return (
            isinstance(right, dict)
            and list(left) == list(right)
            and all(same(left[key], right[key]) for key in left)
        )
    if isinstance(left, tuple | list):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return left is right


# structures


@pytest.mark.parametrize("name", TREES)
def test_structure_rebuilds_its_tree(name: str) -> None:
    tree = TREES[name](4)
    structure = Structure(tree)
    assert same(structure.rebuild(structure.leaves), tree)


def test_structure_puts_other_tensors_in_their_places() -> None:
    structure = Structure({"b": a(2), "a": (a(3), None)})
    others = [leaf.new_ones(leaf.shape) for leaf in structure.leaves]
    assert same(structure.rebuild(others), {"b": a(2) * 0 + 1, "a": (a(3) * 0 + 1, None)})


def test_structure_unwraps_shared_leaves_and_remembers_them() -> None:
    weight = a(3, 3)
    structure = Structure([a(2, 3), Shared(weight)])
    assert structure.shared == [False, True]
    assert structure.leaves[1] is weight
    assert structure.rebuild(structure.leaves)[1] is weight


def test_structure_of_nothing_has_no_leaves() -> None:
    for tree in (None, (), [], {}):
        structure = Structure(tree)
        assert structure.leaves == []
        assert structure.rebuild([]) == tree


@pytest.mark.parametrize("value", [{1, 2}, object(), a])
def test_structure_refuses_what_is_not_a_tree(value: object) -> None:
    kind = type(value).__name__
    sentence = (
        r"^Cell.inject must be a tensor or a tuple, list or dict of tensors and constants; "
        rf"got an? {kind} inside it\.$"
    )
    with pytest.raises(ValueError, match=sentence):
        Structure((a(2), value), "Cell.inject")


CONSTANTS = [
    3,
    2.5,
    True,
    1j,
    "text",
    torch.Size([2, 3]),
    torch.float32,
    torch.device("cpu"),
    np.int64(3),
]


@pytest.mark.parametrize("value", CONSTANTS)
def test_structure_keeps_constants_of_a_context(value: object) -> None:
    structure = Structure({"x": (a(2), value), "y": value})
    assert len(structure.leaves) == 1
    again = structure.rebuild(structure.leaves)
    assert again["x"][1] is value
    assert again["y"] is value


@pytest.mark.parametrize("value", CONSTANTS)
def test_layout_refuses_constants_in_a_state(value: object) -> None:
    kind = type(value).__name__
    sentence = rf"of tensors; got an? {kind} inside it\. Constants belong to the context\.$"
    layout = Layout((a(2), None))
    if not isinstance(value, torch.Size):  # a tuple of whole numbers
        with pytest.raises(ValueError, match=f"^The state must be a tensor .* {sentence}"):
            Layout((a(2), value))
        with pytest.raises(ValueError, match=f"^Cell.step must be a tensor .* {sentence}"):
            layout.pack((a(2), value))


def test_layout_refuses_a_sparse_state() -> None:
    with pytest.raises(ValueError, match=r"^The state must be dense; got torch.sparse_coo\.$"):
        Layout(torch.eye(2).to_sparse())


# layouts


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("batch", [0, 1, 4])
@pytest.mark.parametrize("name", TREES)
def test_layout_packs_and_unpacks(name: str, batch: int, coupled: bool) -> None:
    tree = TREES[name](batch)
    layout = Layout(tree, coupled=coupled)
    flat = layout.pack(tree)
    assert flat.dtype == torch.float64
    total = sum(leaf.numel() * (1 + leaf.is_complex()) for leaf in Structure(tree).leaves)
    assert flat.shape == ((1, total) if coupled else (batch, layout.width))
    assert flat.numel() == total
    assert same(layout.unpack(flat), tree)


@pytest.mark.parametrize("name", TREES)
def test_layout_keeps_the_rows_of_samples_apart(name: str) -> None:
    tree = TREES[name](4)
    layout = Layout(tree)
    rows = torch.tensor([2, 0])
    structure = Structure(tree)
    wanted = structure.rebuild([leaf[rows] for leaf in structure.leaves])
    assert same(layout.unpack(layout.pack(tree)[rows]), wanted)
    assert torch.equal(layout.pack(wanted), layout.pack(tree)[rows])


def test_layout_of_a_matrix_copies_nothing() -> None:
    z = a(4, 3)
    layout = Layout(z)
    assert layout.pack(z) is z
    assert layout.unpack(z) is z


def test_layout_of_a_contiguous_tensor_is_a_view() -> None:
    z = a(4, 3, 2)
    layout = Layout(z)
    assert layout.pack(z).data_ptr() == z.data_ptr()
    assert layout.unpack(layout.pack(z)).data_ptr() == z.data_ptr()


def test_layout_packs_what_is_not_contiguous() -> None:
    z = a(4, 3, 2)
    turned = a(4, 2, 3).mT
    layout = Layout(z)
    assert same(layout.unpack(layout.pack(turned)), turned.contiguous())


def test_layout_packs_a_dict_by_its_keys_and_not_their_order() -> None:
    state = {"a": a(2, 3), "b": a(2, 3)}
    layout = Layout(state)
    other = {"b": state["b"], "a": state["a"]}
    assert torch.equal(layout.pack(other), layout.pack(state))
    assert torch.equal(layout.unpack(layout.pack(other))["a"], state["a"])


def test_layout_pack_is_differentiable() -> None:
    state = (a(2, 3).requires_grad_(), a(2, 2, 2).requires_grad_())
    layout = Layout(state)
    assert torch.autograd.gradcheck(lambda *leaves: layout.pack(leaves), state)


def test_coupled_layout_is_one_row_of_all_samples() -> None:
    state = (a(4, 3), a(4, 2))
    layout = Layout(state, coupled=True)
    assert layout.width == 20
    flat = layout.pack(state)
    assert torch.equal(flat[0], torch.cat([state[0].flatten(), state[1].flatten()]))


def test_coupled_layout_refuses_another_batch_size() -> None:
    layout = Layout(a(4, 3), coupled=True)
    with pytest.raises(
        ValueError, match=r"^Cell.step must keep the batch size of a coupled state; got 3 for 4\.$"
    ):
        layout.pack(a(3, 3))


def test_layout_refuses_a_state_without_tensors() -> None:
    for state in ((), None, {"a": None}, [Shared(a(2, 2))]):
        with pytest.raises(
            ValueError, match=r"^The state must hold at least one tensor, .* none of them Shared\.$"
        ):
            Layout(state)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.float16])
def test_layout_refuses_numbers_of_other_kinds(dtype: torch.dtype) -> None:
    sentence = rf"^The state must be float32, float64, complex64 or complex128; got {dtype}\."
    with pytest.raises(ValueError, match=sentence):
        Layout(torch.zeros(2, 3, dtype=dtype))


# complex states


def complex_state(*shape: int) -> Tensor:
    return a(*shape, dtype=torch.complex128)


def test_complex_layout_has_the_norms_and_real_inner_products_of_complex_vectors() -> None:
    x, y = complex_state(4, 3, 2), complex_state(4, 3, 2)
    layout = Layout(x)
    assert layout.width == 12
    torch.testing.assert_close(
        row_norm(layout.pack(x)), torch.linalg.vector_norm(x.flatten(1), dim=1)
    )
    dot = torch.linalg.vecdot(x.flatten(1), y.flatten(1)).real
    torch.testing.assert_close(row_dot(layout.pack(x), layout.pack(y))[:, 0], dot)


def test_complex_layout_of_a_contiguous_tensor_is_a_view() -> None:
    z = complex_state(4, 3)
    layout = Layout(z)
    assert layout.pack(z).data_ptr() == z.data_ptr()
    assert layout.unpack(layout.pack(z)).data_ptr() == z.data_ptr()


def test_complex_layout_packs_conjugates_and_what_is_not_contiguous() -> None:
    z = complex_state(4, 2, 3)
    layout = Layout(z)
    for other in (z.conj(), z.conj().imag + 0j, complex_state(4, 3, 2).mT):
        assert same(layout.unpack(layout.pack(other)), other.resolve_conj().contiguous())


def test_complex_layout_keeps_images_that_lie_channels_last() -> None:
    z = complex_state(2, 3, 4, 5).to(memory_format=torch.channels_last)
    layout = Layout(z)
    assert layout.pack(z).data_ptr() == z.data_ptr()
    again = layout.unpack(layout.pack(z))
    assert torch.equal(again, z)
    assert again.stride() == z.stride()


@pytest.mark.parametrize("rows", [1, 3])
def test_complex_layout_unpacks_matrices_that_lie_otherwise(rows: int) -> None:
    layout = Layout((complex_state(3, 2), a(3, 3)))
    flat = a(rows, 7)
    by_columns = flat.T.contiguous().T
    odd = torch.cat([a(1), flat.flatten()])[1:].view(rows, 7)
    for other in (by_columns, odd):
        assert same(layout.unpack(other), layout.unpack(flat))
    zeros = a(1, 1).expand(rows, 7)  # where linear solves start
    assert torch.equal(layout.unpack(zeros)[0].real, zeros[:, :2])


@pytest.mark.parametrize("name", ["complex matrix", "complex image", "complex and real"])
def test_complex_layout_is_differentiable_under_transforms(name: str) -> None:
    tree = TREES[name](3)
    layout = Layout(tree)
    flat = layout.pack(tree)

    def there_and_back(rows: Tensor) -> Tensor:
        return layout.pack(layout.unpack(rows))

    assert torch.autograd.gradcheck(there_and_back, (flat.requires_grad_(),))
    ensemble = torch.stack([flat, 2 * flat], dim=-1).detach()
    mapped = torch.func.vmap(there_and_back, in_dims=-1, out_dims=-1)(ensemble)
    assert torch.equal(mapped, ensemble)
    jacobian = torch.func.jacrev(lambda row: there_and_back(row[None])[0])(flat[0].detach())
    assert torch.equal(jacobian, torch.eye(layout.width, dtype=torch.float64))


def test_layout_refuses_a_change_between_real_and_complex() -> None:
    sentence = r"^Cell.step must keep the dtype of its state; got {} for a state of {}\.$"
    for given, wanted in ((torch.float32, torch.complex64), (torch.complex64, torch.float32)):
        layout = Layout(a(4, 3, dtype=wanted))
        with pytest.raises(ValueError, match=sentence.format(given, wanted)):
            layout.pack(a(4, 3, dtype=given))
        # Autocast changes precisions, but it never drops an imaginary part.
        refused = pytest.raises(ValueError, match=sentence.format(given, wanted))
        with torch.autocast("cpu", dtype=torch.bfloat16), refused:
            layout.pack(a(4, 3, dtype=given))


# what a state may not be


def test_layout_refuses_two_batch_sizes() -> None:
    with pytest.raises(
        ValueError, match=r"one batch size for all of its tensors; got shapes \(4, 3\), \(5, 3\)\.$"
    ):
        Layout((a(4, 3), a(5, 3)))


def test_layout_refuses_a_scalar() -> None:
    with pytest.raises(ValueError, match=r"^The state must be batch first"):
        Layout(torch.tensor(1.0))


def test_layout_refuses_two_dtypes_and_two_devices() -> None:
    with pytest.raises(
        ValueError,
        match=r"one precision and one device; got torch.float64 on cpu and torch.float32 on cpu\.$",
    ):
        Layout((a(4, 3), a(4, 3, dtype=torch.float32)))
    with pytest.raises(ValueError, match=r"got torch.float64 on cpu and torch.complex64 on cpu"):
        Layout((a(4, 3), a(4, 3, dtype=torch.complex64)))
    with pytest.raises(ValueError, match=r"got torch.float64 on cpu and torch.float64 on meta\.$"):
        Layout((a(4, 3), torch.zeros(4, 3, dtype=torch.float64, device="meta")))


@pytest.mark.parametrize(
    ("state", "bad"),
    [
        (lambda: a(4, 3), lambda: (a(4, 3),)),
        (lambda: a(4, 3), lambda: None),
        (lambda: (a(4, 3), a(4, 2)), lambda: a(4, 3)),
        (lambda: (a(4, 3), a(4, 2)), lambda: [a(4, 3), a(4, 2)]),
        (lambda: (a(4, 3), a(4, 2)), lambda: (a(4, 3),)),
        (lambda: (a(4, 3), a(4, 2)), lambda: ((a(4, 3), a(4, 2)),)),
        (lambda: {"a": a(4, 3)}, lambda: {"b": a(4, 3)}),
        (lambda: Pair(a(4, 3), a(4, 3)), lambda: (a(4, 3), a(4, 3))),
        (lambda: (a(4, 3), None), lambda: (None, a(4, 3))),
    ],
)
def test_layout_refuses_another_tree(state, bad) -> None:
    with pytest.raises(
        ValueError,
        match=(
            r"^step must return the tree of its state; got another nesting or number of "
            r"tensors\.$"
        ),
    ):
        Layout(state()).pack(bad(), "step")


@pytest.mark.parametrize("shape", [(4, 2), (4,), (4, 3, 1), ()])
def test_layout_refuses_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        ValueError,
        match=r"^Cell.step must return the shape of its state; got .* of shape \(batch, 3\)\.$",
    ):
        Layout(a(4, 3)).pack(a(*shape))


def test_layout_refuses_another_dtype_and_device() -> None:
    layout = Layout(a(4, 3))
    with pytest.raises(
        ValueError,
        match=(
            r"^Cell.step must keep the dtype of its state; got torch.float32 for .* "
            r"torch.float64\.$"
        ),
    ):
        layout.pack(a(4, 3, dtype=torch.float32))
    with pytest.raises(
        ValueError,
        match=r"^Cell.step must stay on the device of its state; got meta for a state on cpu\.$",
    ):
        layout.pack(torch.zeros(4, 3, dtype=torch.float64, device="meta"))


def test_layout_casts_back_under_autocast() -> None:
    layout = Layout(a(4, 3, dtype=torch.float32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        flat = layout.pack(a(4, 3, dtype=torch.bfloat16))
    assert flat.dtype == torch.float32


# rows


def test_row_norm_and_row_dot_are_those_of_numpy() -> None:
    x, y = a(4, 7), a(4, 7)
    torch.testing.assert_close(row_norm(x), (x * x).sum(dim=1).sqrt())
    torch.testing.assert_close(row_dot(x, y), (x * y).sum(dim=1, keepdim=True))
    assert row_norm(a(0, 3)).shape == (0,)
    assert row_dot(a(0, 3), a(0, 3)).shape == (0, 1)
