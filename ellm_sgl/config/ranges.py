"""Numbers that come from outside: numbers indeed, finite and in range, before anything uses them.

Outside is what users, clients and files say: flags, settings in the environment, JSON bodies,
options of policies, traces and configuration files. nan passes any check of the form
`if value < low: refuse`, and inf most of them; `value in Range(low, high)` is False for both, and
for everything that is no number.
"""

from __future__ import annotations

import json
import math
import numbers
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MOST_DEPTH = 100
"""Levels of lists and objects in JSON from outside. What reads, copies or sends them calls itself
for each level, and Python ends that at 1,000 calls in all."""

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 120


@dataclass(frozen=True)
class Range:
    """The finite numbers from `low` to `high`, both finite; not strings, not booleans."""

    low: float
    high: float
    low_open: bool = False
    """`low` itself is left out."""
    high_open: bool = False
    whole: bool = False
    """Integers only: 2.0 is none."""

    def __contains__(self, value: object) -> bool:
        kind = numbers.Integral if self.whole else numbers.Real
        if isinstance(value, bool) or not isinstance(value, kind):
            return False
        number: Any = value
        above = self.low < number if self.low_open else self.low <= number
        below = number < self.high if self.high_open else number <= self.high
        return bool(above and below)

    def check(self, name: str, value: object) -> None:
        """Raise ValueError, which names the value and the range, where `value` is not in it."""
        if value not in self:
            raise ValueError(f"{name} must be {self}, got {shown(value)}")

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        low = f"above {self.low:,}" if self.low_open else f"from {self.low:,}"
        high = f"up to below {self.high:,}" if self.high_open else f"up to {self.high:,}"
        return f"{kind} {low} {high}"


MOST_TOKENS = 2**31 - 1
"""SGLang numbers the tokens of a pool with 32 bits."""
TOKENS = Range(1, MOST_TOKENS, whole=True)
ANSWERS = Range(1, MOST_TOKENS, whole=True)
"""To one prompt."""
MILLISECONDS = Range(0, 10**9, low_open=True)
"""A limit or an objective; at most eleven days."""
SECONDS = Range(0, 10**9, low_open=True)
SHARE = Range(0, 1, high_open=True)
"""Of a request's tokens, for instance: all of them is too much."""


def shown(value: object) -> str:
    """Any value, for a message: in one line, and not too long a one."""
    return _repr.repr(value)


def check_finite(value: Any, name: str) -> None:
    """Check every number in what JSON was made of.

    Args:
        value: numbers, strings, booleans, None, and lists and dicts of them.
        name: of the value, for the message; what is in a dict is named by its key.

    Raises:
        ValueError: a number is not finite; or as `check_depth`.
    """
    for inner_name, inner in _walk(value, name):
        if isinstance(inner, float) and not math.isfinite(inner):
            raise ValueError(f"{inner_name}: {inner} is not a finite number; give one")


def check_depth(value: Any, name: str) -> None:
    """Raise ValueError where lists and dicts are nested more than `MOST_DEPTH` deep."""
    for _ in _walk(value, name):
        pass


def _walk(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Everything in `value` that is no list and no dict, with its name."""
    rest = [(value, name, 0)]
    while rest:
        value, name, depth = rest.pop()
        if not isinstance(value, dict | list | tuple):
            yield name, value
            continue
        if depth == MOST_DEPTH:
            raise ValueError(f"{shown(name)}: nested more than {MOST_DEPTH} deep; give it flatter")
        pairs = value.items() if isinstance(value, dict) else ((name, v) for v in value)
        rest += [(inner, str(key), depth + 1) for key, inner in pairs]


def read_json(text: str | bytes) -> Any:
    """JSON from outside, all of whose numbers are finite.

    Raises:
        ValueError: it is not JSON; or as `check_finite`.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"nested more than {MOST_DEPTH} deep; give it flatter") from None
    check_finite(value, "JSON")
    return value


def as_json_value(value: Any) -> Any:
    """`value` with null for every number in it that JSON does not know."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: as_json_value(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_json_value(each) for each in value]
    return value
