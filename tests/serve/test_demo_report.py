"""The demo's figures, table and JSON, from recorded streams; no server."""

from __future__ import annotations

import dataclasses
import io
import json
from typing import Any

import pytest
from rich.console import Console

from ellm_sgl.serve.chat_load import ChatStream, LoadStatistics
from ellm_sgl.serve.demo_report import DemoReport, Restoration, ServerRun, render, summary


def stream(
    *arrivals_s: float, text: str = "text", sent_s: float = 10.0, finish: str = "length"
) -> ChatStream:
    """A stream of one token per arrival."""
    return ChatStream(
        topic="zip",
        text=text,
        sent_s=sent_s,
        arrivals_s=[*arrivals_s],
        prompt_tokens=128,
        output_tokens=len(arrivals_s),
        finish=finish,
    )


def a_run(name: str, *records: ChatStream, **more: Any) -> ServerRun:
    run = ServerRun(
        name,
        pool_tokens=96,
        records=records,
        retractions=0,
        start_s=12.0,
        other_cores=0.0,
        attention="ellm_cpu",
    )
    return dataclasses.replace(run, **more)


@pytest.fixture
def report() -> DemoReport:
    """Two streams of three tokens; stock retracts one of them in the small pool."""
    quick, late = stream(10.5, 10.6, 10.7), stream(11.0, 11.1, 11.2, text="other")
    paused = stream(11.0, 11.1, 14.0, text="other")
    restoration = Restoration(
        evicted_units=4,
        restored_units=2,
        recomputed_tokens=1234,
        fetched_units=5678,
        lowest_cached_ratio=0.75,
        integrity="ok",
    )
    return DemoReport(
        ample=a_run("stock, ample", quick, late, pool_tokens=768),
        stock=a_run("stock, small", quick, paused, retractions=1),
        ellm=a_run("eLLM, small", quick, late, restoration=restoration),
        seconds=90.0,
    )


def printed(report: DemoReport, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(render(report))
    return out.getvalue()


def test_figures_of_a_stream() -> None:
    record = stream(10.5, 10.6, 11.6, 11.7)
    assert record.ttft_s == pytest.approx(0.5)
    assert record.tpot_s == pytest.approx(0.4)
    assert record.longest_pause_s == pytest.approx(1.0)
    assert record.complete


def test_tpot_counts_tokens_not_pieces() -> None:
    together = dataclasses.replace(stream(10.0, 12.0), output_tokens=5)
    assert together.tpot_s == pytest.approx(0.5)


def test_figures_of_a_stream_without_tokens_are_unknown() -> None:
    record = stream(finish="APIConnectionError: gone")
    assert (record.ttft_s, record.tpot_s, record.longest_pause_s) == (None, None, None)
    assert not record.complete
    assert stream(11.0).tpot_s is None and stream(11.0).longest_pause_s is None


def test_figures_of_a_load() -> None:
    found = LoadStatistics.of([stream(10.5, 10.6, 10.7), stream(12.0, 12.4, 13.0, sent_s=11.0)])
    assert found.seconds == pytest.approx(3.0)
    assert found.output_tokens_per_s == pytest.approx(2.0)
    assert found.ttft_mean_s == pytest.approx(0.75)
    assert found.ttft_p99_s == pytest.approx(0.995)
    assert found.tpot_mean_ms == pytest.approx(300)
    assert found.longest_pause_s == pytest.approx(0.6)


def test_figures_of_a_load_that_failed() -> None:
    found = LoadStatistics.of([stream(finish="gone")])
    assert found.output_tokens_per_s == 0
    assert found.ttft_mean_s is None and found.longest_pause_s is None


def test_a_retraction_of_stock_is_a_finding_not_a_failure(report: DemoReport) -> None:
    assert report.ok and report.identical == 2
    aborted = dataclasses.replace(report.stock, records=(stream(finish="abort"),) * 2)
    without = dataclasses.replace(report, stock=aborted)
    assert without.ok
    assert "stock SGLang completed only 0 chats" in summary(without)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"text": "texT"}, "the output differs"),
        ({"output_tokens": 4}, "the output differs"),
        ({"finish": "abort"}, "not complete (abort)"),
    ],
)
def test_a_changed_or_cut_output_is_a_failure(
    report: DemoReport, change: dict[str, Any], told: str
) -> None:
    first, second = report.ellm.records
    changed = dataclasses.replace(
        report.ellm, records=(first, dataclasses.replace(second, **change))
    )
    broken = dataclasses.replace(report, ellm=changed)
    assert not broken.ok
    assert told in printed(broken)
    assert "outputs identical: 1/2" in printed(broken)


