"""What was measured, round by round, and what it says: medians, paired ratios, intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

CONFIDENCE = 0.95
SAME_OUTPUT = "same_output"
"""Figure: share of the requests whose tokens are those of the reference in the same round."""


class MeasurementError(RuntimeError):
    """A load never brought about what was to be measured; the message says what that was."""


@dataclass(frozen=True)
class Taken:
    """One measurement, as a scenario hands it in."""

    figures: Mapping[str, float]
    outputs: Sequence[Sequence[int]] = ()
    """Token ids by request; compared with the reference's and then forgotten."""
    detail: Any = None
    """What else belongs in the JSON document."""


@dataclass(frozen=True)
class Sample:
    """One measurement: which load, which setting, which round."""

    cell: Any
    setting: str
    round: int
    figures: Mapping[str, float]
    detail: Any = None


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % confidence interval."""

    mean: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Interval:
        """Student's t; needs two values."""
        from scipy import stats  # takes a second, which `--help` need not

        mean, error = statistics.fmean(values), float(stats.sem(values))
        half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * error
        return Interval(mean, mean - half, mean + half)


@dataclass(frozen=True)
class Ratio:
    """One figure of a setting over that of another, in every round that both were measured in."""

    by_round: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.by_round)

    @cached_property
    def interval(self) -> Interval | None:
        """Of the geometric mean: ratios spread evenly in their logarithm. None of a single round,
        and where a ratio has none."""
        if len(self.by_round) < 2 or not all(0 < r < math.inf for r in self.by_round):
            return None
        found = Interval.of(np.log(self.by_round).tolist())
        return Interval(*map(math.exp, (found.mean, found.low, found.high)))

    def to_json(self) -> dict[str, Any]:
        interval = self.interval
        bounds = None if interval is None else [interval.low, interval.high]
        return {"median": self.median, "interval": bounds, "by_round": list(self.by_round)}


@dataclass(frozen=True)
class Result:
    """All samples of a scenario, in the order in which they were taken."""

    samples: tuple[Sample, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What the scenario found besides, while its servers still stood."""

    @property
    def settings(self) -> set[str]:
        return {s.setting for s in self.samples}

    def of(self, cell: Any, setting: str) -> list[Sample]:
        """Its samples, by round."""
        found = [s for s in self.samples if s.cell == cell and s.setting == setting]
        return sorted(found, key=lambda s: s.round)

    def values(self, cell: Any, setting: str, figure: str) -> list[float]:
        return [s.figures[figure] for s in self.of(cell, setting)]

    def median(self, cell: Any, setting: str, figure: str) -> float:
        return statistics.median(self.values(cell, setting, figure))

    def ratio(self, cell: Any, setting: str, other: str, figure: str) -> Ratio:
        """Paired within rounds; a figure of 0 counts as next to nothing."""
        pairs = zip(self.of(cell, setting), self.of(cell, other), strict=True)
        return Ratio(tuple(a.figures[figure] / max(b.figures[figure], 1e-9) for a, b in pairs))
