"""From a life that fails to the few events that matter, written as a test."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from tests.simulation.configuration import Configuration
from tests.simulation.events import Event

Failing = Callable[[Configuration, Sequence[Event]], bool]
"""Whether a life fails in the way that is looked for."""

T = TypeVar("T")


def shrink(
    configuration: Configuration, story: Sequence[Event], fails: Failing, seconds: float = 30.0
) -> tuple[Configuration, list[Event]]:
    """The smallest failing life that is found in so many seconds.

    Events are left out by delta debugging; then what is left is made plainer, setting by setting
    and field by field, as long as something helps.
    """
    until = time.monotonic() + seconds
    best = configuration, list(story)

    def better(life: tuple[Configuration, list[Event]]) -> bool:
        nonlocal best
        if time.monotonic() > until or not fails(*life):
            return False
        best = life
        return True

    progress = True
    while progress and time.monotonic() < until:
        before = best
        _leave_out(best[1], lambda events: better((best[0], events)))
        for plainer in _plainer(best[0]):
            better((dataclasses.replace(best[0], **plainer), best[1]))
        for i in range(len(best[1])):
            for plainer in _plainer(best[1][i]):
                events = list(best[1])
                events[i] = dataclasses.replace(events[i], **plainer)
                better((best[0], events))
        progress = best != before
    return best


def _leave_out(events: list[T], still: Callable[[list[T]], bool]) -> None:
    """Delta debugging (ddmin, Zeller and Hildebrandt 2002) by leaving out runs of events."""
    size = max(len(events) // 2, 1)
    while True:
        at = 0
        while at < len(events):
            fewer = events[:at] + events[at + size :]
            if still(fewer):
                events = fewer
            else:
                at += size
        if size == 1:
            return
        size = max(size // 2, 1)


def _plainer(thing: Any) -> Iterator[dict[str, Any]]:
    """Fields of a configuration or an event with plainer values: all of them the default, or one of
    them, or a smaller one."""
    yield {
        f.name: f.default for f in dataclasses.fields(thing) if f.default is not dataclasses.MISSING
    }
    for field in dataclasses.fields(thing):
        value = getattr(thing, field.name)
        if value == field.default:
            continue
        if field.default is not dataclasses.MISSING:
            yield {field.name: field.default}
        if field.name != "name" and type(value) is int:
            yield from ({field.name: v} for v in (value // 2, value - 1) if 0 < v < value)
        if isinstance(value, tuple):
            yield from ({field.name: value[:i] + value[i + 1 :]} for i in range(len(value)))


def as_test(name: str, why: str, configuration: Configuration, story: Sequence[Event]) -> str:
    """A test to paste, which fails as this life did."""
    events = "".join(f"            {brief(event)},\n" for event in story)
    return (
        f"def test_{name}() -> None:\n"
        f'    """{why}"""\n'
        f"    live(\n        {brief(configuration)},\n        [\n{events}        ],\n    )\n"
    )


def brief(thing: Configuration | Event) -> str:
    """Its repr, without what is as ever."""
    given = ", ".join(
        f"{f.name}={getattr(thing, f.name)!r}"
        for f in dataclasses.fields(thing)
        if f.default is dataclasses.MISSING or getattr(thing, f.name) != f.default
    )
    return f"{type(thing).__name__}({given})"
