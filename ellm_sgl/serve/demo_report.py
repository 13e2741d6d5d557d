"""What the demo found, as data, as JSON and as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ellm_sgl.serve.stream_record import LoadStatistics, StreamRecord

_NOISE = 0.03
"""Speeds closer than this count as equal: one run each says no more."""
_LENGTHS = (
    "As with any chat, a request says how long its answer may be, not how long it will be: stock "
    "SGLang admits requests on an estimate, and retracts some when they grow beyond it."
)


@dataclass(frozen=True)
class Restoration:
    """What eLLM did to keep all requests running."""

    evicted_units: int
    restored_units: int
    recomputed_tokens: int
    """Summed over the steps: one missing token is recomputed in every step until it is back."""
    lowest_cached_ratio: float
    """Mean over the requests, at the tightest moment that was looked at."""
    integrity: str


@dataclass(frozen=True)
class ServerRun:
    """One server under the load."""

    name: str
    pool_tokens: int
    records: tuple[StreamRecord, ...]
    retractions: int
    """As SGLang's own log counts them."""
    start_s: float
    """From the command to the first healthy answer."""
    restoration: Restoration | None = None
    """None for stock SGLang."""

    @property
    def statistics(self) -> LoadStatistics:
        return LoadStatistics.of(self.records)

    @property
    def completed(self) -> int:
        return sum(record.complete for record in self.records)

    @property
    def needed_tokens(self) -> int:
        """Tokens of KV that all requests together would hold at their ends."""
        return sum(r.prompt_tokens + r.output_tokens for r in self.records)

    def identical(self, reference: ServerRun) -> int:
        """How many answers are those of `reference`."""
        pairs = zip(self.records, reference.records, strict=True)
        return sum(ours.same_output(theirs) for ours, theirs in pairs)


@dataclass(frozen=True)
class DemoReport:
    """The same load on three servers, one after the other."""

    ample: ServerRun
    """Stock SGLang with room for everything: the reference for outputs."""
    stock: ServerRun
    """Stock SGLang with the small pool."""
    ellm: ServerRun
    """eLLM with the same small pool."""
    seconds: float
    """The whole demo."""

    @property
    def runs(self) -> tuple[ServerRun, ...]:
        return self.ample, self.stock, self.ellm

    @property
    def identical(self) -> int:
        """Answers of eLLM that equal the reference's."""
        return self.ellm.identical(self.ample)

    @property
    def ok(self) -> bool:
        """Every request ended as it should, and eLLM changed no output. (What stock SGLang does
        in a small pool is a finding, not a failure.)"""
        return not self.failures()

    def failures(self) -> list[str]:
        """What keeps the demo from being a success, a line each."""
        lines = [
            f"{run.name}, {record.topic}: not complete ({record.finish})"
            for run in (self.ample, self.ellm)
            for record in run.records
            if not record.complete
        ]
        lines += [
            f"{self.ellm.name}, {ours.topic}: the output differs from the reference"
            for ours, theirs in zip(self.ellm.records, self.ample.records, strict=True)
            if not ours.same_output(theirs)
        ]
        if self.ellm.restoration and self.ellm.restoration.integrity != "ok":
            lines.append(f"page table: {self.ellm.restoration.integrity}")
        return lines

    def to_json(self) -> dict[str, object]:
        """One JSON document's worth: everything but the texts."""
        return {
            "ok": self.ok,
            "streams": len(self.ample.records),
            "outputs_identical": self.identical,
            "needed_tokens": self.ample.needed_tokens,
            "pool_tokens": self.ellm.pool_tokens,
            "seconds": self.seconds,
            "runs": [self._run_json(run) for run in self.runs],
            "summary": summary(self),
        }

    def _run_json(self, run: ServerRun) -> dict[str, object]:
        return {
            "name": run.name,
            "pool_tokens": run.pool_tokens,
            "start_s": run.start_s,
            **dataclasses.asdict(run.statistics),
            "retractions": run.retractions,
            "completed": run.completed,
            "identical_to_reference": run.identical(self.ample),
            "finish_reasons": [record.finish for record in run.records],
            "restoration": run.restoration and dataclasses.asdict(run.restoration),
        }


