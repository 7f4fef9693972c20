"""Transformer DEQs: causal with and without a memory, exact gradients, positions, dropout."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from equipoise import Equilibrium, create_model
from equipoise.analysis import certify
from equipoise.families.explicit import ExplicitTransformer
from equipoise.families.transformer import TransformerCell, TransformerDEQ
from equipoise.models.attention import alibi, attend

TIGHT = {"tolerance": 1e-11, "max_steps": 300, "on_failure": "raise"}


def make(memory_length=6, **options):
    torch.manual_seed(1)
    cell = TransformerCell(8, 2, 12, **options).double()
    model = TransformerDEQ(Equilibrium(cell, **TIGHT), 11, memory_length=memory_length)
    return model.double().eval()


def explicit():
    torch.manual_seed(1)
    return ExplicitTransformer(11, 8, 2, 6, 2, memory_length=6).double().eval()


@pytest.mark.parametrize("build", [make, explicit])
def test_transformer_shows_no_token_to_earlier_ones(build):
    model, x = build(), torch.randint(11, (3, 10))
    other = x.clone()
    other[:, 7:] = (x[:, 7:] + 1) % 11
    memory = torch.randn(3, 4, model.memory_width, dtype=torch.float64)
    for given in ((), (memory,)):
        first, second = (model(each, *given) for each in (x, other))
        if given:
            first, second = first[0], second[0]
        assert torch.allclose(first[:, :7], second[:, :7], atol=1e-8)
        assert not torch.allclose(first[:, 7:], second[:, 7:], atol=1e-3)
    changed = model(x, memory + 1)[0]
    assert not torch.allclose(changed[:, 0], model(x, memory)[0][:, 0], atol=1e-3)


@pytest.mark.parametrize("build", [make, explicit])
def test_text_in_pieces_gives_what_it_gives_as_a_whole(build):
    """The equilibria of earlier tokens depend on no later ones, so a memory of them is exact."""
    model, x = build(), torch.randint(11, (2, 7))
    model.memory_length = 7
    with torch.no_grad():
        memory, pieces = model.start_memory(2), []
        for piece in x.split([3, 1, 3], dim=1):
            output, memory = model(piece, memory)
            pieces.append(output)
        assert torch.allclose(torch.cat(pieces, dim=1), model(x), atol=1e-8)
    assert memory.shape == (2, 7, model.memory_width)


def test_memory_is_cut_and_takes_no_gradient():
    model = make(memory_length=5)
    output, memory = model(torch.randint(11, (2, 4)), model.start_memory(2))
    assert output.requires_grad
    assert not memory.requires_grad
    _, memory = model(torch.randint(11, (2, 4)), memory)
    assert memory.shape == (2, 5, 16)


def test_equilibrium_and_its_gradient_are_those_of_a_long_unroll():
    model = make(gain=0.2)
    cell, e = model.equilibrium.cell, torch.randn(2, 5, 8, dtype=torch.float64)
    memory = torch.randn(2, 3, 16, dtype=torch.float64)
    weight = torch.randn(2, 5, 8, dtype=torch.float64)
    found = model.equilibrium((e, memory))
    (found * weight).sum().backward()
    gradients = [parameter.grad.clone() for parameter in cell.parameters()]
    cell.zero_grad()
    context = cell.inject((e, memory))
    context = context._replace(bias=context.bias.tensor)
    z = torch.zeros_like(e)
    for _ in range(150):
        z = cell.step(z, context)
    (z * weight).sum().backward()
    assert torch.allclose(found, z, atol=1e-8)
    for mine, parameter in zip(gradients, cell.parameters(), strict=True):
        assert torch.allclose(mine, parameter.grad, atol=1e-7)


def test_attention_is_that_of_torch_with_slopes_of_alibi():
    q, k, v = (torch.randn(2, 4, length, 3).double() for length in (5, 7, 7))
    bias = alibi(4, 5, 7, q)
    known = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    assert torch.allclose(attend(q, k, v, bias), known)
    assert bias[0, 0].tolist()[:3] == [-0.5, -0.25, 0.0]
    assert bias[3, 4, 0] == -6 / 256
    assert bias[:, 0, 3:].eq(-math.inf).all()


def test_dropout_drops_the_same_units_of_all_tokens_and_steps():
    cell = TransformerCell(8, 2, 12, dropout=0.5).train()
    e = torch.randn(3, 4, 8)
    first, second = cell.inject(e), cell.inject(e)
    assert first.inner_mask.shape == (3, 1, 12)
    assert set(first.inner_mask.unique().tolist()) == {0.0, 2.0}
    assert not torch.equal(first.inner_mask, second.inner_mask)
    assert cell.eval().inject(e).inner_mask is None


def test_first_scores_of_attention_are_moderate_and_embeddings_outweigh_the_state():
    """Sharp scores make the step depend on the state too much; a weak input, on nothing else."""
    torch.manual_seed(0)
    cell = TransformerCell(128, 4, 256)
    e = torch.randn(4, 64, 128)
    context = cell.inject(e)
    q, k, v = context.injection.chunk(3, dim=-1)
    scores = (q @ k.transpose(1, 2)) / 128**0.5
    assert scores.std() < 1.5
    z = functional.layer_norm(torch.randn_like(e), (128,))
    of_state = cell.attention(z).chunk(3, dim=-1)[2]
    assert v.std() > 10 * of_state.std()


def test_certificate_says_that_there_is_an_equilibrium_within_its_ball():
    model = make()
    statement = certify(model.equilibrium, strict=False).further[0]
    assert statement.holds
    assert not statement.unique
    z = model.equilibrium(5 * torch.randn(2, 5, 8, dtype=torch.float64))
    assert z.norm(dim=-1).max() <= statement.number


@pytest.mark.parametrize("name", ["tiny", "ptb"])
def test_explicit_transformer_has_the_size_of_the_equilibrium(name):
    deq = create_model(f"transformer-{name}").parameter_counts()
    rival = create_model(f"transformer-explicit-{name}").parameter_counts()
    assert abs(deq["body"] / rival["body"] - 1) < 0.01


@pytest.mark.parametrize(
    ("x", "told"),
    [
        (torch.zeros(2, 3), "be numbers of tokens, which are integers; got torch.float32"),
        (torch.zeros(3, dtype=torch.int64), "have shape"),
        (torch.full((2, 3), 11), "from 0 to 10; got numbers from 11 to 11"),
    ],
)
def test_transformer_says_which_tokens_it_takes(x, told):
    with pytest.raises(ValueError, match=told):
        make()(x)
    with pytest.raises(ValueError, match="features must be a multiple of heads, 3; got 8"):
        TransformerCell(8, 3, 4)


def test_an_empty_batch_has_an_empty_equilibrium():
    layer = Equilibrium(TransformerCell(features=16, heads=2, inner=32))
    z = layer(torch.zeros(0, 7, 16, requires_grad=True))
    assert z.shape == (0, 7, 16)
    z.sum().backward()
    assert not any(weight.grad.any() for weight in layer.parameters())
