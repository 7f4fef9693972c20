"""The OptEq models have the published sizes and options; tests/contracts has the rest."""

import copy
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from equipoise.families.opteq import OptEqCell
from equipoise.layers import Regularized
from equipoise.models import ImageNetwork, create_model, list_models, model_info, model_options
from equipoise.models.extractor import residual_stage, residual_stem
from equipoise.models.head import ImageHead

# extractor, equilibrium, head, classifier
COUNTS = {
    "opteq-digits": (176, 9_248, 32, 650),
    "opteq-mnist": (264, 69_280, 48, 3_850),
    "opteq-cifar10-199k": (841, 192_464, 58, 4_650),
    "opteq-cifar10-162k": (812, 153_520, 56, 4_490),
    "opteq-cifar10-1.4m": (1_856, 1_402_048, 128, 10_250),
    "opteq-imagenet-small": (8_277_056, 2_670_080, 2_624_512, 2_049_000),
    "opteq-imagenet-mid": (24_333_120, 4_901_376, 2_624_512, 2_049_000),
    "opteq-cityscapes": (371_264, 5_899_520, 147_584, 1_235),
}
SIDES = {"opteq-imagenet-small": 40, "opteq-imagenet-mid": 40, "opteq-cityscapes": 32}
"""Images smaller than those the largest models were made for, so that a CPU can run them."""
IMAGES = sorted(set(list_models("opteq-*")) - {"opteq-table"})
SMALL = [name for name in IMAGES if name not in SIDES]


@cache
def built(name: str) -> ImageNetwork:
    """The model as it was made; nobody may change it."""
    torch.manual_seed(0)
    return create_model(name)


class Trained(NamedTuple):
    network: ImageNetwork
    loss: Tensor
    x: Tensor
    y: Tensor


@cache
def train(name: str) -> Trained:
    """The model after a step forwards and backwards, and its predictions for the same images.

    It keeps its gradients and statistics.
    """
    network = copy.deepcopy(built(name)).train()
    x, target = batch(network)
    loss = F.cross_entropy(network(x), target)
    loss.backward()
    with torch.no_grad():
        return Trained(network.eval(), loss.detach(), x, network(x))


def counted(name: str, **options: Any) -> ImageNetwork:
    with torch.device("meta"):
        return create_model(name, **options)


def batch(network: ImageNetwork, count: int = 2) -> tuple[Tensor, Tensor]:
    """Random images, and random classes of them or of their pixels."""
    side = SIDES.get(network.name, network.input_shape[1])
    x = torch.randn(count, network.input_shape[0], side, side)
    shape = (count, side, side) if network.name == "opteq-cityscapes" else (count,)
    return x, torch.randint(0, 10, shape)


@pytest.fixture(params=IMAGES)
def network(request: pytest.FixtureRequest) -> ImageNetwork:
    return built(request.param)


def test_contract_knows_the_size_of_every_model() -> None:
    assert set(COUNTS) == set(IMAGES)


@pytest.mark.parametrize("name", IMAGES)
def test_model_has_exactly_these_parameters(name: str) -> None:
    network = counted(name)
    counts = network.parameter_counts()
    assert tuple(counts.values()) == (*COUNTS[name], sum(COUNTS[name]))
    assert list(counts) == ["extractor", "equilibrium", "head", "classifier", "total"]
    assert counts["total"] == sum(parameter.numel() for parameter in network.parameters())


def test_sizes_are_the_published_ones() -> None:
    def size(name: str, part: str = "total", **options: Any) -> float:
        return counted(name, **options).parameter_counts()[part] / 1e3

    assert round(size("opteq-cifar10-199k")) == 198  # OptEq, Tables 3, 5 and 8: 199 k in all
    assert 0.98 * 162 < size("opteq-cifar10-162k") < 162  # OptEq, Table 4
    assert f"{size('opteq-cifar10-1.4m') / 1e3:.1f}" == "1.4"


@pytest.mark.parametrize(("stride", "side"), [(1, 16), (2, 8), (3, 6)])
def test_stride_of_the_extractor_sets_the_size_of_the_state_and_no_other(stride, side):
    network = create_model("opteq-cifar10-162k", stride=stride)
    assert network.features(torch.randn(2, 3, 16, 16)).shape == (2, 28, side, side)
    assert network.parameter_counts() == built("opteq-cifar10-162k").parameter_counts()


