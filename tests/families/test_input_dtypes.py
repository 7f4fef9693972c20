"""Inputs of another precision than the weights get one sentence from every family."""

import pytest
import torch

from equipoise import Equilibrium
from equipoise.families.multiscale import MultiscaleCell
from equipoise.families.residual import ResidualCell
from equipoise.families.transformer import TransformerCell
from equipoise.models import create_model

LAYERS = {
    "ResidualCell": (lambda: Equilibrium(ResidualCell(8, 8)), (2, 8, 4, 4)),
    "MultiscaleCell": (lambda: Equilibrium(MultiscaleCell((8, 8))), (2, 8, 4, 4)),
    "TransformerCell": (lambda: Equilibrium(TransformerCell(8, 2, 8)), (2, 5, 8)),
    "opteq-digits": (lambda: create_model("opteq-digits"), (2, 1, 8, 8)),
    "opteq-table": (lambda: create_model("opteq-table"), (2, 16)),
    "monotone-table": (lambda: create_model("monotone-table"), (2, 4)),
    "lipschitz-table": (lambda: create_model("lipschitz-table"), (2, 4)),
    "well-posed-table": (lambda: create_model("well-posed-table"), (2, 4)),
    "relu-implicit": (lambda: create_model("relu-implicit", input_shape=(16,)), (2, 16)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_input_of_another_dtype_gets_one_sentence(name):
    make, shape = LAYERS[name]
    layer = make()
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.complex64):
        with pytest.raises(ValueError, match=rf" must be .*; got {dtype}\.") as caught:
            layer(torch.zeros(shape, dtype=dtype))
        assert "\n" not in str(caught.value)
        if name.endswith("Cell"):
            sentence = f"The input of {name} must be torch.float32, as the weights are; got {dtype}"
            assert str(caught.value).startswith(sentence)
    with pytest.raises(ValueError, match=r"float32.*; got torch\.float16\. .* use torch\.autocast"):
        make().half()(torch.zeros(shape, dtype=torch.float16))
    with torch.autocast("cpu", torch.bfloat16):
        layer(torch.rand(shape))


def test_memory_of_another_dtype_gets_one_sentence():
    e, memory = torch.zeros(2, 5, 8), torch.zeros(2, 3, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"^The memory of TransformerCell must be torch\.float32"):
        Equilibrium(TransformerCell(8, 2, 8))((e, memory))
