"""Numbers from outside: what a range lets through, and what JSON may hold."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ellm_sgl.config.ranges import (
    MILLISECONDS,
    MOST_DEPTH,
    SHARE,
    TOKENS,
    Range,
    check_depth,
    check_finite,
    read_json,
    shown,
)

NO_NUMBERS: list[Any] = [
    None, True, False, "5", "nan", [5], {}, 5j, math.nan, math.inf, -math.inf, np.float64("nan"),
    np.array([5]), 10**400, -(10**400),
]  # fmt: skip


@pytest.mark.parametrize("value", NO_NUMBERS, ids=shown)
@pytest.mark.parametrize("allowed", [Range(-1e308, 1e308), TOKENS, SHARE, MILLISECONDS], ids=str)
def test_no_range_holds_what_is_no_finite_number(allowed: Range, value: Any) -> None:
    assert value not in allowed


@pytest.mark.parametrize(
    ("allowed", "held", "not_held"),
    [
        (Range(0, 1), (0, 1, 0.5, Fraction(1, 3), np.float32(0.25)), (-1e-300, 1.0000001)),
        (Range(0, 1, low_open=True), (1e-300, 1), (0, 0.0, -0.0)),
        (Range(0, 1, high_open=True), (0, 0.9999), (1, 1.0)),
        (Range(1, 5, whole=True), (1, 5, np.int64(3)), (0, 6, 3.0, 2.5)),
    ],
    ids=str,
)
def test_ends_are_in_unless_they_are_open(
    allowed: Range, held: tuple[Any, ...], not_held: tuple[Any, ...]
) -> None:
    assert all(value in allowed for value in held)
    assert not any(value in allowed for value in not_held)


@given(st.one_of(st.floats(), st.integers()), st.floats(-1e9, 1e9), st.floats(0, 1e9))
def test_a_range_holds_what_lies_between_its_ends(value: float, low: float, width: float) -> None:
    inside = not math.isnan(value) and low <= value <= low + width
    assert (value in Range(low, low + width)) == inside


def test_the_message_names_the_value_and_the_range() -> None:
    with pytest.raises(ValueError, match=r"^rate must be a number above 0 up to 5, got nan$"):
        Range(0, 5, low_open=True).check("rate", math.nan)
    with pytest.raises(ValueError, match=r"a whole number from 1 up to 2,147,483,647, got 2\.5"):
        TOKENS.check("tokens", 2.5)
    assert str(SHARE) == "a number from 0 up to below 1"


@pytest.mark.parametrize(
    "value", ["x" * 10**6, "a\nb", [[[[[[[[[]]]]]]]]], 10**4000, {1: "\ud800"}]
)
def test_a_value_in_a_message_is_one_short_line(value: Any) -> None:
    text = shown(value)
    assert len(text) < 200 and "\n" not in text
    text.encode()


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"loss": math.inf}, "loss: inf"),
        ({"a": {"b": [1, {"c": -math.inf}]}}, "c: -inf"),
        ([1.0, math.nan], "options: nan"),
        (math.nan, "options: nan"),
    ],
)
def test_a_number_that_is_not_finite_is_found_wherever_it_is(value: Any, named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named} is not a finite number"):
        check_finite(value, "options")


def nested(depth: int) -> Any:
    value: Any = 1
    for i in range(depth):
        value = [value] if i % 2 else {"deeper": value}
    return value


@pytest.mark.parametrize("check", [check_finite, check_depth])
def test_what_is_nested_too_deeply_is_refused_however_deep(check: Any) -> None:
    check(nested(MOST_DEPTH), "options")
    for depth in (MOST_DEPTH + 1, 100_000):
        with pytest.raises(ValueError, match=f"nested more than {MOST_DEPTH} deep"):
            check(nested(depth), "options")


def test_depth_alone_lets_other_numbers_through() -> None:
    check_depth({"bias": -math.inf}, "custom_params")


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "NaN", "[1e999]", '{"a": -Infinity}', "1" * 5000, b"\xff", "[" * 200_000,
        "[" * 500 + "]" * 500,
    ],
    ids=shown,
)  # fmt: skip
def test_json_that_cannot_be_used_is_a_value_error_of_one_line(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r".") as refusal:
        read_json(text)
    assert "\n" not in str(refusal.value)


finite_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)  # fmt: skip


@given(finite_json)
def test_all_other_json_is_read_as_it_is(value: Any) -> None:
    assert read_json(json.dumps(value)) == value
