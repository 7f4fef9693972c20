"""Checks of the numbers, types and names that users give, each told in one sentence."""

from __future__ import annotations

import math
from typing import Literal

__all__ = [
    "SettingError",
    "require_between",
    "require_count",
    "require_flag",
    "require_fraction",
    "require_positive",
    "require_type",
    "require_whole",
]

Ends = Literal["[]", "[)", "(]", "()"]


class SettingError(ValueError):
    """A setting that cannot be used: "KEY must RULE; got VALUE. REMEDY".

    Args:
        key: The setting, such as `train.epochs` or `Stop.tolerance`.
        rule: What must hold of it, as the sentence goes on after "must".
        value: What was given.
        remedy: What to do about it, as a sentence; empty if the rule says it all.
        got: The value as the sentence shows it, where `repr(value)` would not do.
    """

    def __init__(
        self, key: str, rule: str, value: object, remedy: str = "", *, got: str | None = None
    ) -> None:
        self.key = key
        self.rule = rule
        self.value = value
        self.remedy = remedy
        self.got = repr(value) if got is None else got
        super().__init__(f"{key} must {rule}; got {self.got}.{remedy and ' ' + remedy}")

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, (self.key, self.rule, self.value, self.remedy, self.got)


def _restore(key: str, rule: str, value: object, remedy: str, got: str) -> SettingError:
    return SettingError(key, rule, value, remedy, got=got)


def require_positive(key: str, value: object, *, or_zero: bool = False) -> None:
    """Raise unless `value` is a finite number greater than 0, or 0 where that is allowed."""
    if not (_is_number(value) and (0 < value < math.inf or (or_zero and value == 0))):  # type: ignore[operator]
        raise SettingError(key, f"be {'zero or ' if or_zero else ''}a positive number", value)


def require_count(key: str, value: object) -> None:
    """Raise unless `value` is a whole number of at least 1."""
    _require_at_least(key, value, 1)


def require_whole(key: str, value: object) -> None:
    """Raise unless `value` is a whole number of at least 0."""
    _require_at_least(key, value, 0)


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
        above = low <= value if ends[0] == "[" else low < value  # type: ignore[operator]
        below = value <= high if ends[1] == "]" else value < high  # type: ignore[operator]
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


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require_at_least(key: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SettingError(key, f"be a whole number of at least {least}", value)