def test_a_broken_page_table_is_a_failure(report: DemoReport) -> None:
    assert report.ellm.restoration is not None
    bad = dataclasses.replace(report.ellm.restoration, integrity="unit 7 is owned twice")
    broken = dataclasses.replace(report, ellm=dataclasses.replace(report.ellm, restoration=bad))
    assert not broken.ok
    assert "unit 7 is owned twice" in printed(broken)


def test_json_holds_every_figure(report: DemoReport) -> None:
    document = json.loads(json.dumps(report.to_json()))
    assert document["ok"] is True
    assert (document["streams"], document["outputs_identical"]) == (2, 2)
    assert document["needed_tokens"] == 2 * (128 + 3)
    assert [run["name"] for run in document["runs"]] == [
        "stock, ample",
        "stock, small",
        "eLLM, small",
    ]
    ample, stock, ellm = document["runs"]
    assert stock["retractions"] == 1 and ellm["retractions"] == 0
    assert stock["longest_pause_s"] == pytest.approx(2.9)
    assert stock["restoration"] is None and ellm["restoration"]["recomputed_tokens"] == 1234
    assert ample["completed"] == ellm["identical_to_reference"] == 2
    figures = {field.name for field in dataclasses.fields(LoadStatistics)}
    assert all(figures <= run.keys() for run in document["runs"])


@pytest.mark.parametrize("width", [80, 120])
def test_table_is_whole(report: DemoReport, width: int) -> None:
    text = printed(report, width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    (stock,) = [line for line in text.splitlines() if line.strip().startswith("stock, small")]
    assert stock.split()[-4:] == ["2.90", "1", "2/2", "2/2"]
    assert "outputs identical: 2/2" in text


def test_summary_tells_cost_and_gain(report: DemoReport) -> None:
    text = summary(report)
    assert "eLLM was 233% faster than stock SGLang" in text
    assert "evicted 4 units" in text and "recomputed 1,234 tokens beside the 6 it wrote" in text
    assert "Retractions: 0 instead of 1." in text
    assert "0.10 s instead of 2.90 s" in text
    assert "a few per cent are noise" in text


def test_summary_says_so_where_ellm_is_slower(report: DemoReport) -> None:
    swapped = dataclasses.replace(
        report,
        stock=report.ample,
        ellm=dataclasses.replace(report.ellm, records=report.stock.records),
    )
    assert "eLLM was 70% slower than stock SGLang" in summary(swapped)


def test_summary_says_so_where_nothing_was_evicted(report: DemoReport) -> None:
    idle = Restoration(0, 0, 0, 0, 1.0, "ok")
    calm = dataclasses.replace(
        report, stock=report.ample, ellm=dataclasses.replace(report.ellm, restoration=idle)
    )
    assert "eLLM was as fast as stock SGLang; everything fitted" in summary(calm)


def test_summary_warns_of_a_busy_machine(report: DemoReport) -> None:
    busy = dataclasses.replace(report, stock=dataclasses.replace(report.stock, other_cores=0.84))
    assert "other programs kept cores busy meanwhile" in summary(busy)
    assert "0.8 (stock, small)" in summary(busy)
