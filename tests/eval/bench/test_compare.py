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
from ellm_sgl.eval.bench.comparison.contenders import EAGER, ELLM
from ellm_sgl.eval.bench.comparison.load import KNOWN, UNKNOWN, Cell
from ellm_sgl.eval.bench.comparison.report import AMPLE
from ellm_sgl.eval.bench.loads import LENGTHS
from ellm_sgl.eval.bench.report import document, plot, render
from ellm_sgl.eval.bench.result import Result, Sample
from ellm_sgl.eval.bench.runner import samples
from ellm_sgl.eval.bench.scenarios.compare import COUNTERS, Compare
from ellm_sgl.eval.paper.measured import read_measured
from ellm_sgl.serve.cli import main

CELL = Cell(3.0, KNOWN)
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.0000000,400,40
2023-11-16 18:15:48.0000000,800,80
2023-11-16 18:15:54.0000000,1200,160
2023-11-16 18:15:56.0000000,1200,160
"""
SCENARIO = Compare(requests=8, rounds=2, factors=(3.0,), outputs=(KNOWN,), tpot_slo_ms=50.0)


def test_the_load_exceeds_memory_by_the_factor_on_average() -> None:
    scenario = Compare(requests=60)
    for cell in (Cell(1.5, KNOWN), Cell(3.0, KNOWN)):
        needs = [
            sum(len(r.prompt) + r.output_tokens for r in scenario.load(cell, seed))
            for seed in range(20)
        ]
        mean = sum(needs) / len(needs)
        assert mean / scenario.sent.device_tokens == pytest.approx(cell.factor, rel=0.1)


@pytest.mark.parametrize(
    ("name", "requests", "output", "allowed", "seconds"),
    [("burst", 40, 600, 3000, 0.4), ("steady", 48, 300, 1024, 6.0)],
)
def test_a_named_load_is_cut_off_by_its_clients(
    name: str, requests: int, output: int, allowed: int, seconds: float
) -> None:
    scenario = Compare(preset=name)
    assert scenario.sent.device_tokens == 4992, "5,000 tokens, in whole blocks"
    (cell,) = scenario.cells()
    rounds = [scenario.load(cell, seed) for seed in range(50)]
    assert {len(load) for load in rounds} == {requests}
    every = [r for load in rounds for r in load]
    assert {(r.output_tokens, r.exact, r.tpot_slo_ms) for r in every} == {(allowed, False, 20.0)}
    taken = [r.stop_after or 0 for r in every]
    assert max(taken) <= allowed and sum(taken) / len(taken) == pytest.approx(output, rel=0.05)
    last = [load[-1].at_s for load in rounds]
    assert sum(last) / len(last) == pytest.approx(seconds, rel=0.1)


def test_options_change_the_load_that_is_named() -> None:
    changed = Compare(preset="burst", requests=8, factors=(2.0, 4.0), outputs=(KNOWN,),
                      tpot_slo_ms=30.0).sent  # fmt: skip
    assert (changed.cells(), changed.max_new_tokens) == ([(2.0, KNOWN), (4.0, KNOWN)], 3000)
    assert changed.device_tokens == 8 * (96 + 600) // 4 // 16 * 16
    assert {r.tpot_slo_ms for r in changed.drawn(changed.cells()[0], 0)} == {30.0}


def test_the_seed_is_of_the_first_round() -> None:
    assert dataclasses.replace(SCENARIO, seed=3).load(CELL, 0) == SCENARIO.load(CELL, 3)


def test_unknown_lengths_are_the_known_ones_that_clients_stop_at() -> None:
    known, unknown = (SCENARIO.load(Cell(3.0, outputs), seed=4) for outputs in (KNOWN, UNKNOWN))
    for a, b in zip(known, unknown, strict=True):
        assert (a.at_s, a.prompt, a.output_tokens) == (b.at_s, b.prompt, b.stop_after)
        assert b.output_tokens > a.output_tokens and a.exact and not b.exact
    assert SCENARIO.load(CELL, seed=4) == known and SCENARIO.load(CELL, seed=5) != known


def test_servers_share_every_argument_but_their_own() -> None:
    contenders = SCENARIO.contenders()
    baselines = ["hcache", "recompute", "stock", "swap"]
    assert list(contenders) == [
        ELLM,
        *(f"{b}{tuned}" for b in baselines for tuned in ("", " 0.3", " 0")),
    ]
    told = ("--ellm-tpot-slo-ms", "50.0")
    size = str(SCENARIO.sent.device_tokens)
    for name, (words, environment) in contenders.items():
        assert (told[0] in words) != name.startswith("stock")
        assert environment == (EAGER if name.endswith(" 0") else {})
        if name != ELLM:
            assert size in words and words[-2] == "--schedule-conservativeness"
        if name.endswith(" 0.3"):
            assert words == (*contenders[name.removesuffix(" 0.3")].arguments[:-1], "0.3")
    (swap,) = Compare(servers=("swap",)).contenders().values()
    assert told[0] not in swap.arguments, "there is none to tell"


def test_only_a_conservativeness_of_0_admits_whatever_prompt_fits() -> None:
    contenders = Compare(conservativeness=(0.0, 0.1)).contenders()
    eager = {name for name, contender in contenders.items() if contender.environment == EAGER}
    assert eager == {"hcache 0", "recompute 0", "stock 0", "swap 0"}
    assert len(contenders) == 9


def test_a_model_without_a_tokenizer_is_served_without_one(tmp_path: Path) -> None:
    scenario = Compare(model_path=str(tmp_path))
    words = [contender.arguments for contender in scenario.contenders().values()]
    assert all("--skip-tokenizer-init" in each for each in words)
    (tmp_path / "tokenizer.json").touch()
    words = [contender.arguments for contender in scenario.contenders().values()]
    assert not any("--skip-tokenizer-init" in each for each in words)


def outcome(seconds: float, tokens: int = 11) -> Outcome:
    times = [0.5 + seconds * i / (tokens - 1) for i in range(tokens)]
    request = Request(0.0, (1,), tokens, tpot_slo_ms=50.0)
    return Outcome(request, 0.0, times, list(range(tokens)), "length")


def run(server: str, seconds: tuple[float, float], number: int = 0) -> Sample:
    """Of two requests that take so long after their first token, which takes half a second."""
    counted = {"retracted": 1, "pauses": 2, "recomputed_tokens": 0, "fetched_units": 0,
               "swap_stall_ms": 0}  # fmt: skip
    taken = SCENARIO.taken([outcome(each) for each in seconds], counted)
    both = samples({AMPLE: taken, server: taken}, AMPLE, CELL, number)
    return next(sample for sample in both if sample.setting == server)


@pytest.fixture
def found() -> Result:
    """`recompute` has more tokens per second than `swap`, but none within the SLO."""
    runs = []
    for number in range(2):
        runs += [run(AMPLE, (0.2, 0.1), number), run(ELLM, (0.4, 0.2), number)]
        runs += [run("recompute", (1.2, 0.6), number), run("swap", (2.0, 0.4), number)]
    return Result(tuple(runs))


def test_a_run_counts_what_happened() -> None:
    one = run("swap", (1.0, 0.5))
    assert one.figures["preempted"] == 3
    assert one.figures["longest_pause_s"] == pytest.approx(0.1)
    attained = one.figures["tpot_attainment"]
    assert attained == 0.5, "100 ms per token is beyond the 50 ms, 50 ms is not"
    assert one.figures["slo_tokens_per_s"] == pytest.approx(11 / 1.5)
    assert one.figures["tokens_per_s"] == pytest.approx(22 / 1.5)
    assert one.figures["same_output"] == 1.0 and len(one.detail["tokens_at_s"]) == 22


def test_ellm_is_held_against_the_best_baseline_within_the_slo(found: Result) -> None:
    (ratios,) = SCENARIO.document(found)["ratios"]
    assert ratios["best"] == "swap"
    assert ratios["of_best"] == pytest.approx((22 / 0.9) / (11 / 2.5))
    assert ratios["tokens_per_s_of_best"] == pytest.approx(2.5 / 0.9)
    assert ratios["of_ample"] == pytest.approx(0.7 / 0.9)
    assert ratios["ttft_mean_of_best"] == pytest.approx(1.0)


def test_where_no_baseline_is_within_the_slo_the_fastest_is_the_best() -> None:
    slow = [run(ELLM, (0.4, 0.2)), run(AMPLE, (0.2, 0.1)), run("stock", (1.4, 0.7))]
    result = Result((*slow, run("recompute", (1.2, 0.6))))
    assert SCENARIO.document(result)["ratios"][0]["best"] == "recompute"


@pytest.mark.parametrize("only", [(ELLM, AMPLE), ("stock", "swap")])
def test_without_two_sides_nothing_is_compared(only: tuple[str, ...]) -> None:
    result = Result(tuple(run(name, (0.4, 0.2)) for name in only))
    assert SCENARIO.document(result)["ratios"] == []
    assert [table.title for table in SCENARIO.tables(result)] == [
        "3 x memory, output lengths known (medians of 2 rounds)"
    ]


def test_each_server_is_shown_once_ample_memory_first(found: Result) -> None:
    shown = [row[0] for row in SCENARIO.rows(found, CELL)]
    assert shown == [AMPLE, ELLM, "recompute", "swap"]


def test_table_plot_and_json(found: Result, tmp_path: Path) -> None:
    console = Console(width=80, record=True)
    for part in render(SCENARIO, found):
        console.print(part)
    text = console.export_text()
    assert "recompute" in text
    (best,) = SCENARIO.tables(found)[-1].rows
    assert best[:2] == (SCENARIO.title(CELL), "swap") and best[2].startswith("5.56 [")
    assert max(map(len, text.splitlines())) <= 80
    plot(SCENARIO, found, tmp_path / "series.png")
    assert (tmp_path / "series.png").stat().st_size > 1000
    said = json.loads(json.dumps(document("compare", SCENARIO, found)))
    assert len(said["runs"]) == 8
    assert {"scenario", "device_tokens", "runs", "ratios"} <= said.keys()
    run_keys = {"server", "baseline", "cell", "round", "summary", "preempted", "longest_pause_s",
                "recomputed_tokens", "fetched_units", "swap_stall_ms",
                "same_output"}  # fmt: skip
    assert all(run.keys() == run_keys for run in said["runs"])
    assert [run["baseline"] for run in said["runs"][:4]] == [False, False, True, True]
    (tmp_path / "compare.json").write_text(json.dumps(said))
    (gain,) = read_measured([tmp_path / "compare.json"]).gains
    assert gain.best == "swap" and gain.slo_tokens_per_s == pytest.approx(5.556, rel=1e-3)


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


def test_a_server_that_failed_some_requests_is_no_measure(found: Result) -> None:
    """It had less to do: here it is the fastest within the SLO."""
    lost = SCENARIO.taken(
        [outcome(0.2), Outcome(outcome(0.2).request, 0.0, [], [], "HTTP 400")],
        dict.fromkeys(("retracted", "pauses", *COUNTERS), 0),
    )
    (broken,) = samples({"stock": lost}, None, CELL, 0)
    result = Result((*found.samples, broken))
    assert result.median(CELL, "stock", "slo_tokens_per_s") > 11
    assert SCENARIO.document(result)["ratios"][0]["best"] == "swap"
    assert SCENARIO.notes(result) == [
        "requests that failed: 1 of stock; ratios leave out loads with any"
    ]
    assert SCENARIO.notes(found) == []
    ours = samples({ELLM: lost}, None, CELL, 2)
    assert SCENARIO.document(Result((*found.samples, *ours)))["ratios"] == []
