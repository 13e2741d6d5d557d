"""How many requests kept their SLOs, by class of priority."""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

MOST_CLASSES = 16
"""Priorities that are told apart: the first that were seen. All others are one class."""
OTHER = "other"
TPOT, TTFT = "tpot", "ttft"


class Outcome(NamedTuple):
    """What is counted of an ended request: once per objective that it had."""

    priority: str
    """Its class: the priority, or `OTHER`."""
    objective: str
    """`TPOT` or `TTFT`."""
    met: bool


class Attainment:
    """Counts requests that ended by themselves; one that was aborted has no say."""

    def __init__(self) -> None:
        self.counts: Counter[Outcome] = Counter()
        self._classes: dict[int, str] = {}

    def ended(self, priority: int, objective: str, limit_s: float, measured_s: float) -> None:
        """A request has ended. Seconds; nothing is counted where it had no limit (inf), or too few
        tokens to measure (nan)."""
        if math.isfinite(limit_s) and math.isfinite(measured_s):
            self.counts[Outcome(self._class(priority), objective, measured_s <= limit_s)] += 1

    def _class(self, priority: int) -> str:
        if priority not in self._classes and len(self._classes) < MOST_CLASSES:
            self._classes[priority] = str(priority)
        return self._classes.get(priority, OTHER)
