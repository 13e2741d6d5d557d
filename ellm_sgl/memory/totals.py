"""What one server's memory has done since its start."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Totals:
    """Counters since start, in the units of their names."""

    evicted_units: int = 0
    saved_units: int = 0
    """Units copied to the host tier."""
    restored_units: int = 0
    relocated_units: int = 0
    """Units moved so that the memory behind them can be given back."""
    recomputed_tokens: int = 0
    recomputed_units: int = 0
    """Missing units whose KV steps computed again, also where it was not kept."""
    fetched_units: int = 0
    """Units streamed in from the host tier,"""
    fetched_ahead_units: int = 0
    """and those of them that came for requests paused for the step."""
    borrowed_units: int = 0
    """Units of the ring that fetched units pass through, summed over steps."""
    projected_units: int = 0
    """Fetched units that came as hidden states."""
    swap_stall_s: float = 0.0
    """Seconds that steps waited for units from the host tier."""
    retractions: int = 0
    pauses: int = 0
    """Times that a running request was paused."""
    page_table_s: float = 0.0
    """Seconds spent on bookkeeping: blocks and units found, given and freed, and steps planned."""
    _timed: bool = field(default=False, repr=False)

    @contextmanager
    def bookkeeping(self) -> Iterator[None]:
        """Counts the time of the work in this context; within another such context, once."""
        if self._timed:
            yield
            return
        self._timed, began = True, time.perf_counter()
        try:
            yield
        finally:
            self._timed = False
            self.page_table_s += time.perf_counter() - began
