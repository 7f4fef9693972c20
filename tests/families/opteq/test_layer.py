import copy
import math
import re

import pytest
import torch
from samples import reference
from torch import nn

from equipoise import (
    SAM,
    Anderson,
    Cell,
    ConvergenceError,
    Equilibrium,
    FixedPoint,
    Stop,
    Unrolled,
    create_model,
)
from equipoise.analysis import objective
from equipoise.families.opteq import OptEq, OptEqCell, OptEqConv2d
from equipoise.layers import project_norms, project_norms_after
from equipoise.prox import MatrixActivation


def enlarge(layer: nn.Module, factor: float) -> nn.Module:
    for part in layer.modules():
        if isinstance(part, OptEqCell):
            for operator in part.operators:
                operator.scale_(factor)
    return layer


def norms(layer, x):
    return [float(torch.linalg.matrix_norm(own.weights[0], 2)) for own in reference(layer, x)]


def test_one_layer_solves_its_equation():
    layer = OptEq(3, 4, 5, alpha=1.0, norm="none", tolerance=1e-12).double()
    x = torch.randn(6, 3, dtype=torch.float64)
    z = layer(x)
    W, inject = layer.layers.operators[0].weight, layer.layers.inputs[0]
    assert torch.allclose(z, torch.relu(z @ W.T + inject(x)) @ W, atol=1e-11)
    assert layer.layers.symmetric


def test_deep_layers_are_composed_in_order():
    layer = OptEq(3, 4, [5, 2], "tanh", [0.5, 0.9], mu=2.0, tolerance=1e-12).double()
    x = torch.randn(6, 3, dtype=torch.float64)
    z = y = layer(x)
    for operator, inject, alpha in zip(
        layer.layers.operators, layer.layers.inputs, (0.5, 0.9), strict=True
    ):
        W = operator.weight
        y = alpha / 2 * torch.tanh(y @ W.T + inject(x)) @ W + (1 - alpha) * y
    assert torch.allclose(y, z, atol=1e-11)
    assert not layer.layers.symmetric


def test_step_is_what_the_formula_says():
    for layer, x in (
        (OptEq(3, 3, [5, 4], learn_alpha=True, mu=1.5), torch.randn(2, 3)),
        (
            OptEqConv2d(3, 3, [5, 4], activation="softplus", alpha=[0.3, 1.0]),
            torch.randn(2, 3, 5, 5),
        ),
    ):
        z = torch.randn_like(x)
        y = z
        for own in reference(layer, x):
            y = own.step(y)
        assert torch.allclose(y, layer.map(x)(z), atol=1e-5)


def test_psi_has_the_layer_as_its_gradient():
    for layer, x in (
        (OptEq(3, 3, 5, "elu", mu=1.5), torch.randn(2, 3).double()),
        (OptEqConv2d(3, 3, 4, activation="tanh"), torch.randn(2, 3, 5, 5).double()),
    ):
        psi = objective(layer.double(), x)._potential.psi
        z = torch.randn_like(x, requires_grad=True)
        (gradient,) = torch.autograd.grad(psi(z.flatten(1)).sum(), z)
        (own,) = reference(layer, x)
        assert torch.allclose(gradient, own.prox(z))


def test_a_solve_starts_at_the_input_or_at_zero():
    x = torch.randn(2, 3)
    same, other = OptEq(3, 3, 4), OptEq(3, 5, 4)
    same(x, trace=True), other(x, trace=True)
    assert torch.equal(same.last.trace.state[0], x)
    assert torch.equal(other.last.trace.state[0], torch.zeros(2, 5))


def test_injections_and_norms_are_computed_once_for_each_solve(monkeypatch):
    layer = enlarge(OptEq(3, 3, [5, 4]), 4)
    calls = {"bound": 0, "inject": 0}
    bound = type(layer.layers.operators[0]).bound

    def counted(self, weights):
        calls["bound"] += 1
        return bound(self, weights)

    monkeypatch.setattr(type(layer.layers.operators[0]), "bound", counted)
    layer.layers.inputs[0].register_forward_hook(
        lambda *_: calls.__setitem__("inject", calls["inject"] + 1)
    )
    layer(torch.randn(2, 3)).sum().backward()
    assert layer.last.steps.max() > 2
    assert calls == {"bound": 2, "inject": 1}


