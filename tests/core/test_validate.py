from __future__ import annotations

import math
import pickle

import numpy as np
import pytest

from equipoise.core import (
    SettingError,
    SourceError,
    require_between,
    require_count,
    require_finite,
    require_flag,
    require_fraction,
    require_positive,
    require_size,
    require_type,
    require_whole,
)


def test_setting_error_is_one_sentence_made_of_its_parts() -> None:
    error = SettingError("train.epochs", "be a whole number", "x", "Write 3.")
    assert str(error) == "train.epochs must be a whole number; got 'x'. Write 3."
    assert (error.key, error.rule, error.value, error.remedy, error.got) == (
        "train.epochs",
        "be a whole number",
        "x",
        "Write 3.",
        "'x'",
    )
    assert str(SettingError("a", "be b", 3)) == "a must be b; got 3."
    assert (
        str(SettingError("a", "be given", None, got="nothing")) == "a must be given; got nothing."
    )


def test_setting_error_shortens_a_long_value() -> None:
    assert len(str(SettingError("a", "be short", "x" * 10**6))) < 300


def test_setting_error_can_be_said_of_another_key() -> None:
    error = SettingError("OptEq.alpha", "be in (0, 1]", [2], "Lower it.", got="2 in a list")
    other = error.about("model.options.alpha")
    assert str(other) == "model.options.alpha must be in (0, 1]; got 2 in a list. Lower it."
    assert other.value == [2]
    assert error.key == "OptEq.alpha"


@pytest.mark.parametrize(
    "error",
    [
        SettingError("a.b", "be c", [1], "Do d.", got="e"),
        SourceError("folder/file", "is damaged"),
    ],
)
def test_errors_survive_pickling(error: ValueError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_source_error_is_one_line_that_names_its_source() -> None:
    error = SourceError("run/config.toml", ValueError("must\n be TOML."))
    assert str(error) == "run/config.toml: must be TOML."
    assert (error.source, error.reason) == ("run/config.toml", "must be TOML.")


NOT_NUMBERS = [True, "1", None, [1], 1j, math.nan]


@pytest.mark.parametrize(
    ("check", "good", "bad", "rule"),
    [
        (require_positive, [1, 0.5, 5e-324], [0, -1, math.inf], "be a positive number"),
        (require_finite, [0, -1.5, 1e308], [math.inf, -math.inf, 10**400], "be a finite number"),
        (require_count, [1, 10**30], [0, -1, 1.0], "be a whole number of at least 1"),
        (require_whole, [0, 1], [-1, 0.0], "be a whole number of at least 0"),
        (require_fraction, [1, 0.5, 1e-9], [0, -0.5, 1.5, math.inf], "be in (0, 1]"),
        (require_flag, [True, False], [0, 1.5], "be True or False"),
        (
            require_size,
            [(1, 2), [224, 224]],
            [3, (1,), (1, 2, 3), (0, 1), (1.0, 2), (True, 1)],
            "be a pair (height, width) of whole numbers of at least 1",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_check_takes_what_it_should_and_names_the_rule_otherwise(
    check: object, good: list[object], bad: list[object], rule: str
) -> None:
    for value in good:
        check("some.key", value)
    for value in [*bad, *(each for each in NOT_NUMBERS if each not in good)]:
        with pytest.raises(SettingError) as caught:
            check("some.key", value)
        assert (caught.value.key, caught.value.rule) == ("some.key", rule)
        assert caught.value.value is value


def test_zero_is_positive_only_where_that_is_allowed() -> None:
    require_positive("a", 0, or_zero=True)
    with pytest.raises(SettingError, match=r"^a must be zero or a positive number; got -1\.$"):
        require_positive("a", -1, or_zero=True)


@pytest.mark.parametrize("check", [require_count, require_whole])
def test_whole_numbers_may_have_an_upper_end(check: object) -> None:
    check("a", 7, 7)
    with pytest.raises(SettingError, match=r"^a must be a whole number from [01] to 7; got 8\.$"):
        check("a", 8, 7)


@pytest.mark.parametrize(
    ("ends", "inside", "outside"),
    [
        ("[]", [0, 0.5, 1], [-0.1, 1.1]),
        ("[)", [0, 0.5], [1]),
        ("(]", [0.5, 1], [0]),
        ("()", [0.5], [0, 1]),
    ],
)
def test_between_counts_the_ends_it_is_told_to(
    ends: str, inside: list[float], outside: list[float]
) -> None:
    for value in inside:
        require_between("a", value, 0, 1, ends)
    for value in [*outside, *NOT_NUMBERS]:
        with pytest.raises(SettingError) as caught:
            require_between("a", value, 0, 1, ends)
        assert caught.value.rule == f"be in {ends[0]}0, 1{ends[1]}"


def test_type_is_named_with_its_remedy() -> None:
    require_type("a", 3, (int, str), "a number or text")
    with pytest.raises(
        SettingError, match=r"^a must be a number or text; got list\. Write 3\.$"
    ) as caught:
        require_type("a", [], (int, str), "a number or text", "Write 3.")
    assert caught.value.value == []


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_whole_numbers_of_numpy_are_whole_numbers(kind: type) -> None:
    require_count("a", kind(3), most=3)
    require_whole("a", kind(0))
    require_size("a", (kind(2), 3))
    require_positive("a", kind(3))
    with pytest.raises(SettingError, match=r"^a must be a whole number of at least 1; got "):
        require_count("a", kind(0))


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.float16])
def test_numbers_of_numpy_are_numbers(kind: type) -> None:
    require_positive("a", kind(0.5))
    require_finite("a", kind(0.5))
    require_fraction("a", kind(0.5))
    for value in (kind("nan"), kind("inf")):
        with pytest.raises(SettingError):
            require_finite("a", value)
    with pytest.raises(SettingError):
        require_count("a", kind(3.0))


def test_booleans_of_numpy_are_no_numbers() -> None:
    for check in (require_count, require_whole, require_positive, require_finite):
        with pytest.raises(SettingError):
            check("a", np.bool_(True))
