"""The precision in which a model runs, and whether the processor has it."""

from __future__ import annotations

import torch

from equipoise.engine.settings import Precision

__all__ = ["autocast", "describe_emulation"]

BFLOAT16 = ("avx512_bf16", "amx_bf16")
"""What x86 processors call their instructions for bfloat16."""


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Return the context in which a model runs at a precision.

    Args:
        device: Where it runs.
        precision: Of what may run lower than float32.
    """
    lower = precision != "float32"
    return torch.autocast(
        device.type, dtype=getattr(torch, precision) if lower else None, enabled=lower
    )


def describe_emulation(device: torch.device, precision: Precision) -> str:
    """Return that a processor has to emulate a precision; nothing if it has it, or is not known.

    Args:
        device: Where a model runs.
        precision: Its precision.
    """
    if device.type != "cpu" or precision != "bfloat16":
        return ""
    has = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    if any(has.get(name, True) for name in BFLOAT16):
        return ""
    return (
        "This processor has no instructions for bfloat16, so that steps may take several times as "
        "long as with train.precision=float32."
    )
