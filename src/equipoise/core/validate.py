"""Checks of the numbers and types that users give; each failure is told in one sentence."""

from __future__ import annotations

import math
import sys
from numbers import Integral, Real
from typing import Literal, TypeGuard

__all__ = [
    "SettingError",
    "require_between",
    "require_count",
    "require_finite",
    "require_flag",
    "require_fraction",
    "require_positive",
    "require_size",
    "require_type",
    "require_whole",
]

MAX_VALUE_LENGTH = 200  # characters of a value in a message

Ends = Literal["[]", "[)", "(]", "()"]


class SettingError(ValueError):
    """A setting that cannot be used: "KEY must RULE; got VALUE. REMEDY".

    Args:
        key: The setting, such as `train.epochs` or `Stop.tolerance`.
        rule: What must be true of it, worded to follow "must".
        value: What was given.
        remedy: What to do about it, as a sentence; empty if the rule says it all.
        got: The value as the message shows it; by default its `repr`, shortened.
    """

    def __init__(
        self, key: str, rule: str, value: object, remedy: str = "", *, got: str | None = None
    ) -> None:
        self.key = key
        self.rule = rule
        self.value = value
        self.remedy = remedy
        self.got = _shorten(repr(value)) if got is None else got
        super().__init__(f"{key} must {rule}; got {self.got}.{remedy and ' ' + remedy}")

    def about(self, key: str) -> SettingError:
        """Return the same error, said of a setting by another name.

        Args:
            key: What the user calls it: `model.options.alpha` for `OptEq.alpha`.
        """
        return SettingError(key, self.rule, self.value, self.remedy, got=self.got)

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, (self.key, self.rule, self.value, self.remedy, self.got)


def _restore(key: str, rule: str, value: object, remedy: str, got: str) -> SettingError:
    return SettingError(key, rule, value, remedy, got=got)


def require_positive(key: str, value: object, *, or_zero: bool = False, remedy: str = "") -> None:
    """Raise unless `value` is a finite number greater than 0, or 0 where that is allowed."""
    if not (_is_number(value) and (0 < value < math.inf or (or_zero and value == 0))):
        raise SettingError(
            key, f"be {'zero or ' if or_zero else ''}a positive number", value, remedy
        )


def require_finite(key: str, value: object) -> None:
    """Raise unless `value` is a finite number."""
    if _is_whole(value):
        finite = abs(value) <= sys.float_info.max  # whole numbers may be beyond all floats
    else:
        finite = _is_number(value) and math.isfinite(value)
    if not finite:
        raise SettingError(key, "be a finite number", value)


def require_count(key: str, value: object, most: int | None = None) -> None:
    """Raise unless `value` is a whole number of at least 1, and at most `most`."""
    _require_integer(key, value, 1, most)


def require_whole(key: str, value: object, most: int | None = None) -> None:
    """Raise unless `value` is a whole number of at least 0, and at most `most`."""
    _require_integer(key, value, 0, most)


def require_size(key: str, value: object) -> None:
    """Raise unless `value` is a height and a width in pixels."""
    if not (
        isinstance(value, tuple | list)
        and len(value) == 2
        and all(_is_whole(side) and side >= 1 for side in value)
    ):
        raise SettingError(key, "be a pair (height, width) of whole numbers of at least 1", value)


def require_fraction(key: str, value: object) -> None:
    """Raise unless `value` is a number in (0, 1]."""
    require_between(key, value, 0, 1, "(]")


def require_between(key: str, value: object, low: float, high: float, ends: Ends = "[]") -> None:
    """Raise unless `value` is a number between two others.

    Args:
        key: The setting.
        value: What was given.
        low: The lower end.
        high: The upper end.
        ends: Which of them count, as intervals are written: `[0, 1)` is `"[)"`.
    """
    if _is_number(value):
        above = low <= value if ends[0] == "[" else low < value
        below = value <= high if ends[1] == "]" else value < high
        if above and below:
            return
    raise SettingError(key, f"be in {ends[0]}{low:g}, {high:g}{ends[1]}", value)


def require_flag(key: str, value: object) -> None:
    """Raise unless `value` is True or False."""
    if not isinstance(value, bool):
        raise SettingError(key, "be True or False", value)


def require_type(
    key: str, value: object, kind: type | tuple[type, ...], name: str, remedy: str = ""
) -> None:
    """Raise unless `value` is an instance of a class.

    Args:
        key: The setting.
        value: What was given.
        kind: The class, or several of which one will do.
        name: What it is called in the sentence, with its article: `a tensor`.
        remedy: What to do about it.
    """
    if not isinstance(value, kind):
        raise SettingError(key, f"be {name}", value, remedy, got=type(value).__name__)


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[float]:
    # NumPy's numbers are numbers, and its booleans are none.
    return isinstance(value, Real) and not isinstance(value, bool)


def _require_integer(key: str, value: object, least: int, most: int | None) -> None:
    if not _is_whole(value) or value < least or (most is not None and value > most):
        span = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise SettingError(key, f"be a whole number {span}", value)


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[:MAX_VALUE_LENGTH]}..."
