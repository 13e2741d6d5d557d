"""Columns of a scenario's table: how a figure is summed up over rounds, and how it is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ellm_sgl.eval.bench.result import Interval, Ratio, Result


@dataclass(frozen=True)
class Column:
    """The median over rounds."""

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
        del other
        figures = (self.figure, *self.more)
        return "/".join(self.text(result.median(cell, setting, name)) for name in figures)


@dataclass(frozen=True)
class Mean(Column):
    """The mean over rounds, and half of its 95 % confidence interval."""

    def show(self, result: Result, cell: Any, setting: str, other: str | None) -> str:
        return self.interval(result.values(cell, setting, self.figure))

    def interval(self, values: list[float]) -> str:
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
        if ratio.interval is None:
            return self.text(ratio.median)
        low, high = ratio.interval.low, ratio.interval.high
        return f"{self.text(ratio.median)} [{self.text(low)}, {self.text(high)}]"


@dataclass(frozen=True)
class Table:
    """Text, ready for a terminal, a JSON document and the docs. Line breaks in headings are for
    the terminal."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @staticmethod
    def of_json(found: Mapping[str, Any]) -> Table:
        rows = tuple(tuple(map(str, row)) for row in found["rows"])
        return Table(str(found["title"]), tuple(map(str, found["headings"])), rows)
