from __future__ import annotations

import copy
import itertools
import math
import pickle
from dataclasses import FrozenInstanceError, dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from scipy.integrate import quad
from scipy.optimize import minimize_scalar
from scipy.special import spence
from torch import Tensor, nn

from equipoise.prox import (
    ACTIVATIONS,
    ELU,
    Activation,
    HardTanh,
    Identity,
    LeakyReLU,
    MatrixActivation,
    ReLU,
    Sigmoid,
    Softplus,
    SoftShrink,
    Tanh,
    as_activation,
    from_module,
)

TORCH = {
    "relu": torch.relu,
    "leaky_relu": F.leaky_relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": lambda a: torch.logaddexp(a, torch.zeros_like(a)),
    "elu": F.elu,
    "hard_tanh": F.hardtanh,
    "soft_shrink": F.softshrink,
    "identity": lambda a: a,
}
"""Torch's own function for every name; a new activation must be added here."""

NUMPY = {
    ReLU: lambda _, t: max(t, 0.0),
    LeakyReLU: lambda s, t: t if t > 0 else s.negative_slope * t,
    Tanh: lambda _, t: math.tanh(t),
    Sigmoid: lambda _, t: float(np.exp(-np.logaddexp(0, -t))),
    Softplus: lambda _, t: float(np.logaddexp(0, t)),
    ELU: lambda s, t: t if t > 0 else s.alpha * math.expm1(t),
    HardTanh: lambda _, t: min(max(t, -1.0), 1.0),
    SoftShrink: lambda s, t: math.copysign(max(abs(t) - s.threshold, 0.0), t),
    Identity: lambda _, t: t,
}
"""A witness without torch."""

RANGES = {
    ReLU: (0, math.inf),
    LeakyReLU: (-math.inf, math.inf),
    Tanh: (-1, 1),
    Sigmoid: (0, 1),
    Softplus: (0, math.inf),
    ELU: (-1, math.inf),
    HardTanh: (-1, 1),
    SoftShrink: (-math.inf, math.inf),
    Identity: (-math.inf, math.inf),
}

ALL = [ACTIVATIONS[name]() for name in ACTIVATIONS]
VARIANTS = [
    *ALL,
    LeakyReLU(0.0),
    LeakyReLU(0.3),
    ELU(0.0),
    ELU(0.4),
    ELU(2.5),
    SoftShrink(0.0),
    SoftShrink(1.5),
]

every = pytest.mark.parametrize("s", VARIANTS, ids=repr)
dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64], ids=["float32", "float64"]
)

SIZES = [1e-3, 0.1, 0.5, 0.9, 1.0, 1.1, 3.0, 8.0, 20.0, 21.0, 39.0, 50.0]
LARGE = [0.0, *SIZES, *(-a for a in SIZES)]


def closed_range(s: Activation) -> tuple[float, float]:
    low, high = RANGES[type(s)]
    if isinstance(s, ELU):
        low = -s.alpha
    if isinstance(s, LeakyReLU) and s.negative_slope == 0:
        low = 0
    return low, high


def smooth(n: int = 60, low: float = -9.0, high: float = 9.0) -> Tensor:
    """Points away from every kink."""
    a = torch.linspace(low, high, n, dtype=torch.float64)
    for kink in (-1.5, -1, -0.5, 0, 0.5, 1, 1.5):
        a = a[(a - kink).abs() > 1e-3]
    return a


def inside(s: Activation, n: int = 25) -> Tensor:
    """Points strictly inside the range."""
    low, high = closed_range(s)
    low, high = max(low, -6.0), min(high, 6.0)
    return torch.linspace(low, high, n + 2, dtype=torch.float64)[1:-1]


def test_registry_holds_the_admissible_activations() -> None:
    assert set(ACTIVATIONS) == set(TORCH)
    assert all(s.admissible and s.reason == "" and s.elementwise for s in VARIANTS)


@dtypes
@pytest.mark.parametrize("name", list(TORCH))
def test_value_is_torchs_own(name: str, dtype: torch.dtype) -> None:
    a = torch.cat([torch.linspace(-60, 60, 997), torch.tensor([0.0, -0.5, 0.5, 1.0, -1.0])]).to(
        dtype
    )
    found = ACTIVATIONS[name]()(a)
    assert found.dtype == dtype
    torch.testing.assert_close(
        found, TORCH[name](a), rtol=4 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).tiny
    )


