"""What came out: each run, and eLLM beside the best baseline and ample memory."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ellm_sgl.client.summary import Summary
from ellm_sgl.eval.compare.scenario import AMPLE, ELLM, Cell, Scenario

Figure = Callable[["Run"], float]


@dataclass(frozen=True)
class Run:
    """One load on one server."""

    server: str
    baseline: bool
    cell: Cell
    round: int
    summary: Summary
    slo_attainment: float
    """Share of the requests that completed within the scenario's two SLOs."""
    longest_pause_s: float
    """Between two tokens of one stream."""
    preempted: int
    """Retractions, and times that a running request began to sit out."""
    recomputed_tokens: int
    fetched_units: int
    swap_stall_ms: float
    """Time that steps waited for the host."""
    same_output: float
    """Share of the requests whose tokens are those of ample memory in the same round."""
    tokens_at_s: tuple[float, ...]
    """When each output token arrived, in seconds from the start of the load; ascending."""


@dataclass(frozen=True)
class Ratios:
    """eLLM in one cell: medians over rounds of ratios within each round."""

    cell: Cell
    best: str
    """The whole-request baseline with the highest median throughput."""
    of_best: float
    """Tokens per second over the best baseline's."""
    of_ample: float
    """Tokens per second over those with ample memory."""
    tpot_p99_of_best: float
    ttft_mean_of_best: float


@dataclass(frozen=True)
class Comparison:
    """All runs of a scenario."""

    scenario: Scenario
    runs: tuple[Run, ...]

    @property
    def servers(self) -> list[str]:
        return list(dict.fromkeys(run.server for run in self.runs))

    def of(self, cell: Cell, server: str) -> list[Run]:
        """Its runs, by round."""
        found = [r for r in self.runs if r.cell == cell and r.server == server]
        return sorted(found, key=lambda run: run.round)

    def median(self, cell: Cell, server: str, figure: Figure) -> float:
        return statistics.median(map(figure, self.of(cell, server)))

    def ratio(self, cell: Cell, other: str, figure: Figure) -> float:
        """eLLM's over another server's: the median over rounds of the ratio within each."""
        pairs = zip(self.of(cell, ELLM), self.of(cell, other), strict=True)
        return statistics.median(figure(a) / max(figure(b), 1e-9) for a, b in pairs)

    def ratios(self) -> list[Ratios]:
        """One entry per cell; empty where eLLM, or every baseline, was left out."""
        baselines = list(dict.fromkeys(r.server for r in self.runs if r.baseline))
        if ELLM not in self.servers or not baselines:
            return []
        found = []
        for cell in self.scenario.cells:
            speeds = {b: self.median(cell, b, tokens_per_s) for b in baselines}
            best = max(speeds, key=lambda name: speeds[name])
            found.append(
                Ratios(
                    cell=cell,
                    best=best,
                    of_best=self.ratio(cell, best, tokens_per_s),
                    of_ample=self.ratio(cell, AMPLE, tokens_per_s),
                    tpot_p99_of_best=self.ratio(cell, best, lambda r: r.summary.tpot.p99),
                    ttft_mean_of_best=self.ratio(cell, best, lambda r: r.summary.ttft.mean),
                )
            )
        return found

    def to_json(self) -> dict[str, Any]:
        """Without the arrival of every token."""
        runs = [dataclasses.asdict(run) for run in self.runs]
        for run in runs:
            del run["tokens_at_s"]
        return {
            "scenario": dataclasses.asdict(self.scenario),
            "device_tokens": self.scenario.device_tokens,
            "runs": runs,
            "ratios": [dataclasses.asdict(ratio) for ratio in self.ratios()],
        }


def tokens_per_s(run: Run) -> float:
    return run.summary.tokens_per_s


def in_order(comparison: Comparison, cell: Cell) -> Sequence[str]:
    """The servers of a cell, ample memory first."""
    servers = dict.fromkeys((AMPLE, *comparison.servers))
    return [s for s in servers if comparison.of(cell, s)]
