"""What a score is called, and how its values are written."""

from __future__ import annotations

import math
from dataclasses import dataclass

from equipoise.core import to_percent

__all__ = ["Metric"]


@dataclass(frozen=True)
class Metric:
    """One score.

    Args:
        name: Its key in logs and summaries, such as `miou`.
        title: What it is called in full, as the title of a chart.
        unit: `%` for a fraction that is shown in percent; another unit, such as `dB`; or none.
        higher_is_better: Whether a larger value is the better one.
        label: What it is called in a line of numbers, such as `mIoU`; by default its name.
    """

    name: str
    title: str
    unit: str = ""
    higher_is_better: bool = True
    label: str = ""

    def format_value(self, value: float | None, digits: int = 1) -> str:
        """Return a value as people read it: `97.3 %`, `31.42 dB`, `87.13`.

        Args:
            value: The value; None where there is none.
            digits: Digits of a percentage after the decimal point.
        """
        value = math.nan if value is None else value
        if not math.isfinite(value):
            return f"{value:.4g}"
        if self.unit == "%":
            return f"{to_percent(value, digits)} %"
        return f"{value:.2f} {self.unit}" if self.unit else f"{value:.4g}"

    def describe(self, value: float | None) -> str:
        """Return the label and a value: `mIoU 51.2 %`.

        Args:
            value: The value; None where there is none.
        """
        return f"{self.label or self.name} {self.format_value(value)}"
