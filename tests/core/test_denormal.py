from __future__ import annotations

import pytest
import torch

from equipoise import flush_denormals


def denormals_survive() -> bool:
    tiny = torch.tensor([torch.finfo(torch.float32).tiny])
    return bool((tiny / 2 != 0).item())


@pytest.fixture(autouse=True)
def mode():
    before = not denormals_survive()
    torch.set_flush_denormal(False)
    yield
    torch.set_flush_denormal(before)


def test_flush_denormals_flushes_within_the_block_only() -> None:
    assert denormals_survive()
    with flush_denormals() as supported:
        assert denormals_survive() is not supported
    assert denormals_survive()


def test_flush_denormals_restores_the_mode_after_an_error() -> None:
    with pytest.raises(RuntimeError, match="inside"), flush_denormals():
        raise RuntimeError("inside")
    assert denormals_survive()


def test_flush_denormals_nests_and_keeps_a_mode_that_was_on() -> None:
    with flush_denormals() as supported:
        with flush_denormals():
            pass
        assert denormals_survive() is not supported
    assert denormals_survive()


def test_flush_denormals_leaves_ordinary_numbers_alone() -> None:
    with flush_denormals():
        value = torch.tensor([1e-30]) * 1e-5
    torch.testing.assert_close(value, torch.tensor([1e-35]))
