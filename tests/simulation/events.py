"""What happens in a life. An event that does not apply when its turn comes does nothing, so any
part of a life is a life.

Requests are named by number: the same request has the same name whatever else happens.
"""

from __future__ import annotations

from dataclasses import dataclass

EARLY, BETWEEN, LATE = 0, 2, 1_000_000
"""Patience of transfers: made at once, a little later, or when somebody cannot go on without."""


@dataclass(frozen=True)
class Step:
    """One turn of SGLang's loop, and what the scripted policy answers in it."""

    pause: tuple[int, ...] = ()
    """Requests that sit the step out, if they run."""
    ratio: float = 0.0
    """Share of their tokens that those who take part shall miss."""
    resting: float = 0.0
    """Likewise, those who are paused."""
    admitted: float = 0.0
    """Likewise, those admitted: the larger, the more are admitted."""
    admit: int | None = None
    """Most waiting requests that may be admitted; None: all."""
    reverse: bool = False
    """The last to arrive is admitted first."""
    recompute: int = 0
    """l2, of one layer fetched: 0, 1 or 2. φ = l2 / (1 + l2)"""
    patience: int = LATE


@dataclass(frozen=True)
class Arrive:
    """A request, or `n` samples of one prompt, named `name`, `name` + 1, ..."""

    name: int
    tokens: int
    """Length of the prompt."""
    output: int
    """Most tokens to generate."""
    family: int = 0
    """Whose first `shared` tokens the prompt begins with."""
    shared: int = 0
    follows: int | None = None
    """The request whose conversation the prompt goes on from, instead."""
    n: int = 1


@dataclass(frozen=True)
class Stop:
    """A request's next token is its last."""

    name: int


@dataclass(frozen=True)
class Abort:
    """The client of a request, or of all (None), has gone."""

    name: int | None


@dataclass(frozen=True)
class Flush:
    """POST /flush_cache: refused by SGLang unless nothing runs."""


@dataclass(frozen=True)
class Pause:
    """POST /pause_generation: `in_place`, or `retract` all that run."""

    mode: str = "in_place"


@dataclass(frozen=True)
class Resume:
    """POST /continue_generation."""


@dataclass(frozen=True)
class Resize:
    """The device pool is to have so many blocks; the machine has memory for `room` of them."""

    blocks: int
    room: int = 1_000_000


@dataclass(frozen=True)
class ClockJump:
    """The machine slept, or the clock was set: a step seems to have taken this long."""

    seconds: float


@dataclass(frozen=True)
class PolicyFails:
    """The policy's next answer is none."""

    how: str
    """`raises`, `nan`, `range` or `stall`."""


Event = Step | Arrive | Stop | Abort | Flush | Pause | Resume | Resize | ClockJump | PolicyFails
