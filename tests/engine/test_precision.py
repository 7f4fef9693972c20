"""Whoever trains in bfloat16 on a processor without it is told so."""

from __future__ import annotations

import pytest
import torch

from equipoise.engine.precision import describe_emulation

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("precision", "has", "told"),
    [
        ("bfloat16", {"avx512_bf16": False, "amx_bf16": False}, True),
        ("bfloat16", {"avx512_bf16": True, "amx_bf16": False}, False),
        ("bfloat16", {"avx512_bf16": False, "amx_bf16": True}, False),
        ("bfloat16", {"sve": True}, False),  # another kind of processor
        ("float32", {"avx512_bf16": False, "amx_bf16": False}, False),
        ("float16", {"avx512_bf16": False, "amx_bf16": False}, False),
    ],
)
def test_emulated_bfloat16_is_told(monkeypatch, precision, has, told):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has, raising=False)
    sentence = describe_emulation(CPU, precision)
    assert ("no instructions for bfloat16" in sentence) is told
    assert not describe_emulation(torch.device("cuda"), precision)


def test_nothing_is_told_where_torch_does_not_know(monkeypatch):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert not describe_emulation(CPU, "bfloat16")