def render(report: DemoReport) -> RenderableType:
    """The table and what to make of it; fits 80 columns."""
    streams = len(report.ample.records)
    small, needed = report.ellm.pool_tokens, report.ample.needed_tokens
    title = (
        f"{streams} chats at once need {needed:,} tokens of KV; "
        f"the small pool holds {small:,} ({small / needed:.0%})"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    table.add_column("server", no_wrap=True)
    for heading in (
        "output\ntokens/s", "TTFT s\nmean/p99", "TPOT ms\nmean/p99", "longest\npause s",
        "retrac-\ntions", "com-\nplete", "same\noutput",
    ):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    for run in report.runs:
        found = run.statistics
        table.add_row(
            run.name,
            f"{found.output_tokens_per_s:.0f}",
            f"{_number(found.ttft_mean_s, 1)}/{_number(found.ttft_p99_s, 1)}",
            f"{_number(found.tpot_mean_ms, 0)}/{_number(found.tpot_p99_ms, 0)}",
            _number(found.longest_pause_s, 2),
            str(run.retractions),
            f"{run.completed}/{streams}",
            "" if run is report.ample else f"{run.identical(report.ample)}/{streams}",
            style="bold" if run is report.ellm else "",
        )
    verdict = Text(
        f"outputs identical: {report.identical}/{streams}",
        style="bold green" if report.ok else "bold red",
    )
    return Group(
        table, Text(_LENGTHS), Text(""), Text(summary(report)), Text(""), verdict,
        *(Text(line, style="red") for line in report.failures()),
    )  # fmt: skip


def summary(report: DemoReport) -> str:
    """What was avoided and what it cost, as measured."""
    ours, theirs = report.ellm, report.stock
    fast, stock = ours.statistics, theirs.statistics
    return " ".join(
        filter(
            None,
            (
                f"With the same pool eLLM was {_speed(fast, stock)} stock SGLang{_cost(ours)}.",
                f"Retractions: {ours.retractions} instead of {theirs.retractions}.",
                _compare("Longest pause of a stream", fast, stock, _pause),
                _compare("p99 TPOT", fast, stock, _tpot_p99),
                "One run each: a few per cent are noise.",
            ),
        )
    )


def _speed(ours: LoadStatistics, theirs: LoadStatistics) -> str:
    if not theirs.output_tokens_per_s:
        return "compared with a run that produced nothing:"
    ratio = ours.output_tokens_per_s / theirs.output_tokens_per_s
    if abs(ratio - 1) <= _NOISE:
        return "as fast as"
    return f"{abs(ratio - 1):.0%} {'faster' if ratio > 1 else 'slower'} than"


def _cost(run: ServerRun) -> str:
    done = run.restoration
    if done is None or not done.evicted_units:
        return ": everything fitted, nothing was evicted"
    return (
        f": it evicted {done.evicted_units:,} units of KV (at the tightest, "
        f"{done.lowest_cached_ratio:.0%} of a request was cached on average) and recomputed "
        f"{done.recomputed_tokens:,} tokens beside the {run.statistics.output_tokens:,} it wrote"
    )


def _pause(statistics: LoadStatistics) -> str | None:
    seconds = statistics.longest_pause_s
    return None if seconds is None else f"{seconds:.2f} s"


def _tpot_p99(statistics: LoadStatistics) -> str | None:
    milliseconds = statistics.tpot_p99_ms
    return None if milliseconds is None else f"{milliseconds:.0f} ms"


def _compare(
    what: str,
    ours: LoadStatistics,
    theirs: LoadStatistics,
    figure: Callable[[LoadStatistics], str | None],
) -> str:
    a, b = figure(ours), figure(theirs)
    return f"{what}: {a} instead of {b}." if a and b else ""


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
