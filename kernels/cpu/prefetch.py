"""How a decode row asks for KV before it reads it: a hint and a distance."""

from __future__ import annotations

import os
from typing import NamedTuple

HINTS = ("t0", "t1", "t2", "nta")
"""x86's prefetch hints, as attention.h numbers them."""

MOST_STEPS = 4
"""`kMostStepsAhead`."""

VARIABLE = "ELLM_SGL_CPU_PREFETCH"
"""Environment: the choice, instead of measuring: `none`, or as `t1:2`."""


class Prefetch(NamedTuple):
    """A hint, and how many steps of 32 tokens before reading them they are asked for; 0: never."""

    hint: str
    steps: int

    @property
    def numbers(self) -> tuple[int, int]:
        """As the library has it."""
        return HINTS.index(self.hint), self.steps

    def __str__(self) -> str:
        return f"{self.hint}:{self.steps}" if self.steps else "none"


NONE = Prefetch("t0", 0)
DEFAULT = Prefetch("t0", 1)
"""Where nothing was measured."""

CANDIDATES = tuple(
    dict.fromkeys([DEFAULT, NONE, *(Prefetch(hint, steps) for hint in HINTS for steps in (1, 2))])
)
"""What is measured for decode rows,"""
OF_WEIGHTS = (DEFAULT, NONE, *(Prefetch(hint, 2) for hint in HINTS))
"""and for weights: further ahead is no faster, and nearer slower where rows of them are short."""


def parse(text: str) -> Prefetch:
    """What `VARIABLE` says.

    Raises:
        ValueError: it is none of the choices.
    """
    if text == "none":
        return NONE
    hint, _, steps = text.partition(":")
    if hint in HINTS and steps in map(str, range(1, MOST_STEPS + 1)):
        return Prefetch(hint, int(steps))
    raise ValueError(
        f"{VARIABLE}={text}: give none, or one of {', '.join(HINTS)} with a distance of 1 to "
        f"{MOST_STEPS} steps, as t1:2; or leave it out to have it measured"
    )


def from_environment() -> Prefetch | None:
    """What the environment says; None: nothing."""
    text = os.environ.get(VARIABLE)
    return parse(text) if text else None
