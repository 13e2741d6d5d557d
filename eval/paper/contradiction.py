"""A line of the report's table of contradictions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Contradiction:
    """One claim, and what it is against."""

    where: str
    said: str
    against: str