@every
@dtypes
def test_value_is_the_formula(s: Activation, dtype: torch.dtype) -> None:
    a = torch.tensor(LARGE, dtype=dtype)
    wanted = torch.tensor([NUMPY[type(s)](s, t) for t in a.tolist()], dtype=dtype)
    torch.testing.assert_close(
        s(a), wanted, rtol=10 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).tiny
    )


@every
@dtypes
def test_derivative_is_autograds_also_at_kinks(s: Activation, dtype: torch.dtype) -> None:
    kinks = torch.tensor([0.0, 0.5, -0.5, 1.0, -1.0, 1.5, -1.5])
    a = torch.cat([torch.linspace(-30, 30, 601), kinks]).to(dtype).requires_grad_()
    (wanted,) = torch.autograd.grad(s(a).sum(), a)
    found = s.derivative(a)
    assert found.dtype == dtype
    torch.testing.assert_close(
        found, wanted, rtol=0, atol=4 * torch.finfo(dtype).eps * max(1, s.slopes[1])
    )


@pytest.mark.parametrize(("s", "rate"), [(Tanh(), 2.0), (Sigmoid(), 1.0)], ids=repr)
def test_derivative_keeps_its_relative_accuracy_in_the_tails(s: Activation, rate: float) -> None:
    a = torch.tensor([-40.0, 40.0], dtype=torch.float64)
    leading = (4 if isinstance(s, Tanh) else 1) * torch.exp(-rate * a.abs())
    torch.testing.assert_close(s.derivative(a), leading, rtol=1e-14, atol=0)


@every
def test_value_and_derivative_are_differentiable_twice(s: Activation) -> None:
    a = smooth().requires_grad_()
    assert torch.autograd.gradcheck(s, (a,))
    assert torch.autograd.gradgradcheck(s, (a,), atol=1e-6)


@every
def test_potential_is_the_integral(s: Activation) -> None:
    found = s.potential(torch.tensor(LARGE, dtype=torch.float64))
    for a, value in zip(LARGE, found.tolist(), strict=True):
        low, high = sorted((0.0, a))
        ends = sorted(
            {low, high}
            | {k for k in (-20, -5, -1.5, -1, -0.5, 0.5, 1, 1.5, 5, 20) if low < k < high}
        )
        pieces = [
            quad(lambda t: NUMPY[type(s)](s, t), start, end, epsabs=0, epsrel=1e-13)[0]
            for start, end in itertools.pairwise(ends)
        ]
        assert value == pytest.approx(
            math.copysign(1, a) * math.fsum(pieces), rel=3e-14, abs=1e-300
        )


@every
def test_potential_in_float32_is_that_in_float64(s: Activation) -> None:
    a = torch.cat(
        [torch.linspace(-50, 50, 1001), torch.logspace(-6, 1, 50), -torch.logspace(-6, 1, 50)]
    )
    found = s.potential(a)
    assert found.dtype == torch.float32
    # soft-shrink subtracts its threshold from a given number, so only its absolute error is bounded
    # near the kink
    torch.testing.assert_close(
        found.double(),
        s.potential(a.double()),
        rtol=2e-6,
        atol=1e-6 if isinstance(s, SoftShrink) else 0,
    )


@every
@dtypes
def test_potential_does_not_overflow_before_its_value_does(
    s: Activation, dtype: torch.dtype
) -> None:
    large = 1e18 if dtype == torch.float32 else 1e150
    a = torch.tensor([-large, large], dtype=dtype)
    assert bool(s.potential(a).isfinite().all())
    assert s.potential(torch.zeros(3, dtype=dtype)).tolist() == [0, 0, 0]
    assert bool(s.potential(torch.tensor([math.nan], dtype=dtype)).isnan().all())