# Norm control


@pytest.mark.parametrize("activation", ["relu", "tanh", "sigmoid"])
@pytest.mark.parametrize("mu", [1.0, 3.0])
def test_scale_keeps_the_true_norm_below_the_limit(activation, mu):
    x = torch.randn(4, 3)
    layer = enlarge(OptEq(3, 6, [5, 8], activation, mu=mu, bound=0.9), 50)
    slope = 0.25 if activation == "sigmoid" else 1.0
    assert norms(layer, x) == pytest.approx([0.9 * math.sqrt(mu / slope)] * 2, rel=1e-5)
    assert layer.layers.lipschitz() == pytest.approx((0.8 * 0.81 + 0.2) ** 2, rel=1e-5)
    factors = [factor.value for factor in layer.layers.certificate().factors]
    assert factors == pytest.approx([0.8 * 0.81 + 0.2] * 2, rel=1e-5)
    layer(x)
    assert layer.last.converged.all()


def test_scale_of_a_convolution_keeps_the_true_norm_below_the_limit():
    x = torch.randn(1, 3, 6, 6)
    layer = enlarge(OptEqConv2d(3, 3, [5, 4], padding="circular"), 50).double()
    for own in reference(layer, x.double()):
        assert 0.9 < torch.linalg.matrix_norm(own.matrix(3, 6, 6), 2) <= 0.99 + 1e-12


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.data.mul_(3),
        lambda weight: weight.data.copy_(weight.data.flip(0).roll(1, 1) * 3),
        lambda weight: setattr(weight, "data", weight.data * 3),
        lambda weight: nn.init.normal_(weight),
    ],
)
def test_scale_notices_every_change_of_the_weights(change):
    layer = enlarge(OptEq(3, 6, 5), 50)
    x = torch.randn(4, 3)
    with torch.no_grad():
        layer(x), layer(x)
        change(layer.layers.operators[0].weight)
    assert norms(layer, x) == pytest.approx([0.99], rel=1e-5)


def test_scale_computes_no_bound_twice(monkeypatch):
    layer = enlarge(OptEq(3, 6, 5), 50).eval()
    calls = []
    bound = type(layer.layers.operators[0]).bound
    monkeypatch.setattr(
        type(layer.layers.operators[0]), "bound", lambda self, w: calls.append(0) or bound(self, w)
    )
    x = torch.randn(4, 3)
    with torch.no_grad():
        first = layer(x)
        assert torch.allclose(layer(x), first)
    assert len(calls) == 1


def test_scale_leaves_small_weights_alone():
    layer = OptEq(3, 4, 5)
    ((weight,),) = layer.layers.effective_weights()
    assert weight is layer.layers.operators[0].weight


def test_no_control_leaves_large_weights_alone():
    layer = enlarge(OptEq(3, 4, 5, norm="none"), 50)
    assert norms(layer, torch.randn(1, 3))[0] > 5
    assert layer.layers.lipschitz() is None


