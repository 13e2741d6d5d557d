"""The comparison's load and ratios; servers themselves are tested in tests/e2e."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from ellm_sgl.client.replay import Outcome, Request
from ellm_sgl.client.traces import TraceError
from ellm_sgl.eval.bench.loads import LENGTHS
from ellm_sgl.eval.bench.report import document, plot, render
from ellm_sgl.eval.bench.result import Result, Sample
from ellm_sgl.eval.bench.runner import samples
from ellm_sgl.eval.bench.scenarios.compare import AMPLE, ELLM, KNOWN, UNKNOWN, Cell, Compare
from ellm_sgl.serve.cli import main

CELL = Cell(3.0, KNOWN)
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.0000000,400,40
2023-11-16 18:15:48.0000000,800,80
2023-11-16 18:15:54.0000000,1200,160
2023-11-16 18:15:56.0000000,1200,160
"""
SCENARIO = Compare(requests=8, rounds=2, factors=(3.0,), outputs=(KNOWN,))


def test_the_load_exceeds_memory_by_the_factor_on_average() -> None:
    scenario = Compare(requests=60)
    for cell in (Cell(1.5, KNOWN), Cell(3.0, KNOWN)):
        needs = [
            sum(len(r.prompt) + r.output_tokens for r in scenario.load(cell, seed))
            for seed in range(20)
        ]
        mean = sum(needs) / len(needs)
        assert mean / scenario.device_tokens == pytest.approx(cell.factor, rel=0.1)


def test_unknown_lengths_are_the_known_ones_that_clients_stop_at() -> None:
    known, unknown = (SCENARIO.load(Cell(3.0, outputs), seed=4) for outputs in (KNOWN, UNKNOWN))
    for a, b in zip(known, unknown, strict=True):
        assert (a.at_s, a.prompt, a.output_tokens) == (b.at_s, b.prompt, b.stop_after)
        assert b.output_tokens > a.output_tokens and a.exact and not b.exact
    assert SCENARIO.load(CELL, seed=4) == known and SCENARIO.load(CELL, seed=5) != known


def test_servers_share_every_argument_but_their_own() -> None:
    contenders = SCENARIO.contenders()
    names = [ELLM, "hcache", "recompute", "recompute 0.3", "stock", "stock 0.3", "swap"]
    assert list(contenders) == names
    assert contenders["recompute 0.3"][: len(contenders["recompute"])] == contenders["recompute"]
    size = str(SCENARIO.device_tokens)
    assert all(size in arguments for name, arguments in contenders.items() if name != ELLM)
    assert list(Compare(servers=("swap",)).contenders()) == ["swap"]


def test_a_model_without_a_tokenizer_is_served_without_one(tmp_path: Path) -> None:
    scenario = Compare(model_path=str(tmp_path))
    assert all("--skip-tokenizer-init" in words for words in scenario.contenders().values())
    (tmp_path / "tokenizer.json").touch()
    assert not any("--skip-tokenizer-init" in words for words in scenario.contenders().values())


def outcome(seconds: float, tokens: int = 11) -> Outcome:
    times = [0.5 + seconds * i / (tokens - 1) for i in range(tokens)]
    return Outcome(Request(0.0, (1,), tokens), 0.0, times, list(range(tokens)), "length")


def run(server: str, seconds: float, number: int = 0) -> Sample:
    counted = {"retracted": 1, "pauses": 2, "recomputed_tokens": 0, "fetched_units": 0,
               "swap_stall_ms": 0}  # fmt: skip
    taken = SCENARIO.taken([outcome(seconds), outcome(seconds / 2)], counted)
    (sample,) = samples({server: taken}, AMPLE, CELL, number)
    return sample


@pytest.fixture
def found() -> Result:
    runs = []
    for number in range(2):
        runs += [run(AMPLE, 0.5, number), run(ELLM, 1.0, number)]
        runs += [run("recompute", 3.0, number), run("swap", 2.0, number)]
    return Result(tuple(runs))


def test_a_run_counts_what_happened() -> None:
    one = run("swap", 1.0)
    assert one.figures["preempted"] == 3
    assert one.figures["longest_pause_s"] == pytest.approx(0.1)
    attained = one.figures["slo_attainment"]
    assert attained == 0.5, "100 ms per token is beyond the 50 ms, 50 ms is not"
    assert one.figures["same_output"] == 1.0 and len(one.detail["tokens_at_s"]) == 22


def test_ellm_is_held_against_the_best_baseline(found: Result) -> None:
    (ratios,) = SCENARIO.ratios(found)
    assert ratios["best"] == "swap"
    assert ratios["of_best"] == pytest.approx(2.5 / 1.5)
    assert ratios["of_ample"] == pytest.approx(1 / 1.5)
    assert ratios["tpot_p99_of_best"] == pytest.approx(0.5)


def test_each_server_is_shown_once_ample_memory_first(found: Result) -> None:
    shown = [row[0] for row in SCENARIO.rows(found, CELL)]
    assert shown == [AMPLE, ELLM, "recompute", "swap"]


def test_table_plot_and_json(found: Result, tmp_path: Path) -> None:
    console = Console(width=80, record=True)
    for part in render(SCENARIO, found):
        console.print(part)
    text = console.export_text()
    assert "recompute" in text and "1.67 x the tokens/s of swap" in text
    assert max(map(len, text.splitlines())) <= 80
    plot(SCENARIO, found, tmp_path / "series.png")
    assert (tmp_path / "series.png").stat().st_size > 1000
    said = json.loads(json.dumps(document("compare", SCENARIO, found)))
    assert len(said["runs"]) == 8
    assert {"scenario", "device_tokens", "runs", "ratios"} <= said.keys()
    run_keys = {"server", "baseline", "cell", "round", "summary", "slo_attainment", "preempted",
                "longest_pause_s", "recomputed_tokens", "fetched_units", "swap_stall_ms",
                "same_output"}  # fmt: skip
    assert all(run.keys() == run_keys for run in said["runs"])
    assert [run["baseline"] for run in said["runs"][:4]] == [False, False, True, True]


def test_a_server_that_does_not_exist_is_named() -> None:
    done = CliRunner().invoke(main, ["compare", "--servers", "ellm,vllm"])
    assert done.exit_code == 1 and "--servers vllm: give some of ellm, hcache" in done.output


def test_a_trace_is_scaled_to_the_machine(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(AZURE)
    scenario = Compare(requests=3, factors=(3.0,), trace=str(file))
    first = scenario.load(Cell(3.0, KNOWN), seed=0)
    tokens = [len(r.prompt) + r.output_tokens for r in first]
    mean = LENGTHS.prompt.mean + LENGTHS.output.mean
    assert sum(tokens) / 3 == pytest.approx(mean, rel=0.01)
    assert tokens[1] == pytest.approx(2 * tokens[0], rel=0.01)
    assert [r.at_s for r in first] == pytest.approx([0, 1 / 32, 1 / 8])  # 16 per second
    assert scenario.load(Cell(3.0, KNOWN), seed=1) != first
    with pytest.raises(TraceError, match="4 requests; give --requests 4 or fewer"):
        dataclasses.replace(scenario, requests=5).load(Cell(3.0, KNOWN), seed=0)


def test_a_trace_that_cannot_be_used_is_told_before_servers_start(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["compare", "--trace", str(tmp_path / "none.csv")])
    assert result.exit_code == 1
    assert "none.csv: cannot be read" in result.output