@every
def test_potential_has_the_activation_as_its_gradient(s: Activation) -> None:
    a = torch.tensor(LARGE, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(s.potential(a).sum(), a)
    assert torch.equal(found, s(a))


@every
def test_potential_passes_gradcheck_in_every_mode(s: Activation) -> None:
    a = smooth(40).requires_grad_()
    assert torch.autograd.gradcheck(s.potential, (a,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(s.potential, (a,), atol=1e-6)


@pytest.mark.parametrize("name", ["tanh", "sigmoid", "softplus"])
def test_potential_is_smooth_at_zero(name: str) -> None:
    s = as_activation(name)
    zero = torch.zeros((), dtype=torch.float64)
    second = torch.func.grad(torch.func.grad(s.potential))
    assert float(second(zero)) == pytest.approx(float(s.derivative(zero)), rel=1e-14)
    assert float(torch.func.vmap(torch.func.grad(s.potential))(zero[None])) == pytest.approx(
        float(s(zero)), rel=1e-14
    )


def test_softplus_potential_is_the_dilogarithm() -> None:
    a = torch.cat(
        [torch.linspace(-45, 25, 3001), torch.logspace(-14, 0, 200), -torch.logspace(-14, 0, 200)]
    ).double()
    wanted = (
        torch.from_numpy(-spence(1 + np.exp(a.numpy()))) - math.pi**2 / 12
    )  # spence(x) is Li2(1 - x)
    torch.testing.assert_close(Softplus().potential(a), wanted, rtol=1e-14, atol=1e-14)


def test_softplus_potential_obeys_the_inversion_formula() -> None:
    a = torch.cat([torch.logspace(-10, 8, 500)]).double()
    s = Softplus()
    torch.testing.assert_close(
        s.potential(a) + s.potential(-a), a.square() / 2, rtol=1e-14, atol=2e-16
    )
    assert float(s.potential(torch.tensor(-800.0, dtype=torch.float64))) == pytest.approx(
        -(math.pi**2) / 12, rel=1e-15
    )


def test_softplus_potential_keeps_its_relative_accuracy_at_zero() -> None:
    for a in (1e-9, -1e-9, 1e-4, -1e-4):
        wanted = a * (math.log(2) + a / 4 + a**2 / 24)  # the next term is a^5 / 960
        assert float(Softplus().potential(torch.tensor(a, dtype=torch.float64))) == pytest.approx(
            wanted, rel=5e-16, abs=0
        )


@every
def test_potential_is_convex(s: Activation) -> None:
    a = torch.linspace(-50, 50, 4001, dtype=torch.float64)
    S = s.potential(a)
    assert bool((S[2:] - 2 * S[1:-1] + S[:-2] >= -1e-12).all())


@every
def test_conjugate_is_the_supremum(s: Activation) -> None:
    for y, found in zip(inside(s).tolist(), s.conjugate(inside(s)).tolist(), strict=True):

        def loss(a: float, y: float = y) -> float:
            return float(s.potential(torch.tensor(a, dtype=torch.float64))) - a * y

        result = minimize_scalar(
            loss, bounds=(-700.0, 30.0), method="bounded", options={"xatol": 1e-9, "maxiter": 500}
        )
        assert found == pytest.approx(-result.fun, rel=1e-11, abs=1e-13)


@every
def test_conjugate_bounds_every_line(s: Activation) -> None:
    """Fenchel-Young: a y <= S(a) + S*(y)."""
    a = torch.linspace(-40, 40, 801, dtype=torch.float64)
    low, high = closed_range(s)
    y = torch.cat(
        [inside(s), torch.tensor([v for v in (low, high) if math.isfinite(v)], dtype=torch.float64)]
    )
    assert bool((s.potential(a)[:, None] + s.conjugate(y) - a[:, None] * y >= -1e-12).all())


@every
@dtypes
def test_conjugate_and_potential_meet_at_the_value(s: Activation, dtype: torch.dtype) -> None:
    """Fenchel-Young: S(a) + S*(s(a)) = a s(a)."""
    a = torch.cat([torch.linspace(-50, 50, 1001), torch.tensor([0.0, 1e-4, -1e-4])]).to(dtype)
    y = s(a)
    if isinstance(
        s, Tanh | Sigmoid | ELU
    ):  # where y has rounded to the end of the range it is another point
        low, high = closed_range(s)
        a, y = a[(y - low > 1e-3) & (high - y > 1e-3)], y[(y - low > 1e-3) & (high - y > 1e-3)]
        assert len(a) > 50 or s == ELU(0.0)
    rounding = 40 * torch.finfo(dtype).eps
    torch.testing.assert_close(s.potential(a) + s.conjugate(y), a * y, rtol=rounding, atol=rounding)


@every
@dtypes
def test_conjugate_is_infinite_exactly_outside_the_range(s: Activation, dtype: torch.dtype) -> None:
    low, high = closed_range(s)
    edge = torch.tensor([v for v in (low, high) if math.isfinite(v)], dtype=dtype)
    assert bool(s.conjugate(edge).isfinite().all())
    beyond = torch.tensor(
        [v for v in (low - 1e-3, low - 50, high + 1e-3, high + 50) if math.isfinite(v)], dtype=dtype
    )
    assert bool((s.conjugate(beyond) == math.inf).all())
    assert bool(s.conjugate(torch.tensor([math.nan], dtype=dtype)).isnan().all())
    assert s.conjugate(inside(s).to(dtype)).dtype == dtype


@pytest.mark.parametrize(
    ("s", "y", "wanted"),
    [
        (ReLU(), 0.0, 0.0),
        (Tanh(), 1.0, math.log(2)),
        (Tanh(), -1.0, math.log(2)),
        (Sigmoid(), 0.0, math.log(2)),
        (Sigmoid(), 1.0, math.log(2)),
        (Softplus(), 0.0, math.pi**2 / 12),
        (ELU(2.0), -2.0, 2.0),
        (HardTanh(), -1.0, 0.5),
    ],
    ids=repr,
)
def test_conjugate_at_the_ends_of_the_range(s: Activation, y: float, wanted: float) -> None:
    """The value there is the limit of -S(a) + a y at infinity, in closed form."""
    assert float(s.conjugate(torch.tensor(y, dtype=torch.float64))) == pytest.approx(
        wanted, rel=1e-15, abs=0
    )


@every
def test_conjugate_has_the_inverse_as_its_gradient(s: Activation) -> None:
    y = inside(s)
    y = y[y.abs() > 1e-6].requires_grad_()
    (a,) = torch.autograd.grad(s.conjugate(y).sum(), y)
    torch.testing.assert_close(s(a), y.detach(), rtol=1e-13, atol=1e-13)


@every
def test_slopes_bound_every_secant_and_are_approached(s: Activation) -> None:
    lower, upper = s.slopes
    a = torch.linspace(-40, 40, 80001, dtype=torch.float64)
    secants = (s(a)[1:] - s(a)[:-1]) / (a[1:] - a[:-1])
    assert bool((secants >= lower - 1e-10).all())
    assert bool((secants <= upper + 1e-10).all())
    assert float(secants.min()) == pytest.approx(lower, abs=1e-8)
    assert float(secants.max()) == pytest.approx(upper, rel=1e-3)
    derivative = s.derivative(a)
    assert bool(((derivative >= lower) & (derivative <= upper * (1 + 1e-15))).all())
    assert float(derivative.max()) == pytest.approx(upper, rel=1e-6)


@every
def test_activation_is_a_frozen_value(s: Activation) -> None:
    assert copy.deepcopy(s) == s == pickle.loads(pickle.dumps(s))
    assert hash(copy.deepcopy(s)) == hash(s)
    with pytest.raises(FrozenInstanceError):
        s.threshold = 3.0


@pytest.mark.parametrize("slope", [-0.1, 1.0, 2.0, math.nan, math.inf, True, "0.1"])
def test_leaky_relu_refuses_slopes_outside_its_interval(slope: object) -> None:
    with pytest.raises(ValueError, match=r"^LeakyReLU\.negative_slope must be in \[0, 1\); got "):
        LeakyReLU(slope)


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, True, None])
def test_parameters_refuse_what_is_not_a_size(value: object) -> None:
    with pytest.raises(
        ValueError, match=r"^ELU\.alpha must be zero or a positive number; got .*decrease\.$"
    ):
        ELU(value)
    with pytest.raises(
        ValueError,
        match=r"^SoftShrink\.threshold must be zero or a positive number; got .*jump\.$",
    ):
        SoftShrink(value)


# resolving


def test_activation_takes_a_name_or_an_object() -> None:
    assert as_activation("leaky_relu") == LeakyReLU(0.01)
    s = ELU(0.3)
    assert as_activation(s) is s


def test_activation_suggests_a_name() -> None:
    with pytest.raises(
        ValueError,
        match=(
            r"^activation must be one of elu, .*, tanh; got 'sofplus'\. Did you mean "
            r"'softplus'\?$"
        ),
    ):
        as_activation("sofplus")


@pytest.mark.parametrize("value", [3, None, [1], lambda a: a, ReLU])
def test_activation_refuses_other_things(value: object) -> None:
    with pytest.raises(ValueError, match=r"^activation must be a name or a"):
        as_activation(value)


NEGATIVE = {"gelu": F.gelu, "silu": F.silu, "swish": F.silu, "mish": F.mish}


@pytest.mark.parametrize("name", list(NEGATIVE))
def test_activation_refuses_what_is_not_monotone_and_tells_the_truth(name: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^activation '{name}' is not admissible: .* Use 'softplus' or 'relu'\.$"
    ) as caught:
        as_activation(name)
    words = str(caught.value).replace(")", "").replace(",", "").split()
    slope, below = float(words[words.index("about") + 1]), float(words[words.index("below") + 1])
    a = torch.linspace(-20, 5, 250001, dtype=torch.float64, requires_grad=True)
    (slopes,) = torch.autograd.grad(NEGATIVE[name](a).sum(), a)
    assert float(slopes.min()) == pytest.approx(slope, abs=5e-4)
    assert bool((slopes[a < below - 1e-3] < 0).all())
    assert bool((slopes[a > below + 1e-3] > 0).all())


@pytest.mark.parametrize(
    ("module", "name"),
    [(nn.GELU(), "gelu"), (nn.GELU("tanh"), "gelu"), (nn.SiLU(), "silu"), (nn.Mish(), "mish")],
)
@pytest.mark.parametrize("resolve", [as_activation, from_module])
def test_modules_that_are_not_monotone_are_refused_for_the_same_reason(
    module: nn.Module, name: str, resolve
) -> None:
    with pytest.raises(
        ValueError, match=rf"^activation '{name}' is not admissible: its slope is negative"
    ):
        resolve(module)


def test_functions_that_are_not_monotone_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^activation 'silu' is not admissible"):
        as_activation(F.silu)


MODULES = [
    (nn.ReLU(), ReLU()),
    (nn.ReLU(inplace=True), ReLU()),
    (nn.LeakyReLU(), LeakyReLU()),
    (nn.LeakyReLU(0.1), LeakyReLU(0.1)),
    (nn.Tanh(), Tanh()),
    (nn.Sigmoid(), Sigmoid()),
    (nn.Softplus(), Softplus()),
    (nn.ELU(0.7), ELU(0.7)),
    (nn.Hardtanh(), HardTanh()),
    (nn.Softshrink(0.2), SoftShrink(0.2)),
    (nn.Identity(), Identity()),
    (torch.relu, ReLU()),
    (F.relu, ReLU()),
    (F.leaky_relu, LeakyReLU()),
    (torch.tanh, Tanh()),
    (F.tanh, Tanh()),
    (torch.sigmoid, Sigmoid()),
    (F.sigmoid, Sigmoid()),
    (F.softplus, Softplus()),
    (F.elu, ELU()),
    (F.hardtanh, HardTanh()),
    (F.softshrink, SoftShrink()),
]


@pytest.mark.parametrize(
    ("module", "wanted"), MODULES, ids=lambda value: getattr(value, "__name__", repr(value))
)
def test_from_module_finds_the_same_function(module, wanted: Activation) -> None:
    a = torch.linspace(-30, 30, 601, dtype=torch.float64)
    assert from_module(module) == wanted == as_activation(module)
    torch.testing.assert_close(
        wanted(a), module(a.clone()), rtol=0, atol=3e-9 if wanted == Softplus() else 1e-15
    )


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Softplus(beta=2), r"nn\.Softplus\.beta must be 1; got 2"),
        (nn.Softplus(threshold=3), r"nn\.Softplus\.threshold must be at least 20; got 3"),
        (nn.Hardtanh(0, 6), r"nn\.Hardtanh must have the bounds -1 and 1; got 0 and 6"),
        (nn.ReLU6(), r"from_module must get one of nn\.ReLU, .*; got ReLU6"),
        (nn.Linear(2, 2), r"from_module must get one of .*; got Linear"),
        (nn.LeakyReLU(1.5), r"LeakyReLU\.negative_slope must be in \[0, 1\); got 1\.5"),
        (nn.ELU(-1.0), r"ELU\.alpha must be zero or a positive number; got -1\.0"),
        (nn.ReLU, r"from_module must get an object; got the class ReLU\. Write nn\.ReLU\(\)\."),
    ],
    ids=repr,
)
@pytest.mark.parametrize("resolve", [as_activation, from_module])
def test_from_module_refuses_other_functions(module, message: str, resolve) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(module)


