"""Freed memory stays with the process, unless somebody else decides about it."""

import os
import subprocess
import sys

import pytest

from equipoise.core.allocator import VARIABLES

STEPS = """
import resource, sys
import numpy as np
from equipoise.core.allocator import keep_freed_memory
kept = keep_freed_memory() if sys.argv[1] == "keep" else None
def step():
    states = [np.ones(2**20) for _ in range(8)]  # 8 MB each, all alive at once
for _ in range(2):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(kept, (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 10)
"""

glibc = pytest.mark.skipif(
    "CS_GNU_LIBC_VERSION" not in getattr(os, "confstr_names", ()), reason="this is not glibc"
)


def run_steps(how: str, **environment: str) -> tuple[str, int]:
    """Whether memory is kept, and the page faults of a step, in a process of its own."""
    clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    clean.pop("GLIBC_TUNABLES", None)
    done = subprocess.run(
        [sys.executable, "-c", STEPS, how],
        env=clean | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    kept, faults = done.stdout.split()
    return kept, int(faults)


@glibc
def test_freed_memory_stays_with_the_process():
    _, returned = run_steps("leave")
    kept, faults = run_steps("keep")
    assert kept == "True"
    assert returned > 1000  # 8 times 8 MB are 16,384 pages of 4 kB
    assert faults < 100


@glibc
@pytest.mark.parametrize(
    "environment",
    [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_max=8"}],
    ids=["variable", "tunables"],
)
def test_freed_memory_is_left_to_an_environment_that_decides(environment):
    kept, faults = run_steps("keep", **environment)
    assert kept == "False"
    assert faults > 1000


def test_freed_memory_is_not_kept_without_glibc(monkeypatch):
    import equipoise.core.allocator as allocator

    for name in (*VARIABLES, "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)

    def unknown(name):
        raise ValueError(name)

    monkeypatch.setattr(os, "confstr", unknown, raising=False)
    assert allocator.keep_freed_memory() is False
