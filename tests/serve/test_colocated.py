"""What `ellm-sgl demo --colocated` reports and draws."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from ellm_sgl.client.division import ALONE, HALVES, SHARED
from ellm_sgl.serve.chat_load import ChatStream
from ellm_sgl.serve.colocated_report import NAMES, ColocatedReport, Run, render
from ellm_sgl.serve.colocated_view import Moment, draw, view

MIB = 1 << 20


def stream(ttft_s: float, text: str = "Return a list.") -> ChatStream:
    made = ChatStream("str.split", text, 1.0, [1.0 + ttft_s, 3.0], 10, 9, "length")
    assert made.ttft_s == pytest.approx(ttft_s)
    return made


def run(name: str, ttft_s: float, most: int = 24) -> Run:
    bursts = ((stream(ttft_s), stream(0.1)), (stream(ttft_s),))
    return Run(name, (bursts, bursts), (most * MIB, most * MIB), (most + 2) * MIB, 0, "ok")


def report() -> ColocatedReport:
    runs = run(ALONE, 0.5), run(HALVES, 1.5, 14), run(SHARED, 0.5)
    return ColocatedReport(runs, 28 * MIB, 4 * MIB, 60.0)


def text_of(*parts: object, width: int = 80) -> str:
    screen = Console(file=io.StringIO(), width=width)
    for part in parts:
        screen.print(part)
    shown: str = screen.file.getvalue()  # type: ignore[attr-defined]
    return shown


def test_a_report_fits_80_columns_and_says_what_sharing_brought() -> None:
    found = report()
    shown = text_of(render(found))
    assert max(map(len, shown.splitlines())) <= 80 and "…" not in shown
    for text in (ALONE, HALVES, SHARED, *NAMES, "0.37/0.50", "1.03/1.50", "6/6",
                 "outputs identical in all three: 6/6", "28 MiB of KV"):  # fmt: skip
        assert text in shown, shown
    ratios = found.ratios()[0]
    assert ratios["ttft_p99_of_half"] == pytest.approx(1 / 3, abs=0.01)
    assert ratios["tokens_per_s_of_alone"] == 1.0
    document = found.to_json()
    assert document["ok"] is True and document["streams"] == 2
    assert set(document["ratios"]) == set(NAMES)  # type: ignore[call-overload]


def test_whatever_keeps_it_from_being_a_success_is_told() -> None:
    alone, halves, shared = report().runs
    other = (stream(0.5, "Nothing."), stream(0.1))
    cut = dataclasses.replace(other[1], finish="cut off")
    wrong = dataclasses.replace(
        shared, bursts=(((other[0], cut), shared.bursts[0][1]), shared.bursts[1]),
        most_together=29 * MIB, integrity="unit 3 is lost",
    )  # fmt: skip
    found = dataclasses.replace(report(), runs=(alone, halves, wrong))
    assert not found.ok
    assert found.failures() == [
        f"{SHARED}: 1 chats are not complete",
        f"{SHARED}: page table: unit 3 is lost",
        f"{SHARED}: 2 outputs differ from those of all memory",
        f"{SHARED}: {29 * MIB:,} bytes of {28 * MIB:,} committed",
    ]
    assert "cut off" not in text_of(render(found)) and "unit 3 is lost" in text_of(render(found))


def test_memory_is_drawn_over_time_at_a_height_that_stays() -> None:
    moment = Moment("burst 1/4, on model A", [stream(0.5)], [])
    heights = set()
    for memory in ([], [(4 * MIB, 24 * MIB)], [(4 * MIB, 24 * MIB), (28 * MIB, 0)] * 40):
        shown = text_of(draw(SHARED, dataclasses.replace(moment, history=memory), 28 * MIB))
        assert max(map(len, shown.splitlines())) <= 80
        heights.add(len(shown.splitlines()))
    assert heights == {len(shown.splitlines())}
    assert "28 MiB ▂█▂█" in shown and "▇▁▇▁" in shown and "1/1 complete" in shown


def test_plain_lines_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Console(file=io.StringIO(), force_terminal=False)
    monkeypatch.setattr("ellm_sgl.serve.colocated_view.PLAIN_EVERY_S", -1.0)
    with view(screen, SHARED, 28 * MIB) as show:
        show(Moment("burst 1/4, on model A", [stream(0.5)], [(4 * MIB, 24 * MIB)]))
    said = screen.file.getvalue()  # type: ignore[attr-defined]
    assert said.startswith(f"{SHARED}: burst 1/4, on model A: 1/1 complete, ")
    assert said.rstrip().endswith("model A 4 MiB, model B 24 MiB") and "\x1b" not in said