def test_from_module_refuses_a_function_that_torch_does_not_have() -> None:
    with pytest.raises(
        ValueError,
        match=(
            r"from_module must get one of .*; got cos\. For another function write an "
            r"Activation\."
        ),
    ):
        from_module(torch.cos)


@dataclass(frozen=True)
class Own(Activation):
    """An activation as a user would write it: `s(a) = rate a`, with the slopes it claims."""

    claimed: tuple[float, float] = (0.5, 0.5)

    def __call__(self, a: Tensor) -> Tensor:
        return 0.5 * a

    def derivative(self, a: Tensor) -> Tensor:
        return torch.full_like(a, 0.5)

    def conjugate(self, y: Tensor) -> Tensor:
        return y.square()

    @property
    def slopes(self) -> tuple[float, float]:
        return self.claimed

    def _integral(self, a: Tensor) -> Tensor:
        return a.square() / 4


def test_activation_of_a_user_works_like_the_others() -> None:
    s = Own()
    assert as_activation(s) is s
    a = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(s.potential, (a,))


def test_activation_of_a_user_is_refused_with_its_reason() -> None:
    with pytest.raises(
        ValueError,
        match=r"^activation Own is not admissible: its slope is negative \(down to -0\.2\), so ",
    ):
        as_activation(Own((-0.2, 1.0)))
    with pytest.raises(
        ValueError, match=r"^activation Own is not admissible: its slope is unbounded"
    ):
        as_activation(Own((0.0, math.inf)))
    with pytest.raises(ValueError, match=r"^activation Own is not admissible"):
        as_activation(Own((math.nan, 1.0)))


