"""The residual DEQ and its weight-tied twin."""

from __future__ import annotations

import pytest
import torch

from equipoise import Equilibrium, Unrolled, create_model
from equipoise.families.residual import ResidualCell, WeightTied
from equipoise.models.normalized_convolution import Normalization


def _cell(**options: object) -> ResidualCell:
    return ResidualCell(2, 4, groups=2, **{"deviation": 0.05, **options})  # type: ignore[arg-type]


def test_residual_cell_is_the_printed_formula() -> None:
    torch.manual_seed(0)
    cell, z, x = _cell(), torch.randn(2, 2, 3, 3), torch.randn(2, 2, 3, 3)
    inner = cell.norm1(torch.relu(cell.conv1(z)))
    expected = cell.norm3(torch.relu(z + cell.norm2(x + cell.conv2(inner))))
    torch.testing.assert_close(cell(z, cell.inject(x)), expected)


@pytest.mark.parametrize("normalization", ["none", "spectral"])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_weight_tied_network_is_the_unrolled_equilibrium(
    checkpoint: bool, normalization: Normalization
) -> None:
    torch.manual_seed(0)
    cell, x = _cell(normalization=normalization), torch.randn(2, 2, 3, 3)
    tied = WeightTied(cell, 6, checkpoint=checkpoint)
    layer = Equilibrium(cell, gradient=Unrolled(6), on_failure="ignore")
    weight = cell.conv1.weight
    torch.testing.assert_close(tied(x), layer(x))
    own, other = (torch.autograd.grad(net(x).pow(3).sum(), weight)[0] for net in (tied, layer))
    torch.testing.assert_close(own, other)


def test_weight_tied_network_has_the_size_of_the_residual_deq() -> None:
    tied, deq = create_model("weight-tied-cifar10"), create_model("residual-deq-cifar10")
    assert tied.parameter_counts()["total"] == deq.parameter_counts()["total"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"inner": 7}, r"ResidualCell.inner must be a multiple of groups, 8; got 7"),
        ({"deviation": 0.0}, r"ResidualCell.deviation must"),
        ({"dropout": 1.0}, r"ResidualCell.dropout must be in \[0, 1\); got 1.0"),
        ({"spectral_norm": 0.0}, r"ResidualCell.spectral_norm must"),
        (
            {"normalization": "spectrall"},
            r"must be one of none, spectral, weight; .*mean 'spectral'",
        ),
    ],
)
def test_residual_deq_refuses_nonsense(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        create_model("residual-deq-cifar10", **options)


def test_weight_normalised_cell_starts_as_the_plain_one() -> None:
    torch.manual_seed(0)
    plain = _cell()
    torch.manual_seed(0)
    normalised, x = _cell(normalization="weight"), torch.randn(2, 2, 3, 3)
    maps = [Equilibrium(cell).map(x) for cell in (plain, normalised)]
    torch.testing.assert_close(maps[0](x), maps[1](x))
    assert normalised.conv1.length is not None
    with torch.no_grad():
        normalised.conv1.weight.mul_(3)
        normalised.conv1.length.mul_(2)  # of the kernel, which does not depend on V's own
    torch.testing.assert_close(normalised.conv1.kernel(), 2 * plain.conv1.kernel())


def test_certificate_of_a_residual_cell_says_what_follows() -> None:
    torch.manual_seed(0)
    cell = _cell(normalization="spectral", spectral_norm=0.5)
    certificate = cell.certificate()
    assert not certificate.contracts
    assert [one.holds for one in certificate.further] == [True]  # there is an equilibrium
    x = torch.randn(3, 2, 4, 4)
    z = Equilibrium(cell, "anderson", tolerance=1e-3, on_failure="ignore")(x)
    assert certificate.further[0].number is not None
    size = z.detach().square().mean(dim=(2, 3)).sqrt()  # each channel is a group here
    assert float(size.max()) <= certificate.further[0].number + 1e-5
    with torch.no_grad():
        cell.norm2.weight.fill_(0.01)
        cell.norm3.weight.fill_(1e-5)
    assert cell.certificate().contracts
    assert max(cell.norms().values()) <= 0.5 * (1 + 0.02)