@pytest.mark.parametrize(
    ("stride", "rule"), [(0, "be"), (16, "be at most 15, .* state"), (10**30, "be at most 15")]
)
def test_stride_that_leaves_no_state_is_refused(stride, rule):
    with pytest.raises(ValueError, match=rf"stride must {rule}.*got {stride}"):
        create_model("opteq-cifar10-162k", stride=stride)
    assert create_model("opteq-cifar10-162k", stride=15)(torch.randn(1, 3, 32, 32)).shape == (1, 10)


def test_pools_change_no_size_and_ask_for_sides_that_they_divide():
    network = create_model("opteq-cifar10-162k", stride=1, pool=[1, 1, 2, 2, 4])
    assert network.parameter_counts() == built("opteq-cifar10-162k").parameter_counts()
    assert network(torch.randn(2, 3, 16, 16)).shape == (2, 10)
    with pytest.raises(ValueError, match="sides that are multiples of 4; got"):
        network(torch.randn(2, 3, 18, 18))
    with pytest.raises(ValueError, match=r"OptEq\.pool must be at most 5, .* fit; got 6"):
        create_model("opteq-cifar10-162k", pool=6)
    with pytest.raises(ValueError, match=r"OptEq\.pool must divide 16, .* state.*; got 3"):
        create_model("opteq-cifar10-162k", pool=3)
    with pytest.raises(ValueError, match="one for each of the 5 layers"):
        create_model("opteq-cifar10-162k", pool=[1, 2])


@pytest.mark.parametrize(
    ("name", "layers", "for_size", "published"),
    [
        ("opteq-imagenet-small", 5, 13, [8, 7, 3]),
        ("opteq-imagenet-mid", 3, 8, [24, 13, 3]),
    ],
)
def test_imagenet_models_have_the_printed_layers_or_the_printed_size(
    name: str, layers: int, for_size: int, published: list[int]
) -> None:
    """OptEq, Table 6, gives both, and they contradict each other."""
    assert len(counted(name).equilibrium.layers.operators) == layers
    counts = counted(name, layers=for_size).parameter_counts()
    found = [round(counts[part] / 1e6) for part in ("extractor", "equilibrium", "head")]
    assert found == published


@pytest.mark.parametrize("name", IMAGES)
def test_solve_starts_at_the_input(name: str) -> None:
    assert counted(name).equilibrium.layers.start


