"""Random stories: what clients, operators and the policy do to a server."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

from tests.simulation.configuration import Configuration
from tests.simulation.events import (
    BETWEEN,
    EARLY,
    LATE,
    Abort,
    Arrive,
    ClockJump,
    Event,
    Flush,
    Pause,
    PolicyFails,
    Resize,
    Resume,
    Step,
    Stop,
)

RATIOS = (0.0, 0.0, 0.3, 0.6)
ADMITTED = (0.0, 0.9, 0.95, 0.95)
RESTING = (0.0, 0.01, 0.5, 0.999, 0.999)
"""Targets of those who are paused: 0.999 gives all up, a lower one has it fetched ahead again."""


def draw(rng: random.Random, configuration: Configuration) -> list[Event]:
    """A story for this server: a few requests at first, then whatever comes."""
    return list(_Author(rng, configuration).story())


class _Author:
    def __init__(self, rng: random.Random, configuration: Configuration) -> None:
        self._rng = rng
        self._configuration = configuration
        self._known: list[int] = []
        """Names of the requests so far."""
        self._resting: tuple[int, ...] = ()
        self._step = Step(admitted=0.95)
        """At first all are admitted, and then they outgrow the device."""

    def story(self) -> Iterator[Event]:
        rng = self._rng
        arrivals = rng.uniform(0.05, 0.4)
        unrest = rng.choice([0.0, 0.05, 0.15])
        resizes = rng.choice([0.0, 0.0, 0.3])
        for _ in range(rng.randint(2, self._configuration.max_running + 1)):
            yield self._arrive()
        for turn in range(rng.randint(6, 20)):
            if rng.random() < arrivals:
                yield self._arrive()
            if self._known and rng.random() < 0.08:
                yield self._leave()
            if rng.random() < unrest:
                yield from self._upset()
            if rng.random() < resizes:
                yield self._resize()
            yield self._step if turn < 4 else self._next_step()
        if rng.random() < 0.85:
            yield Abort(None)

    def _arrive(self) -> Event:
        rng = self._rng
        name = self._known[-1] + 1 if self._known else 1
        block = self._configuration.block_tokens
        device = self._configuration.device_blocks * block
        tokens = rng.randint(1, max(device // 5, 2))
        if rng.random() < 0.1:
            tokens = rng.randint(1, device * 3 // 2)
        shared = rng.choice([0, 0, tokens])
        if rng.random() < 0.5:  # a system prompt
            shared = rng.choice([device // 4, device // 3])
            tokens = shared + rng.randint(1, 4)
        follows = rng.choice(self._known) if self._known and rng.random() < 0.2 else None
        n = rng.choice([2, 3]) if rng.random() < 0.12 else 1
        self._known += range(name, name + n)
        if follows is not None:
            tokens += device // 3
        output = rng.choice([0, 1, *(rng.randint(3, 14) for _ in range(6))])
        return Arrive(name, tokens, output, rng.choice([1, 1, 1, 2]), shared, follows, n)

    def _leave(self) -> Event:
        rng = self._rng
        name = rng.choice(self._known[-6:])
        return Stop(name) if rng.random() < 0.3 else Abort(name)

    def _upset(self) -> Iterator[Event]:
        rng = self._rng
        what = rng.randrange(6)
        if what == 0:
            yield Abort(None)
        elif what == 1:
            yield Abort(None)
            yield from (Step() for _ in range(rng.randint(1, 3)))
            yield Flush()
        elif what == 2:
            yield Pause(rng.choice(["in_place", "retract"]))
            yield from (Step() for _ in range(rng.randint(0, 2)))
            yield Resume()
        elif what == 3:
            yield ClockJump(rng.choice([0.1, 10.0, 1e6]))
        elif what == 4:
            yield PolicyFails(rng.choice(["raises", "nan", "range", "stall"]))
        else:
            yield Flush()

    def _resize(self) -> Event:
        rng, blocks = self._rng, self._configuration.most_blocks
        room = rng.choice([blocks // 2, blocks, blocks])
        return Resize(rng.choice([1, 2, rng.randint(1, blocks), blocks, blocks]), room)

    def _next_step(self) -> Step:
        """Much as the one before; now and then the policy changes its mind."""
        rng = self._rng
        if rng.random() < 0.5:
            return dataclasses.replace(self._step, resting=rng.choice(RESTING))
        if rng.random() < 0.6:
            share = rng.choice([0.0, 0.3, 0.5, 0.7])
            self._resting = tuple(name for name in self._known if rng.random() < share)
        self._step = Step(
            pause=self._resting,
            ratio=rng.choice(RATIOS),
            resting=rng.choice(RESTING),
            admitted=rng.choice(ADMITTED),
            admit=rng.choice([None, None, None, 0, 1, 2]),
            reverse=rng.random() < 0.2,
            recompute=rng.choice([0, 0, 1, 2]),
            patience=rng.choice([EARLY, BETWEEN, LATE, LATE]),
        )
        return self._step
