from __future__ import annotations

import pytest

from equipoise.core import to_percent


@pytest.mark.parametrize(
    ("fraction", "digits", "text"),
    [
        (1.0, 1, "100.0"),
        (0.9995, 1, "99.9"),
        (0.9996, 1, "99.9"),
        (1 - 1e-16, 1, "99.9"),
        (0.99996, 2, "99.99"),
        (0.997, 0, "99"),
        (0.9994, 1, "99.9"),
        (0.98249, 1, "98.2"),
        (0.98249, 2, "98.25"),
        (0.0, 1, "0.0"),
    ],
)
def test_percent_rounds_and_keeps_100_for_all(fraction: float, digits: int, text: str) -> None:
    assert to_percent(fraction, digits) == text