# MatrixActivation


def semidefinite(eigenvalues: list[float], dtype: torch.dtype = torch.float64) -> Tensor:
    Q = torch.linalg.qr(torch.randn(len(eigenvalues), len(eigenvalues), dtype=torch.float64))[0]
    return ((Q * torch.tensor(eigenvalues, dtype=torch.float64)) @ Q.T).to(dtype)


SPECTRA = [
    [1.0, 0.5, 0.2, 0.1],
    [1.0, 1.0, 0.0, 0.0],
    [0.7, 0.3, 1e-6, 0.0],
    [0.0, 0.0, 0.0],
    [0.4],
]


@pytest.mark.parametrize("spectrum", SPECTRA, ids=str)
def test_matrix_activation_is_dense_linear_algebra(spectrum: list[float]) -> None:
    S = semidefinite(spectrum)
    s = MatrixActivation(S)
    a = torch.randn(3, 5, len(spectrum), dtype=torch.float64)
    torch.testing.assert_close(s(a), torch.einsum("ij,bcj->bci", S, a))
    torch.testing.assert_close(s.potential(a), torch.einsum("bci,ij,bcj->bc", a, S, a) / 2)
    torch.testing.assert_close(s.derivative(a[0, 0]), torch.func.jacrev(s)(a[0, 0]))
    assert s.derivative(a).shape == (3, 5, len(spectrum), len(spectrum))
    wanted = np.linalg.pinv(S.numpy(), rcond=1e-12)
    y = s(a)
    torch.testing.assert_close(
        s.conjugate(y), torch.einsum("bci,ij,bcj->bc", y, torch.from_numpy(wanted), y) / 2
    )
    torch.testing.assert_close(s.potential(a) + s.conjugate(y), (a * y).sum(dim=-1))
    assert s.slopes == pytest.approx((min(spectrum), max(spectrum)), abs=1e-14)
    assert s.admissible
    assert not s.elementwise
    assert as_activation(s) is s