def test_declared_lipschitz_bound_holds():
    torch.manual_seed(0)
    layer = enlarge(OptEq(3, 6, [5, 8], alpha=[0.3, 0.9], bound=0.8), 50).double()
    x = torch.randn(1, 3, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(
        layer.map(x), torch.randn(1, 6, dtype=torch.float64)
    ).reshape(6, 6)
    assert torch.linalg.matrix_norm(jacobian, 2) <= layer.layers.lipschitz() < 1


def test_project_divides_large_weights_only():
    layer = OptEq(3, 4, [5, 6], norm="project", bound=0.7)
    layer.layers.operators[0].scale_(50)
    small = layer.layers.operators[1].weight.clone()
    project_norms(nn.Sequential(layer))
    x = torch.randn(1, 3)
    assert norms(layer, x)[0] == pytest.approx(0.99 * 0.7, rel=1e-4)  # room for the next steps
    assert norms(layer, x)[0] <= 0.7 * (1 + 1e-6)
    assert torch.equal(layer.layers.operators[1].weight, small)


def test_project_after_follows_the_optimizer():
    torch.manual_seed(0)
    layer = OptEq(3, 4, 5, norm="project", bound=0.7, on_failure="ignore")
    model = nn.Sequential(layer, nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    handle = project_norms_after(optimizer, model)
    x = torch.randn(8, 3)

    def train():
        for _ in range(5):
            optimizer.zero_grad()
            (model(x) - 10).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    train()
    assert norms(layer, x)[0] <= 0.7 * (1 + 1e-6)
    handle.remove()
    train()
    assert norms(layer, x)[0] > 0.7


# Alpha


def test_learned_alpha_stays_in_its_interval_and_moves():
    torch.manual_seed(0)
    for alpha, count in ((0.8, 1), ([0.3, 1.0], 2)):
        layer = OptEq(3, 4, [5, 6], alpha=alpha, learn_alpha=True)
        assert layer.layers.alpha_logit.numel() == count
        assert [float(a.detach()) for a in layer.layers.alpha] == pytest.approx(
            [0.8, 0.8] if count == 1 else [0.3, 1.0], abs=1e-3
        )
        optimizer = torch.optim.Adam(layer.parameters(), lr=0.5)
        for _ in range(20):
            optimizer.zero_grad()
            layer(torch.randn(8, 3)).square().sum().backward()
            optimizer.step()
        assert all(0 < float(a.detach()) < 1 for a in layer.layers.alpha)
        assert float(layer.layers.alpha[0].detach()) != pytest.approx(
            [0.8, 0.3][count - 1], abs=1e-3
        )


def test_alpha_does_not_change_the_equilibrium_of_one_layer():
    x = torch.randn(4, 3, dtype=torch.float64)
    layer = OptEq(3, 4, 5, alpha=1.0, tolerance=1e-13).double()
    skipped = OptEq(3, 4, 5, alpha=0.3, tolerance=1e-13).double()
    skipped.load_state_dict(layer.state_dict())
    assert torch.allclose(layer(x), skipped(x), atol=1e-11)


# Forms


def test_matrix_activation_gives_a_linear_equation():
    A = torch.randn(5, 5, dtype=torch.float64)
    S = A @ A.T
    S /= torch.linalg.matrix_norm(S, 2)
    layer = OptEq(3, 4, 5, MatrixActivation(S), alpha=1.0, tolerance=1e-13).double()
    x = torch.randn(6, 3, dtype=torch.float64)
    W, c = layer.layers.operators[0].weight, layer.layers.inputs[0](x)
    exact = torch.linalg.solve(torch.eye(4, dtype=torch.float64) - W.T @ S @ W, (c @ S @ W).T).T
    assert torch.allclose(layer(x), exact, atol=1e-11)


def test_convolution_of_one_pixel_is_a_dense_layer():
    conv = OptEqConv2d(3, 4, [5, 6], kernel_size=1, tolerance=1e-12).double()
    dense = OptEq(3, 4, [5, 6], tolerance=1e-12).double()
    for mine, other in zip(dense.parameters(), conv.parameters(), strict=True):
        mine.data = other.data.reshape(mine.shape)
    x = torch.randn(2, 3, dtype=torch.float64)
    assert torch.allclose(conv(x[:, :, None, None])[:, :, 0, 0], dense(x), atol=1e-10)


def test_pooled_layer_is_a_dense_one_on_averages_and_repeats_its_answer():
    """`P P^T = I`: with fields of the whole image, the state is `P^T` of the dense one's."""
    conv = OptEqConv2d(3, 4, 5, kernel_size=1, pool=2, tolerance=1e-12).double()
    dense = OptEq(3, 4, 5, tolerance=1e-12).double()
    for mine, other in zip(dense.parameters(), conv.parameters(), strict=True):
        mine.data = other.data.reshape(mine.shape)
    x = torch.randn(2, 3, 2, 2, dtype=torch.float64)
    expected = dense(x.mean(dim=(2, 3))) / 2
    assert torch.allclose(conv(x), expected[:, :, None, None].expand(2, 4, 2, 2), atol=1e-10)


def test_pool_of_each_layer_is_that_of_torch():
    """The formula with torch's own strided convolutions: `K P` is one with its kernel spread."""
    layer = OptEqConv2d(3, 3, [4, 6], pool=[1, 2], alpha=0.7).double()
    x, z = torch.randn(2, 2, 3, 8, 8, dtype=torch.float64).unbind()
    found, functional = layer.map(x)(z), torch.nn.functional
    for operator, inject, side in zip(
        layer.layers.operators, layer.layers.inputs, (1, 2), strict=True
    ):
        (kernel,) = operator.weights()
        spread = kernel.repeat_interleave(side, 2).repeat_interleave(side, 3) / side
        border = {"stride": side, "padding": side}
        inner = inject[-1] if side > 1 else inject
        averages = functional.adaptive_avg_pool2d(x, 8 // side)
        c = functional.conv2d(averages, inner.weight, inner.bias, padding=1)
        y = torch.relu(functional.conv2d(z, spread, **border) + c)
        z = 0.7 * functional.conv_transpose2d(y, spread, **border) + 0.3 * z
    assert torch.allclose(found, z, atol=1e-12)


def test_a_start_of_another_size_than_the_input_is_refused():
    """Where the pooled image has one pixel, its injection would fit to any other."""
    layer = OptEqConv2d(3, 3, [4], kernel_size=1, pool=4)
    x = torch.randn(2, 3, 4, 4)
    for shape in ((2, 3, 8, 8), (2, 3, 4, 8), (1, 3, 4, 4)):
        with pytest.raises(ValueError, match=r"z0 must have shape \(2, 3, 4, 4\); got"):
            layer(x, torch.randn(shape))
    layer(x, torch.randn(2, 3, 4, 4))
    with pytest.raises(ValueError, match="multiples of 4"):
        layer.map(x)(torch.randn(2, 3, 5, 4))
    sentence = r"^The state must go with the input, whose injection has shape \(2, 4, 1, 1\); got "
    for around in (layer.map(x), lambda z0: Equilibrium(layer.layers)(x, z0=z0)):
        with pytest.raises(ValueError, match=sentence):
            around(torch.randn(2, 3, 8, 8))


@pytest.mark.parametrize("pool", [[1, 2, 4], 0, [2, 1.5], [], "12", torch.ones(2)])
def test_impossible_pools_are_refused(pool):
    with pytest.raises(ValueError, match=r"^OptEqConv2d\.pool must be .*; got "):
        OptEqConv2d(3, 3, [4, 6], pool=pool)


@pytest.mark.parametrize(
    "options",
    [
        {"pool": [1, 2], "kernel_size": (3, 2)},
        {"pool": 2, "kernel_size": 2, "separable": True},
        {"padding": "circular"},
        {"groups": 3},
        {"separable": True},
        {"kernel_size": 2},
        {"kernel_size": (1, 4)},
        {"kernel_size": 5},
    ],
)
def test_convolutional_forms_solve_and_train(options):
    layer = OptEqConv2d(3, 3, [6, 9], **options)
    x = torch.randn(2, 3, 6, 4 if "pool" in options else 5)
    z = layer(x)
    assert layer.last.converged.all()
    assert z.shape == x.shape
    z.square().sum().backward()
    assert layer.last.adjoint.converged.all()
    assert all(
        parameter.grad is not None and parameter.grad.isfinite().all()
        for parameter in layer.parameters()
    )


def test_convolutions_work_under_transforms():
    layer = OptEqConv2d(3, 4, hidden=[5, 6], activation="tanh", tolerance=1e-10).double()
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    assert torch.allclose(
        torch.func.vmap(lambda image: layer(image[None])[0])(x), layer(x), atol=1e-8
    )
    each = torch.func.vmap(torch.func.grad(lambda image: layer(image[None]).square().sum()))(x)
    x.requires_grad_()
    (together,) = torch.autograd.grad(layer(x).square().sum(), x)
    assert torch.allclose(each, together, atol=1e-7)
    hessian = torch.func.hessian(lambda image: layer(image).sum())(x[:1].detach()).reshape(48, 48)
    assert torch.allclose(hessian, hessian.T, atol=1e-7)
    assert hessian.abs().max() > 1e-4


def test_warm_start_in_either_memory_format():
    layer = OptEqConv2d(3, 4, 5, tolerance=1e-5)
    x = torch.randn(2, 3, 6, 5)
    z = layer(x).detach()
    for start in (z, z.contiguous(), z.contiguous(memory_format=torch.channels_last)):
        assert torch.allclose(layer(x, start), z, atol=1e-4)
        assert layer.last.steps.max() == 0


def test_layers_copy_save_and_load():
    layer = OptEq(3, 4, [5, 6], learn_alpha=True)
    x = torch.randn(2, 3)
    other = OptEq(3, 4, [5, 6], learn_alpha=True)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


def test_sam_with_a_coupled_regularizer_makes_the_batch_one_problem():
    solver = SAM("decorrelation", lipschitz=10.0)
    layer = OptEq(3, 3, [5, 6], solver=solver, gradient=Unrolled(5), on_failure="ignore")
    layer(torch.randn(8, 3)).sum().backward()
    assert layer.cell.coupled
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


def test_raw_unrolled_training_makes_exactly_its_steps():
    layer = OptEq(3, 3, [5, 6], gradient=Unrolled(3), on_failure="ignore")
    x = torch.randn(2, 3)
    z = x
    for _ in range(3):
        z = layer.map(x)(z)
    assert torch.allclose(layer(x), z, atol=1e-6)


def test_layer_trains_with_plain_iteration_and_control():
    torch.manual_seed(0)
    layer = OptEq(2, 8, [16, 16], bound=0.9, solver=FixedPoint(), on_failure="raise")
    model = nn.Sequential(layer, nn.Linear(8, 1))
    x = torch.rand(128, 2) * 2 - 1
    y = (x[:, :1] * x[:, 1:] > 0).float()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        losses.append(nn.functional.binary_cross_entropy_with_logits(model(x), y))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]


# Bad input


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: OptEq(3, 4, 5, alpha=0), "OptEq.alpha must be in (0, 1]; got 0."),
        (lambda: OptEq(3, 4, 5, alpha=1.5), "OptEq.alpha must be in (0, 1]; got 1.5."),
        (
            lambda: OptEq(3, 4, 5, alpha=[0.5, 0.5]),
            "OptEq.alpha must be one number or one for each of the 1 layers; got 2.",
        ),
        (lambda: OptEq(3, 4, 5, alpha="big"), "OptEq.alpha must be in (0, 1]; got 'big'."),
        (lambda: OptEq(3, 4, []), "OptEq.hidden must name at least one layer; got none."),
        (lambda: OptEq(3, 4, [5, 0]), "OptEq.hidden must be a whole number of at least 1; got 0."),
        (lambda: OptEq(3, 4, 5.5), "OptEq.hidden must be a whole number of at least 1; got 5.5."),
        (lambda: OptEq(0, 4, 5), "OptEq.in_features must be a whole number of at least 1; got 0."),
        (lambda: OptEq(3, 4, 5, mu=0), "OptEq.mu must be a positive number; got 0."),
        (
            lambda: OptEq(3, 4, 5, bound=1.5),
            "OptEq.bound must be at most 1, since larger weights certify nothing; got 1.5. "
            "Use norm='none' for no control.",
        ),
        (
            lambda: OptEq(3, 4, 5, norm="scales"),
            "OptEq.norm must be one of none, orthogonal, project, scale; got 'scales'. Did you "
            "mean 'scale'?",
        ),
        (
            lambda: OptEq(3, 4, [5, 6], ["relu"]),
            "OptEq.activation must be one or one for each of the 2 layers; got 1.",
        ),
        (
            lambda: OptEqConv2d(3, 4, 5, 0),
            "OptEqConv2d.kernel_size must be a whole number of at least 1; got 0.",
        ),
        (
            lambda: OptEqConv2d(3, 4, 5, separable=True, groups=3),
            "OptEqConv2d.groups must be 1 for separable convolutions; got 3.",
        ),
        (
            lambda: OptEqConv2d(3, 4, 5, groups=2),
            "Convolution.groups must divide both channel counts; got 2 for 4 and 5.",
        ),
        (
            lambda: OptEqConv2d(3, 4, 5, activation=MatrixActivation(torch.eye(5))),
            "OptEqConv2d.activation must be elementwise; got a matrix activation. Use OptEq "
            "for it.",
        ),
        (
            lambda: OptEqConv2d(3, 4, 5, 7)(torch.randn(2, 3, 6, 9)),
            "Convolution.kernel_size must not exceed the image; got a kernel of 7 x 7 for an "
            "image of 6 x 9.",
        ),
        (
            lambda: OptEq(3, 4, 5)(torch.randn(2, 5)),
            "OptEq input must have shape (batch, 3); got (2, 5).",
        ),
        (
            lambda: OptEq(3, 4, 5)(torch.randn(2, 3).double()),
            "The input must be torch.float32, as the weights are; got torch.float64. Convert "
            "one of them.",
        ),
        (lambda: OptEq(3, 4, 5)([1.0, 2.0]), "OptEq input must be a tensor; got list."),
        (
            lambda: OptEq(3, 4, 5)(torch.randn(2, 3), torch.randn(2, 3)),
            "OptEq z0 must have shape (2, 4); got (2, 3).",
        ),
        (
            lambda: OptEq(3, 4, 5, MatrixActivation(torch.eye(7))),
            "OptEq.activation must have a matrix of the size of its layer, 5; got 7.",
        ),
        (
            lambda: OptEq(3, 4, 5, solver="sam"),
            "solver.regularizer must be given for 'sam'; got nothing. "
            'Write solver = { name = "sam", regularizer = ... }.',
        ),
        (lambda: project_norms([]), "project_norms.module must be a module; got list."),
        (
            lambda: OptEqConv2d(3, 4, 5)(torch.randn(3, 6, 6)),
            "OptEqConv2d input must have shape (batch, 3, height, width); got (3, 6, 6).",
        ),
        (
            lambda: project_norms(nn.Linear(2, 2)),
            "project_norms.module must hold a cell that projects its weights, such as OptEq's "
            "with norm='project'; got none.",
        ),
    ],
)
def test_bad_input_gets_one_sentence(make, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        make()


def test_project_calls_weights_that_are_not_finite_a_numerical_failure():
    sentence = (
        "project_norms must find finite weights; got NaN or infinity in layer 1. "
        "Lower the learning rate."
    )
    with pytest.raises(ConvergenceError, match=f"^{re.escape(sentence)}$"):
        project_norms(enlarge(OptEq(3, 4, 5, norm="project"), float("nan")))


@pytest.mark.parametrize("name", ["gelu", "silu", nn.GELU()])
def test_inadmissible_activations_are_refused_with_the_reason(name):
    with pytest.raises(ValueError, match="not admissible: its slope is negative"):
        OptEq(3, 4, 5, name)


def test_opteq_is_an_equilibrium_around_a_cell():
    layer = OptEq(3, 4, 5)
    assert isinstance(layer, Equilibrium)
    assert isinstance(layer.cell, Cell)
    assert "solver=auto" in repr(layer)


def test_layers_hand_on_how_they_are_solved():
    stop = Stop(1e-9, max_steps=7)
    for layer in (OptEq(3, 4, 5, stop=stop), OptEqConv2d(3, 4, 5, stop=stop)):
        assert layer.stop == stop
    layer = OptEq(3, 4, 5, tolerance=1e-6, solver="anderson", gradient="unrolled")
    assert (layer.stop.tolerance, layer.stop.max_steps) == (1e-6, 100)
    assert (type(layer.solver), type(layer.gradient)) == (Anderson, Unrolled)
    with pytest.raises(TypeError, match="tolerence"):
        OptEq(3, 4, 5, tolerence=1e-6)


def test_a_stopping_rule_in_full_takes_the_place_of_a_model_s_own_accuracy():
    assert create_model("opteq-digits").equilibrium.stop.tolerance == 1e-3
    stop = Stop(1e-9, max_steps=7)
    assert create_model("opteq-digits", stop=stop).equilibrium.stop == stop
