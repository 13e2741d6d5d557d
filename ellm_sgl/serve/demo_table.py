"""The demo's findings as a table, with what was avoided and what that cost in words."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ellm_sgl.serve.demo_report import DemoReport, ServerRun

_NOISE = 0.03
"""Speeds closer than this count as equal: one run each says no more."""
_QUIET_CORES = 0.1
"""Other programs that use less than this do not count."""


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
    return (
        "A request says how long its answer may be, not how long it will be, so stock SGLang "
        "admits requests on an estimate and retracts some when they outgrow it. (Here "
        f"{full} of {len(records)} answers went to their limit.) Its attention backend here is "
        f"{report.stock.attention}{_same_kernels(report)}."
    )


def _same_kernels(report: DemoReport) -> str:
    return ", with eLLM's C++ kernels" if report.stock.attention == "ellm_cpu" else ""


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
