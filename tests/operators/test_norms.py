import math

import numpy
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from equipoise import convolution_bound
from equipoise.operators import dense_norm
from equipoise.operators import norms as norms_module

EPS = {torch.float32: 1e-6, torch.float64: 1e-12}


def spectrum(values: Tensor, rows: int, columns: int) -> Tensor:
    """A random matrix with the given singular values."""
    left = torch.linalg.qr(torch.randn(rows, len(values), dtype=values.dtype))[0]
    right = torch.linalg.qr(torch.randn(columns, len(values), dtype=values.dtype))[0]
    return left * values @ right.mT


def singular(matrix: Tensor) -> numpy.ndarray:
    return numpy.linalg.svd(
        matrix.detach().to(torch.promote_types(matrix.dtype, torch.float64)).numpy(),
        compute_uv=False,
    )


# matrices


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (4, 4), (7, 3), (3, 7), (128, 256), (300, 260)])
def test_dense_norm_is_the_largest_singular_value_rounded_up(shape, dtype):
    for _ in range(5):
        W = torch.randn(shape, dtype=dtype)
        true, found = singular(W)[0], dense_norm(W)
        assert found.dtype == dtype
        assert true <= found.item() <= true * (1 + EPS[dtype])


@pytest.mark.parametrize(
    "values",
    [
        torch.ones(300),  # all tied
        1 + 1e-3 * torch.linspace(0, 1, 300),  # too close for Lanczos steps
        torch.cat([torch.ones(2), torch.linspace(0, 0.5, 298)]),
        torch.cat([torch.ones(1), torch.zeros(299)]),
        torch.logspace(0, -200, 300, dtype=torch.float64),
        1e180 * torch.linspace(1, 2, 300, dtype=torch.float64),
        1e-180 * torch.linspace(1, 2, 300, dtype=torch.float64),
    ],
    ids=["orthogonal", "close", "two tied", "rank one", "decaying", "huge", "tiny"],
)
def test_dense_norm_of_hard_spectra(values):
    for sizes in ((300, 300), (310, 300), (300, 310)):
        W = spectrum(values.double(), *sizes).requires_grad_()
        true, found = singular(W)[0], dense_norm(W)
        assert true * (1 - 1e-14) <= found.item() <= true * (1 + 1e-12)
        (gradient,) = torch.autograd.grad(found, W)
        # a subgradient of the norm: its own dual norm is one, and it attains the norm
        assert singular(gradient).sum() == pytest.approx(1, abs=1e-10)
        assert (gradient * W).sum().item() == pytest.approx(true, rel=1e-10)


def test_dense_norm_of_zero():
    for shape in ((3, 4), (300, 300)):
        W = torch.zeros(shape, requires_grad=True)
        norm = dense_norm(W)
        assert norm.item() == 0
        assert torch.autograd.grad(norm, W)[0].isfinite().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_norms_of_what_is_not_finite_are_nan(bad):
    for shape in ((3, 4), (300, 300)):
        W = torch.randn(shape)
        W[1, 2] = bad
        assert dense_norm(W).isnan()
    for shape, groups in (
        ((4, 3, 3, 3), 1),
        ((4, 1, 3, 3), 4),
        ((4, 2, 2, 2), 2),
        ((4, 3, 1, 1), 1),
    ):
        kernel = torch.randn(shape)
        kernel[3, 0, 0, 0] = bad
        assert convolution_bound(kernel, groups=groups).isnan()


