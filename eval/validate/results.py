"""Predicted beside measured: errors, rankings, table."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from ellm_sgl.client.summary import Summary
from ellm_sgl.eval.validate.configurations import BY_MODE, Cell, Configuration
from ellm_sgl.latency import HardwareProfile

MEASURES: dict[str, Callable[[Summary], float]] = {
    "tokens_per_s": lambda s: s.tokens_per_s,
    "ttft": lambda s: s.ttft.mean,
    "tpot": lambda s: s.tpot.mean,
}
TIE = 0.1
"""Modes whose measured tokens/s differ by no more are as good as each other: the same run repeated
differs as much (docs/performance.md)."""


def mean_of(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each measure."""
    return {name: statistics.fmean(one[name] for one in found) for name in found[0]}


@dataclass(frozen=True)
class Comparison:
    """One configuration. Keys are those of `MEASURES`; seconds, or tokens per second."""

    configuration: Configuration
    replays: list[dict[str, float]]
    predicted: dict[str, float]
    given_steps: Sequence[dict[str, float]]
    """What would have been predicted of each replay, had it been known how much longer than the
    model says each of its steps would take: what is wrong then is not the
    noise of the machine's steps."""

    @property
    def measured(self) -> dict[str, float]:
        """Means over the replays."""
        return mean_of(self.replays)

    def errors(self) -> dict[str, float]:
        """|predicted - measured| / measured."""
        return _errors(self.predicted, self.measured)

    def errors_given_steps(self) -> dict[str, float]:
        """The mean over the replays, each beside its own prediction."""
        pairs = zip(self.given_steps, self.replays, strict=True)
        return mean_of([_errors(predicted, measured) for predicted, measured in pairs])

    def repeated(self) -> dict[str, float]:
        """How far one replay is from the mean of the others: the error of a prediction by doing
        it. Of two replays or more."""
        others = [self.replays[:i] + self.replays[i + 1 :] for i in range(len(self.replays))]
        pairs = zip(self.replays, others, strict=True)
        return mean_of([_errors(one, mean_of(rest)) for one, rest in pairs])


def _errors(predicted: dict[str, float], measured: dict[str, float]) -> dict[str, float]:
    return {name: abs(predicted[name] / m - 1) for name, m in measured.items()}


@dataclass(frozen=True)
class Ranking:
    """The modes of one cell, by tokens per second."""

    cell: Cell
    pairs: int
    """Of modes,"""
    apart: int
    """those of them that differ by more than `TIE` as measured,"""
    right: int
    """and those that are predicted as measured: in that order, or no further apart than `TIE`."""

    @property
    def correct(self) -> bool:
        return self.right == self.pairs


@dataclass(frozen=True)
class Validation:
    """All configurations of one model."""

    model_path: str
    hardware: HardwareProfile
    latency_model: float
    """MAPE of the fitted latency model over the steps it was fitted to."""
    request_s: float
    """What HTTP was found to take of a TTFT."""
    slownesses: Sequence[float]
    """What steps of the reference load took, each time it was run, in multiples of what the fitted
    latency model says. Their mean is what predictions are for."""
    comparisons: Sequence[Comparison]

    @property
    def errors(self) -> dict[str, Any]:
        return _errors_of(self.comparisons, self.latency_model)

    def rankings(self) -> list[Ranking]:
        """Of the modes, in each cell where there are several."""
        cells: dict[Cell, list[Comparison]] = {}
        for compared in self.comparisons:
            if compared.configuration in BY_MODE:
                cells.setdefault(compared.configuration.cell, []).append(compared)
        return [_ranking(cell, found) for cell, found in cells.items() if len(found) > 1]

    def to_json(self) -> dict[str, Any]:
        return {
            "model_path": self.model_path,
            "hardware": dataclasses.asdict(self.hardware),
            "request_s": self.request_s,
            "slownesses": self.slownesses,
            **self.errors,
            "rankings": [dataclasses.asdict(r) | {"correct": r.correct} for r in self.rankings()],
            "configurations": [
                dataclasses.asdict(c) | {"measured": c.measured} for c in self.comparisons
            ],
        }


def _ranking(cell: Cell, found: Sequence[Comparison]) -> Ranking:
    apart = right = 0
    pairs = list(itertools.combinations(found, 2))
    for one, two in pairs:
        if order := _order(one.measured, two.measured, TIE):
            apart += 1
            right += order == _order(one.predicted, two.predicted, tie=0.0)
        else:
            right += _order(one.predicted, two.predicted, TIE) == 0
    return Ranking(cell, len(pairs), apart, right)


def _order(one: dict[str, float], two: dict[str, float], tie: float) -> int:
    """Which has more tokens per second: 1 the first, -1 the second, 0 neither by more than `tie`,
    a share of the larger."""
    a, b = one["tokens_per_s"], two["tokens_per_s"]
    if abs(a - b) <= tie * max(a, b):
        return 0
    return 1 if a > b else -1


def overall(validations: Sequence[Validation]) -> dict[str, Any]:
    """All models in one document: the means over all configurations, and each model's own."""
    every = [c for v in validations for c in v.comparisons]
    rankings = [r for v in validations for r in v.rankings()]
    return {
        **_errors_of(every, statistics.fmean(v.latency_model for v in validations)),
        "configurations": len(every),
        "rankings_correct": sum(r.correct for r in rankings),
        "rankings": len(rankings),
        "pairs": sum(r.pairs for r in rankings),
        "pairs_apart": sum(r.apart for r in rankings),
        "pairs_right": sum(r.right for r in rankings),
        "models": [v.to_json() for v in validations],
    }


def _errors_of(comparisons: Sequence[Comparison], latency_model: float) -> dict[str, Any]:
    """Means over configurations, by key of the JSON; `repeated`, how far a replay is from the
    others of its configuration, is None if each was but one."""
    repeated = [c.repeated() for c in comparisons if len(c.replays) > 1]
    return {
        "mape": mean_of([c.errors() for c in comparisons]) | {"latency_model": latency_model},
        "mape_given_steps": mean_of([c.errors_given_steps() for c in comparisons]),
        "repeated": mean_of(repeated) if repeated else None,
    }


def table(validation: Validation) -> Table:
    """Every configuration, measured / predicted."""
    drawn = Table(
        "configuration", box=box.SIMPLE, pad_edge=False,
        title=f"{validation.model_path}: measured / predicted on this machine",
    )  # fmt: skip
    for heading in ("tokens/s", "mean TTFT ms", "mean TPOT ms"):
        drawn.add_column(heading, justify="right", no_wrap=True)
    for c in validation.comparisons:
        m, p = c.measured, c.predicted
        drawn.add_row(
            str(c.configuration),
            f"{m['tokens_per_s']:.0f} / {p['tokens_per_s']:.0f}",
            f"{m['ttft'] * 1e3:.0f} / {p['ttft'] * 1e3:.0f}",
            f"{m['tpot'] * 1e3:.1f} / {p['tpot'] * 1e3:.1f}",
        )
    names = {
        "mape": "MAPE",
        "mape_given_steps": "MAPE given the steps' times",
        "repeated": "one replay by the others",
    }
    for key, errors in validation.errors.items():
        if errors is not None:
            drawn.add_row(names[key], *(f"{errors[name]:.1%}" for name in MEASURES))
    return drawn
