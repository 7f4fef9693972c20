"""What a run ran on."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy
import torch

__all__ = ["describe_environment"]


def describe_environment(world: int) -> dict[str, Any]:
    """Return what a run ran on.

    Args:
        world: Number of processes.
    """
    return {
        "equipoise": version("equipoise"),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "processes": world,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([_program(sys.argv[0]), *sys.argv[1:]]),
    }


def _program(path: str) -> str:
    """The name of a program; `python -m equipoise` is told as a file of the package."""
    name = Path(path).name
    return "equipoise" if name == "__main__.py" else name