def test_matrix_activation_conjugate_is_the_supremum() -> None:
    s = MatrixActivation(semidefinite([0.9, 0.5, 0.2]))
    y = torch.randn(4, 3, dtype=torch.float64)
    a = torch.linalg.solve(s.S, y.T).T
    for _ in range(20):
        b = a + torch.randn_like(a)
        assert bool(((b * y).sum(dim=1) - s.potential(b) <= s.conjugate(y) + 1e-12).all())
    torch.testing.assert_close((a * y).sum(dim=1) - s.potential(a), s.conjugate(y))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_matrix_activation_conjugate_is_infinite_outside_the_range(dtype: torch.dtype) -> None:
    s = MatrixActivation(semidefinite([1.0, 0.5, 0.0, 0.0], dtype))
    y = s(torch.randn(6, 4, dtype=dtype))
    assert bool(s.conjugate(y).isfinite().all())
    assert bool((s.conjugate(y + 0.01 * torch.randn(6, 4, dtype=dtype)) == math.inf).all())
    assert float(s.conjugate(torch.zeros(4, dtype=dtype))) == 0


def test_matrix_activation_of_another_dtype_follows_its_argument() -> None:
    s = MatrixActivation(semidefinite([1.0, 0.5, *[0.0] * 8], torch.float32))
    a = torch.randn(5, 10, dtype=torch.float64)
    assert s(a).dtype == s.potential(a).dtype == s.derivative(a).dtype == torch.float64
    # the zero eigenvalues of S have the rounding of float32, and must still count as zero
    torch.testing.assert_close(s.conjugate(s(a)), s.potential(a), rtol=1e-5, atol=1e-5)
    assert bool((s.conjugate(torch.randn(5, 10, dtype=torch.float64)) == math.inf).all())


