"""A clock that a life can repeat."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from unittest.mock import patch

from sglang.srt.mem_cache import radix_cache

from ellm_sgl.engine import policy_guard as asking
from ellm_sgl.memory import totals
from ellm_sgl.step.transfer import python as streamer

_READERS: tuple[ModuleType, ...] = (asking, totals, streamer, radix_cache)
"""Modules that look at the time; `Iteration` and `StepLog` are given theirs."""


class Clock:
    """Stands for the module `time`: it moves on by a tick whenever somebody looks.

    Args:
        tick_s: differs between ranks, as real clocks do.
    """

    def __init__(self, tick_s: float) -> None:
        self._now = 1000.0
        self._tick_s = tick_s

    def monotonic(self) -> float:
        self._now += self._tick_s
        return self._now

    perf_counter = monotonic

    def jump(self, seconds: float) -> None:
        self._now += seconds

    @contextmanager
    def running(self) -> Iterator[None]:
        """Everybody looks at this clock."""
        with ExitStack() as patches:
            for module in _READERS:
                patches.enter_context(patch.object(module, "time", self))
            yield