@pytest.mark.parametrize(("widening", "total"), [(1, 25_557_032), (2, 68_883_240)])
def test_residual_stages_make_up_the_known_networks(widening: int, total: int) -> None:
    """The numbers are those of torchvision's resnet50 and wide_resnet50_2."""
    with torch.device("meta"):
        stages = [residual_stem()]
        into = 64
        for place, blocks in enumerate((3, 4, 6, 3)):
            out = 256 * 2**place
            stages.append(
                residual_stage(
                    into, out // 4 * widening, out, blocks, stride=1 if place == 0 else 2
                )
            )
            into = out
        parts = nn.Sequential(*stages, nn.Linear(2048, 1000))
    assert sum(parameter.numel() for parameter in parts.parameters()) == total


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "opteq-cifar10-1.4m" else ())
        for name in SMALL
    ],
)
def test_small_model_learns_a_batch(name: str) -> None:
    network = copy.deepcopy(built(name))
    x, y = batch(network, 8)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = F.cross_entropy(network(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_model_says_briefly_what_it_is(network: ImageNetwork) -> None:
    text = repr(network)
    assert "\n" not in text
    assert len(text) < 200
    assert network.name in text
    assert f"{sum(COUNTS[network.name]):,}" in text
    information = model_info(network.name)
    assert 20 < len(information) < 130
    assert information.endswith(".")


def test_model_refuses_other_channels_in_one_sentence(network: ImageNetwork) -> None:
    channels = network.input_shape[0]
    with pytest.raises(
        ValueError,
        match=(
            rf"^The input of {network.name} must have shape \(batch, {channels}, height, "
            rf"width\)[^.]*\.$"
        ),
    ):
        network(torch.zeros(2, channels + 1, *network.input_shape[1:]))


def test_model_refuses_single_images_bytes_and_flat_images_of_another_size(
    network: ImageNetwork,
) -> None:
    with pytest.raises(ValueError, match="must have shape"):
        network(torch.zeros(network.input_shape))
    with pytest.raises(
        ValueError, match=r"must be floating-point numbers; got torch.uint8. Divide bytes by 255"
    ):
        network(torch.zeros(2, *network.input_shape, dtype=torch.uint8))
    with pytest.raises(ValueError, match="must have shape"):
        network(torch.zeros(2, 3))


@pytest.mark.parametrize("name", IMAGES)
def test_opteq_model_hands_its_options_to_the_layer(name: str) -> None:
    layer = counted(
        name,
        num_classes=7,
        alpha=0.5,
        learn_alpha=True,
        norm="project",
        bound=0.9,
        init="orthogonal",
        activation="tanh",
        regularizer="l1",
        strength=0.3,
        solver="fixed_point",
        gradient="phantom",
        tolerance=0.05,
        max_steps=7,
        on_failure="ignore",
    )
    cell, inner = layer.equilibrium.cell, layer.equilibrium.layers
    assert isinstance(cell, Regularized)
    assert isinstance(inner, OptEqCell)
    assert cell.strength == 0.3
    assert type(cell.regularizer).__name__ == "AbsoluteSum"
    assert (inner.norm, inner.bound, inner.shared_alpha) == ("project", 0.9, True)
    assert inner.alpha_logit.shape == (1,)
    assert {type(own).__name__ for own in inner.activations} == {"Tanh"}
    equilibrium = layer.equilibrium
    assert (type(equilibrium.solver).__name__, type(equilibrium.gradient).__name__) == (
        "FixedPoint",
        "Phantom",
    )
    assert (equilibrium.stop.tolerance, equilibrium.stop.max_steps) == (0.05, 7)
    assert equilibrium.solves.on_failure == "ignore"
    assert isinstance(layer.head.classifier, nn.Linear | nn.Conv2d)
    assert len(layer.head.classifier.weight) == 7
    assert layer.parameter_counts()["equilibrium"] == COUNTS[name][1] + 1


@pytest.mark.parametrize("name", IMAGES)
def test_opteq_model_refuses_an_impossible_number_of_classes(name: str) -> None:
    with pytest.raises(
        ValueError, match=r"Head\.num_classes must be a whole number of at least 1; got 0\."
    ):
        counted(name, num_classes=0)


@pytest.mark.parametrize("name", IMAGES)
def test_opteq_model_options_are_these(name: str) -> None:
    common = (
        "activation alpha bound eval_options gradient init learn_alpha max_steps norm num_classes "
        "on_failure regularizer solver stop strength tolerance"
    )
    own = ["layers"] if "imagenet" in name else ["pool", "stride"] if "cifar10" in name else []
    assert model_options(name) == sorted([*common.split(), *own])


@pytest.mark.parametrize("name", ["opteq-imagenet-small", "opteq-imagenet-mid"])
def test_imagenet_equilibrium_solves_the_equation_of_the_paper(name: str) -> None:
    """Written out with torch's own convolutions and transposed convolutions."""
    network = create_model(name, layers=2, tolerance=1e-5, num_classes=3).eval()
    x = torch.randn(1, 512, 6, 6)
    with torch.no_grad():
        z = expected = network.equilibrium(x)
        cell = network.equilibrium.layers
        for operator, inject in zip(cell.operators, cell.inputs, strict=True):
            kernels = operator.weights()
            assert [kernel.shape[2] for kernel in kernels] == (
                [3, 1] if name.endswith("small") else [5, 1, 3, 1]
            )
            a = z
            for kernel in kernels:
                a = F.conv2d(
                    a,
                    kernel,
                    padding=kernel.shape[2] // 2,
                    groups=512 if kernel.shape[1] == 1 else 1,
                )
            a = torch.relu(a + inject(x))
            for kernel in reversed(kernels):
                a = F.conv_transpose2d(
                    a,
                    kernel,
                    padding=kernel.shape[2] // 2,
                    groups=512 if kernel.shape[1] == 1 else 1,
                )
            z = 0.8 * a + 0.2 * z
    assert (z - expected).norm() <= 2e-5 * expected.norm()


@pytest.mark.parametrize("name", ["opteq-imagenet-small", "opteq-imagenet-mid"])
def test_imagenet_layers_begin_with_norms_of_a_half_and_injections_of_the_scale_of_the_input(
    name: str,
) -> None:
    cell = built(name).equilibrium.layers
    x = torch.randn(1, 512, 6, 6)
    with torch.no_grad():
        # Bounds of so many channels take a second each: one layer stands for all.
        for operator, inject in list(zip(cell.operators, cell.inputs, strict=True))[:1]:
            assert 0.3 < operator.bound(operator.weights()) < 0.7
            assert 0.5 * x.std() < inject(x).std() < 2 * x.std()


def test_imagenet_layers_are_an_option() -> None:
    each = COUNTS["opteq-imagenet-small"][1] // 5
    assert counted("opteq-imagenet-small", layers=2).parameter_counts()["equilibrium"] == 2 * each
    with pytest.raises(
        ValueError,
        match=r"opteq-imagenet-small.layers must be a whole number of at least 1; got 0\.",
    ):
        counted("opteq-imagenet-small", layers=0)


@pytest.mark.parametrize("side", [1, 2, 5, 7])
def test_image_head_takes_every_size(side: int) -> None:
    head = ImageHead((4, 8, 16), 3)
    assert head(torch.randn(2, 4, side, side)).shape == (2, 3)


def test_image_head_sees_the_margin_of_odd_images() -> None:
    head = ImageHead((4, 8, 16), 3)
    x = torch.randn(1, 4, 5, 5)
    changed = x.clone()
    changed[:, :, 4, 4] += 10
    assert not torch.equal(head(x), head(changed))


@pytest.mark.slow
def test_cityscapes_predicts_every_pixel() -> None:
    network = train("opteq-cityscapes").network
    with torch.no_grad():
        assert network(torch.randn(1, 3, 32, 48)).shape == (1, 19, 32, 48)
    with pytest.raises(
        ValueError, match=r"with sides that are multiples of 8; got \(1, 3, 32, 44\)\.$"
    ):
        network(torch.randn(1, 3, 32, 44))


def test_digits_takes_flat_images() -> None:
    network = train("opteq-digits").network
    x = torch.rand(5, 64)
    assert torch.equal(network(x), network(x.reshape(5, 1, 8, 8)))


def test_model_runs_in_double_precision() -> None:
    network = copy.deepcopy(train("opteq-mnist").network).double()
    x = train("opteq-mnist").x
    with torch.no_grad():
        torch.testing.assert_close(
            network(x.double()).float(), train("opteq-mnist").y, rtol=1e-3, atol=1e-4
        )


def test_features_are_the_equilibrium() -> None:
    network = train("opteq-mnist").network
    x = torch.randn(2, 1, 28, 28)
    with torch.no_grad():
        z = network.features(x)
        again = network.equilibrium.map(network.extractor(x))(z)
    assert z.shape == (2, 24, 14, 14)
    assert isinstance(again, Tensor)
    assert (again - z).flatten(1).norm(dim=1).le(1e-3 * z.flatten(1).norm(dim=1)).all()
    torch.testing.assert_close(network.head(z), network(x))


def test_decorrelation_lowers_the_correlation_of_features() -> None:
    x = torch.randn(16, 3, 32, 32)
    found = []
    for regularizer in (None, "decorrelation"):
        torch.manual_seed(0)
        network = create_model("opteq-cifar10-199k", regularizer=regularizer, strength=0.5)
        z = network.features(x).transpose(0, 1).flatten(1)
        found.append(((F.normalize(z) @ F.normalize(z).mT).square().sum() - len(z)).item())
    assert found[1] < found[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["opteq-imagenet-small", "opteq-imagenet-mid", "opteq-cityscapes"])
def test_large_model_runs_at_its_full_size(name: str) -> None:
    network = train(name).network
    with torch.no_grad():
        y = network(torch.randn(1, *network.input_shape))
    assert y.shape == ((1, 19, 512, 1024) if name == "opteq-cityscapes" else (1, 1000))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_digits_reaches_97_percent(seed: int) -> None:
    datasets, selection = (
        pytest.importorskip("sklearn.datasets"),
        pytest.importorskip("sklearn.model_selection"),
    )
    x, y = datasets.load_digits(return_X_y=True)
    split = selection.train_test_split(x / 16, y, test_size=0.2, stratify=y, random_state=0)
    x, x_test, y, y_test = (torch.as_tensor(part) for part in split)
    torch.manual_seed(seed)
    network, epochs, size = create_model("opteq-digits"), 10, 64
    optimizer = torch.optim.Adam(network.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 1e-2, epochs=epochs, steps_per_epoch=-(-len(x) // size)
    )
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(size):
            optimizer.zero_grad()
            F.cross_entropy(network(x[rows].float()), y[rows]).backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        accuracy = (network.eval()(x_test.float()).argmax(dim=1) == y_test).double().mean().item()
    assert accuracy >= 0.97