@pytest.mark.parametrize("lanczos", [1000, 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("shape", [(3, 3), (4, 3), (2, 4), (1, 1)])
def test_dense_norm_has_first_and_second_derivatives(shape, dtype, lanczos, monkeypatch):
    monkeypatch.setattr(norms_module, "LANCZOS", lanczos)
    W = torch.randn(shape, dtype=dtype, requires_grad=True)
    assert torch.autograd.gradcheck(dense_norm, (W,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(dense_norm, (W,))


def test_dense_norm_has_second_derivatives_where_other_singular_values_are_equal():
    W = spectrum(torch.tensor([2.0, 1, 1, 0, 0], dtype=torch.float64), 5, 6).requires_grad_()
    assert torch.autograd.gradgradcheck(dense_norm, (W,))


def test_dense_norm_under_function_transforms():
    many = torch.randn(3, 4, 5, dtype=torch.float64)
    norms = torch.linalg.matrix_norm(many, 2)
    torch.testing.assert_close(torch.vmap(dense_norm)(many), norms)
    torch.testing.assert_close(torch.vmap(dense_norm, in_dims=2)(many.movedim(0, 2)), norms)
    gradients = torch.vmap(torch.func.grad(dense_norm))(many)
    for W, gradient in zip(many, gradients, strict=True):
        torch.testing.assert_close(
            gradient, torch.func.grad(lambda w: torch.linalg.matrix_norm(w, 2))(W)
        )
    true = torch.func.hessian(lambda w: torch.linalg.matrix_norm(w, 2))(many[0])
    for outer in (torch.func.jacfwd, torch.func.jacrev):
        for inner in (torch.func.jacfwd, torch.func.jacrev):
            torch.testing.assert_close(outer(inner(dense_norm))(many[0]), true)


def test_a_missed_eigenvalue_is_noticed(monkeypatch):
    W = torch.randn(300, 300, dtype=torch.float64)
    monkeypatch.setattr(
        norms_module, "_lanczos", lambda gram, _tolerance: torch.linalg.eigh(gram)[1][:, -2]
    )
    assert dense_norm(W).item() == pytest.approx(singular(W)[0], rel=1e-12)


def test_large_matrices_need_no_full_decomposition(monkeypatch):
    W = torch.randn(300, 400, requires_grad=True)
    full = torch.linalg.eigh

    def small(matrix: Tensor) -> tuple[Tensor, Tensor]:
        assert len(matrix) <= norms_module.STEPS
        return full(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", small)
    dense_norm(W).backward()
    assert W.grad.isfinite().all()


def test_norms_are_deterministic_and_leave_the_generator_alone():
    W, kernel = torch.randn(300, 300), torch.randn(4, 3, 3, 3)
    state = torch.get_rng_state()
    assert dense_norm(W) == dense_norm(W)
    assert convolution_bound(kernel) == convolution_bound(kernel)
    assert (torch.get_rng_state() == state).all()


def test_norms_are_not_rounded_by_autocast():
    W, kernel = torch.randn(20, 30), torch.randn(4, 3, 3, 3)
    plain = dense_norm(W), convolution_bound(kernel)
    with torch.autocast("cpu", torch.bfloat16):
        assert (dense_norm(W), convolution_bound(kernel)) == plain


def test_dense_norm_refuses_other_shapes():
    for shape in ((3,), (2, 3, 3), (0, 3)):
        with pytest.raises(
            ValueError,
            match=r"^dense_norm.W must be a matrix with at least one entry; got shape \(",
        ):
            dense_norm(torch.zeros(shape))


# convolutions


def operator(kernel: Tensor, size: tuple[int, int], mode: str, groups: int = 1) -> Tensor:
    """The matrix of the convolution on images of a size."""
    into = kernel.shape[1] * groups
    basis = torch.eye(into * size[0] * size[1], dtype=kernel.dtype).view(-1, into, *size)
    edge = [side for k in (kernel.shape[3], kernel.shape[2]) for side in ((k - 1) // 2, k // 2)]
    padded = (
        functional.pad(basis, edge, mode="circular")
        if mode == "circular"
        else functional.pad(basis, edge)
    )
    return functional.conv2d(padded, kernel, groups=groups).flatten(1)


def on_grid(kernel: Tensor, size: tuple[int, int], groups: int = 1) -> float:
    """The largest norm of the kernel's matrices over a grid of frequencies."""
    # a Fourier transform of the kernel, with zeros around it; a grid smaller than the kernel is not
    # needed here
    parts = kernel.detach().double().numpy().reshape(groups, -1, *kernel.shape[1:])
    matrices = numpy.fft.fft2(parts, s=size).transpose(0, 3, 4, 1, 2)
    return float(numpy.linalg.norm(matrices, 2, axis=(3, 4)).max())


def supremum(kernel: Tensor, groups: int = 1) -> float:
    """The supremum over all frequencies, from below, to about two parts in a thousand."""
    return on_grid(kernel, tuple(1 if n == 1 else 32 * n + 1 for n in kernel.shape[2:]), groups)


KERNELS = [
    ((3, 3, 1, 1), 1),
    ((4, 3, 3, 3), 1),
    ((2, 6, 3, 3), 1),
    ((3, 2, 5, 5), 1),
    ((3, 4, 2, 3), 1),
    ((1, 1, 2, 2), 1),
    ((2, 2, 1, 4), 1),
    ((2, 3, 3, 1), 1),
    ((4, 2, 3, 3), 2),
    ((6, 1, 3, 3), 3),
    ((3, 1, 3, 3), 3),
    ((4, 1, 2, 5), 4),
    ((4, 2, 1, 1), 2),
]


def kinds(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(1)
    first = torch.zeros(shape, dtype=dtype)
    first[..., 0, 0] = torch.randn(shape[:2], dtype=dtype)
    last = torch.zeros(shape, dtype=dtype)
    last[..., -1, -1] = torch.randn(shape[:2], dtype=dtype)
    signs = (-1.0) ** (torch.arange(shape[2])[:, None] + torch.arange(shape[3]))
    smooth = torch.randn(*shape[:2], 1, 1, dtype=dtype) + 0.2 * torch.randn(shape, dtype=dtype)
    return [
        *(torch.randn(shape, dtype=dtype) for _ in range(4)),
        first,
        last,
        torch.ones(
            shape, dtype=dtype
        ),  # largest at frequency zero; the worst case for the reshaped kernel
        torch.ones(shape, dtype=dtype) * signs.to(dtype),  # largest at the highest frequency
        smooth,
        torch.randn(shape, dtype=dtype) * torch.rand(shape, dtype=dtype) ** 8,
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("shape", "groups"), KERNELS)
def test_convolution_bound_is_above_the_true_norm_and_close_to_the_supremum(shape, groups, dtype):
    for kernel in kinds(shape, dtype):
        bound = convolution_bound(kernel, groups=groups)
        assert bound.dtype == dtype
        least = supremum(kernel, groups)
        assert least <= bound.item() <= 1.02 * least
        for mode in ("zeros", "circular"):
            for size in ((5, 5), (6, 7), (8, 5)):
                assert singular(operator(kernel.double(), size, mode, groups))[0] <= bound.item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("shape", "groups"), KERNELS)
def test_convolution_bound_of_a_known_circular_size_is_the_norm(shape, groups, dtype):
    for kernel in kinds(shape, dtype):
        for size in ((5, 5), (6, 7), (8, 5)):
            true = singular(operator(kernel.double(), size, "circular", groups))[0]
            found = convolution_bound(kernel, groups=groups, circular_size=size).item()
            assert true * (1 - 1e-13) <= found <= true * (1 + 4 * EPS[dtype])


def test_convolution_bound_of_a_larger_kernel_is_the_largest_of_its_grid():
    # several rounds of the search: chunks, survivors, both precisions
    for shape, groups in (
        ((20, 33, 3, 3), 1),
        ((40, 20, 3, 3), 2),
        ((6, 5, 5, 5), 1),
        ((24, 3, 3, 3), 8),
    ):
        for flat in (False, True):
            kernel = torch.randn(shape, dtype=torch.float64)
            if flat:  # lower the largest values until many frequencies compete
                kernel.requires_grad_()
                for _ in range(20):
                    (slope,) = torch.autograd.grad(convolution_bound(kernel, groups=groups), kernel)
                    kernel = (kernel - 0.3 * slope).detach().requires_grad_()
            grid = (12 * (shape[2] - 1), 12 * (shape[3] - 1))
            slack = math.cos(math.pi / 24) ** -2
            assert convolution_bound(kernel, groups=groups).item() == pytest.approx(
                slack * on_grid(kernel, grid, groups), rel=1e-11
            )


def test_convolution_bound_is_sharp_between_grid_frequencies():
    # 1 + exp(i (a - w)) has its largest value 2 at w = a, here in the middle between two
    # frequencies of the grid, and images with twice as many columns have that frequency: any less
    # slack would be too little.
    angle = math.pi / 12
    rotation = [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
    row = torch.stack(
        [torch.eye(2, dtype=torch.float64), torch.tensor(rotation, dtype=torch.float64)], dim=2
    )
    kernel = row.unsqueeze(2)
    assert singular(operator(kernel, (1, 24), "circular"))[0] == pytest.approx(2, rel=1e-11)
    assert convolution_bound(kernel).item() == pytest.approx(2, rel=1e-11)
    assert convolution_bound(kernel, circular_size=(1, 24)).item() == pytest.approx(2, rel=1e-11)
    assert convolution_bound(kernel, circular_size=(1, 12)).item() == pytest.approx(
        2 * math.cos(angle / 2), rel=1e-11
    )
    both = torch.einsum("oih,xyw->oxiyhw", row, row).reshape(4, 4, 2, 2)
    assert convolution_bound(both).item() == pytest.approx(4, rel=1e-11)
    assert convolution_bound(both, circular_size=(24, 24)).item() == pytest.approx(4, rel=1e-11)


@pytest.mark.parametrize("length", [2, 3, 4, 5, 8])
def test_polynomials_are_not_much_larger_between_grid_points(length):
    generator = numpy.random.default_rng(0)
    for points in (length, length + 1, 2 * length, 12 * (length - 1)):
        slack = (1 + 1e-12) / math.cos(math.pi * (length - 1) / (2 * points))
        line = generator.normal(size=(200, length)) + 1j * generator.normal(size=(200, length))
        assert (
            abs(numpy.fft.fft(line, 4096)).max(1) <= slack * abs(numpy.fft.fft(line, points)).max(1)
        ).all()
        plane = line[:, :, None] * line[:, None] + generator.normal(size=(200, length, length))
        fine, coarse = (abs(numpy.fft.fft2(plane, (n, n))).max((1, 2)) for n in (128, points))
        assert (fine <= slack**2 * coarse).all()


def test_convolution_bound_of_one_tap_is_the_norm_of_its_matrix():
    kernel = torch.randn(5, 4, 1, 1)
    assert convolution_bound(kernel) == dense_norm(kernel[:, :, 0, 0])


def test_convolution_bound_of_groups_is_the_largest_of_theirs():
    kernel = torch.randn(6, 2, 3, 3, dtype=torch.float64)
    kernel[2:4] *= 3
    parts = [convolution_bound(part) for part in kernel.split(2)]
    torch.testing.assert_close(
        convolution_bound(kernel, groups=3), torch.stack(parts).max(), rtol=1e-11, atol=0
    )


def test_convolution_bound_scales_with_the_kernel():
    kernel = torch.randn(3, 4, 3, 3, dtype=torch.float64)
    bound = convolution_bound(kernel).item()
    for scale in (1e-180, 1e-8, 1e8, 1e180):
        assert convolution_bound(scale * kernel).item() == pytest.approx(scale * bound, rel=1e-11)
    subnormal = 1e-309 * kernel  # has lost some of its digits itself
    assert convolution_bound(subnormal).item() == pytest.approx(1e-309 * bound, rel=1e-9)
    kernel = kernel.float()
    for scale in (1e-30, 1e30):  # squares would leave float32
        assert convolution_bound(scale * kernel).item() == pytest.approx(scale * bound, rel=1e-5)


def test_convolution_bound_holds_for_strides_and_dilations():
    kernel = torch.randn(3, 2, 3, 3, dtype=torch.float64)
    basis = torch.eye(2 * 9 * 9, dtype=torch.float64).view(-1, 2, 9, 9)
    for options in ({"stride": 2}, {"dilation": 2}, {"stride": 3, "dilation": 3}, {}):
        matrix = functional.conv2d(functional.pad(basis, [3] * 4), kernel, **options).flatten(1)
        assert singular(matrix)[0] <= convolution_bound(kernel).item()


def test_convolution_bound_holds_where_the_reshaped_kernel_does_not():
    kernel = torch.ones(3, 3, 3, 3, dtype=torch.float64)
    reshaped = kernel / torch.linalg.matrix_norm(kernel.flatten(1), 2)
    assert singular(operator(reshaped, (8, 8), "zeros"))[0] > 1.6
    assert singular(operator(kernel / convolution_bound(kernel), (8, 8), "zeros"))[0] <= 1


@pytest.mark.parametrize(
    ("shape", "groups"),
    [((3, 2, 3, 3), 1), ((2, 4, 2, 2), 1), ((4, 1, 3, 3), 4), ((4, 2, 1, 3), 2), ((3, 4, 1, 1), 1)],
)
def test_convolution_bound_has_first_and_second_derivatives(shape, groups):
    kernel = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    for size in (None, (4, 5)):

        def bound(k: Tensor, size: tuple[int, int] | None = size) -> Tensor:
            return convolution_bound(k, groups=groups, circular_size=size)

        assert torch.autograd.gradcheck(bound, (kernel,), check_forward_ad=True)
        assert torch.autograd.gradgradcheck(bound, (kernel,))


def test_convolution_bound_under_function_transforms():
    many = torch.randn(3, 4, 2, 3, 3, dtype=torch.float64)
    bounds = torch.stack([convolution_bound(kernel) for kernel in many])
    torch.testing.assert_close(torch.vmap(convolution_bound)(many), bounds)
    kernel = many[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(convolution_bound(kernel), kernel)
    torch.testing.assert_close(torch.vmap(torch.func.grad(convolution_bound))(many)[0], slope)


def test_convolution_bound_of_zero():
    kernel = torch.zeros(3, 2, 3, 3, requires_grad=True)
    bound = convolution_bound(kernel)
    assert bound.item() == 0
    assert torch.autograd.grad(bound, kernel)[0].isfinite().all()


def test_convolution_bound_refuses_other_shapes():
    with pytest.raises(
        ValueError,
        match=r"^convolution_bound.kernel must have shape \(out, in, h, w\); got \(3, 3\)\.$",
    ):
        convolution_bound(torch.zeros(3, 3))
    with pytest.raises(
        ValueError, match=r"^convolution_bound.groups must divide the 4 output channels; got 3\.$"
    ):
        convolution_bound(torch.zeros(4, 3, 3, 3), groups=3)
    with pytest.raises(
        ValueError,
        match=r"^convolution_bound.circular_size must be a pair .*; got \(0, 3\)\.$",
    ):
        convolution_bound(torch.zeros(4, 3, 3, 3), circular_size=(0, 3))
