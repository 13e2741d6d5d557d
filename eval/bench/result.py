"""What was measured, round by round; what it says: medians, paired ratios, intervals; and the
columns of the table that says it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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

    median: float
    interval: tuple[float, float] | None
    """Of the geometric mean, 95 %: ratios spread evenly in their logarithm. None of a single round,
    and where a ratio has none."""
    by_round: tuple[float, ...]

    @staticmethod
    def of(by_round: Sequence[float]) -> Ratio:
        interval = None
        if len(by_round) > 1 and all(0 < r < math.inf for r in by_round):
            found = Interval.of(np.log(by_round).tolist())
            interval = math.exp(found.low), math.exp(found.high)
        return Ratio(statistics.median(by_round), interval, tuple(by_round))


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
        own, others = (self.values(cell, name, figure) for name in (setting, other))
        return Ratio.of([a / max(b, 1e-9) for a, b in zip(own, others, strict=True)])


@dataclass(frozen=True)
class Column:
    """Of a scenario's table: the median over rounds."""

    heading: str
    figure: str
    form: str = "{:,.0f}"
    scale: float = 1.0
    more: tuple[str, ...] = ()
    """Other figures, shown in the same place after a stroke."""

    def text(self, value: float) -> str:
        return self.form.format(value * self.scale)

    def show(self, result: Result, cell: Any, setting: str, other: str | None) -> str:
        """The entry of a setting; `other` is the one that it is held against."""
        figures = (self.figure, *self.more)
        return "/".join(self.text(result.median(cell, setting, name)) for name in figures)


@dataclass(frozen=True)
class Mean(Column):
    """The mean over rounds, and half of its 95 % confidence interval."""

    def show(self, result: Result, cell: Any, setting: str, other: str | None) -> str:
        return self.interval(result.values(cell, setting, self.figure))

    def interval(self, values: Sequence[float]) -> str:
        if len(values) < 2:
            return self.text(values[0])
        found = Interval.of(values)
        return f"{self.text(found.mean)} ± {self.text(found.high - found.mean)}"


@dataclass(frozen=True)
class Paired(Column):
    """The median of the ratios within rounds to the setting it is held against, and the 95 %
    confidence interval of their geometric mean."""

    form: str = "{:.2f}"
    inverse: bool = False
    """The other's over its own."""

    def ratio(self, result: Result, cell: Any, setting: str, other: str) -> Ratio:
        pair = (other, setting) if self.inverse else (setting, other)
        return result.ratio(cell, *pair, self.figure)

    def show(self, result: Result, cell: Any, setting: str, other: str | None) -> str:
        if other is None:
            return ""
        ratio = self.ratio(result, cell, setting, other)
        bounds = "" if ratio.interval is None else f" [{', '.join(map(self.text, ratio.interval))}]"
        return self.text(ratio.median) + bounds


@dataclass(frozen=True)
class Table:
    """Text, ready for a terminal, a JSON document and the docs. Line breaks in headings are for
    the terminal."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
