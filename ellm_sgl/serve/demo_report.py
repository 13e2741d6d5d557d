"""What the demo found: figures, JSON, and a table with what was avoided and what that cost."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ellm_sgl.serve.chat_load import ChatStream, LoadStatistics

_NOISE = 0.03
"""Speeds closer than this count as equal: one run each says no more."""
_QUIET_CORES = 0.1
"""Other programs that use less than this do not count."""


@dataclass(frozen=True)
class Restoration:
    """What eLLM did to keep all requests running."""

    evicted_units: int
    restored_units: int
    recomputed_tokens: int
    """Summed over the steps: one missing token is recomputed in every step until it is back."""
    fetched_units: int
    """Copied back from host memory for a step, summed over the steps."""
    lowest_cached_ratio: float
    """Mean over the requests, at the tightest moment that was looked at."""
    integrity: str


@dataclass(frozen=True)
class ServerRun:
    """One server under the load."""

    name: str
    pool_tokens: int
    records: tuple[ChatStream, ...]
    retractions: int
    """As SGLang's own log counts them."""
    start_s: float
    """From the command to the first healthy answer."""
    other_cores: float
    """Cores that other programs kept busy meanwhile, on average."""
    attention: str
    """Whose attention ran: SGLang's name of the backend, or eLLM's."""
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
        lines = []
        for run in (self.ample, self.ellm):
            for chat in run.records:
                if not chat.complete:
                    lines.append(f"{run.name}, {chat.topic}: not complete ({chat.finish})")
        for ours, theirs in zip(self.ellm.records, self.ample.records, strict=True):
            if not ours.same_output(theirs):
                lines.append(
                    f"{self.ellm.name}, {ours.topic}: the output differs from the reference"
                )
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
        }

    def _run_json(self, run: ServerRun) -> dict[str, object]:
        names = ("name", "pool_tokens", "start_s", "other_cores", "attention")
        return {
            **{name: getattr(run, name) for name in names},
            **dataclasses.asdict(run.statistics),
            "retractions": run.retractions,
            "completed": run.completed,
            "identical_to_reference": run.identical(self.ample),
            "finish_reasons": [record.finish for record in run.records],
            "restoration": run.restoration and dataclasses.asdict(run.restoration),
        }


def render(report: DemoReport) -> RenderableType:
    """Table, explanation and verdict; fits 80 columns."""
    streams = len(report.ample.records)
    small, needed = report.ellm.pool_tokens, report.ample.needed_tokens
    title = Text(
        f"{streams} chats at once need {needed:,} tokens of KV; "
        f"the small pool holds {small:,} ({small / needed:.0%})"
    )
    table = Table(box=box.SIMPLE_HEAD, padding=0)
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
    failures = (Text(line, style="red") for line in report.failures())
    words = Text(f"{lengths(report)}\n\n{summary(report)}\n")
    return Group(title, table, words, verdict, *failures)


def lengths(report: DemoReport) -> str:
    """Why stock SGLang may have to retract."""
    records = report.ample.records
    full = sum(record.finish == "length" for record in records)
    same_kernels = ", with eLLM's C++ kernels" if report.stock.attention == "ellm_cpu" else ""
    return (
        "A request says how long its answer may be, not how long it will be, so stock SGLang "
        "admits requests on an estimate and retracts some when they outgrow it. (Here "
        f"{full} of {len(records)} answers went to their limit.) Its attention backend here is "
        f"{report.stock.attention}{same_kernels}."
    )


def summary(report: DemoReport) -> str:
    """What was avoided and what it cost, as measured."""
    ours, theirs = report.ellm, report.stock
    fast, stock = ours.statistics, theirs.statistics
    sentences = [
        f"With the same pool, {_speed(report)}{_cost(ours)}.",
        f"Retractions: {ours.retractions} instead of {theirs.retractions}.",
        f"Longest pause of a stream: {_number(fast.longest_pause_s, 2)} s instead of "
        f"{_number(stock.longest_pause_s, 2)} s.",
        f"p99 TPOT: {_number(fast.tpot_p99_ms, 0)} ms instead of "
        f"{_number(stock.tpot_p99_ms, 0)} ms.",
        _noise(report),
    ]
    return " ".join(sentences)


def _speed(report: DemoReport) -> str:
    ours, theirs = report.ellm.statistics, report.stock.statistics
    if report.stock.completed < len(report.stock.records):
        return f"stock SGLang completed only {report.stock.completed} chats"
    ratio = ours.output_tokens_per_s / theirs.output_tokens_per_s
    if abs(ratio - 1) <= _NOISE:
        return "eLLM was as fast as stock SGLang"
    return f"eLLM was {abs(ratio - 1):.0%} {'faster' if ratio > 1 else 'slower'} than stock SGLang"


def _cost(run: ServerRun) -> str:
    done = run.restoration
    if done is None or not done.evicted_units:
        return "; everything fitted, so eLLM evicted nothing"
    return (
        f"; eLLM evicted {done.evicted_units:,} units of KV (at the tightest, "
        f"{done.lowest_cached_ratio:.0%} of a request was cached on average), fetched units back "
        f"from host memory {done.fetched_units:,} times, and recomputed "
        f"{done.recomputed_tokens:,} tokens beside the {run.statistics.output_tokens:,} it wrote"
    )


def _noise(report: DemoReport) -> str:
    others = max(run.other_cores for run in report.runs)
    if others <= _QUIET_CORES:
        return "One run each: a few per cent are noise."
    each = ", ".join(f"{run.other_cores:.1f} ({run.name})" for run in report.runs)
    return f"Compare speeds with care: other programs kept cores busy meanwhile: {each}."


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
