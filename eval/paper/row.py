"""A line of the report's table."""

from __future__ import annotations

from dataclasses import dataclass

NOTHING = "–"


@dataclass(frozen=True)
class Row:
    """One figure of the paper's beside ours."""

    where: str
    quantity: str
    paper: float | None = None
    simulated: float | None = None
    measured: float | None = None
    why: str = ""
    unit: str = ""

    def cell(self, value: float | None) -> str:
        return NOTHING if value is None else f"{value:.3g}{self.unit}"

    def ratio(self, value: float | None) -> str:
        """Ours over the paper's."""
        if value is None or not self.paper:
            return ""
        return f"{value / self.paper:.2f}"


def percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def over(ours: float, theirs: float) -> float | None:
    """A ratio; None where there is nothing to compare with."""
    return ours / theirs if theirs else None


def times(ratio: float | None) -> str:
    """A ratio, in a sentence."""
    return NOTHING if ratio is None else f"{ratio:.2f}x"