def test_matrix_activation_is_differentiable_in_argument_and_matrix() -> None:
    A = (torch.randn(3, 3, dtype=torch.float64) / 5).requires_grad_()
    a = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)

    def through(method: str):
        return lambda A, a: getattr(MatrixActivation(A.T @ A), method)(a)

    for method in ("__call__", "potential", "derivative", "conjugate"):
        assert torch.autograd.gradcheck(through(method), (A, a), atol=1e-4)
    s = MatrixActivation((A.T @ A).detach())
    (gradient,) = torch.autograd.grad(s.potential(a).sum(), a)
    torch.testing.assert_close(gradient, s(a))


def test_matrix_activation_is_a_copy_and_equal_to_itself_only() -> None:
    S = semidefinite([0.5, 0.2])
    s, other = MatrixActivation(S), MatrixActivation(S)
    kept = s.S.clone()
    S.zero_()
    assert torch.equal(s.S, kept)
    assert torch.equal(s.S, s.S.T)
    assert s == as_activation(s)
    assert s != other
    assert len({s, other}) == 2
    assert repr(s) == "MatrixActivation(S of shape (2, 2), eigenvalues in [0.2, 0.5])"
    assert torch.equal(pickle.loads(pickle.dumps(s)).S, s.S)
    with pytest.raises(FrozenInstanceError):
        s.S = S


@pytest.mark.parametrize(
    ("S", "message"),
    [
        ([[1.0]], "a tensor of real floating-point numbers; got list"),
        (
            torch.eye(2, dtype=torch.int64),
            r"a tensor of real floating-point numbers; got torch\.int64",
        ),
        (torch.zeros(2, 3), r"a square matrix; got shape \(2, 3\)"),
        (torch.zeros(3), r"a square matrix; got shape \(3,\)"),
        (torch.zeros(0, 0), r"a square matrix; got shape \(0, 0\)"),
        (torch.tensor([[math.nan]]), "finite; got NaN or infinity"),
        (
            torch.tensor([[0.5, 0.2], [0.1, 0.5]]),
            r"symmetric; got entries that differ by 0\.1\. Use \(S \+ S\.T\) / 2",
        ),
        (
            torch.diag(torch.tensor([0.5, -0.25])),
            r"positive semidefinite; got the eigenvalue -0\.25\. Use A\.T @ A",
        ),
        (
            torch.diag(torch.tensor([0.5, 1.25])),
            r"norm at most 1; got 1\.25\. Divide S by its norm",
        ),
    ],
    ids=str,
)
def test_matrix_activation_refuses_other_matrices(S, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^MatrixActivation\.S must (be|have) {message}.*\.$"):
        MatrixActivation(S)


def test_matrix_activation_allows_for_rounding() -> None:
    for n in (3, 30, 200):
        S = semidefinite([1.0] * (n // 3) + [0.0] * (n - n // 3)).to(torch.float32)
        assert MatrixActivation(S).slopes == pytest.approx((0.0, 1.0), abs=1e-5)
