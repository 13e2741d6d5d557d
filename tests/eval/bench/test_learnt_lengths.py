"""Lengths learnt on one half of a trace and used on the other, simulated."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from ellm_sgl.client.traces import AZURE_COLUMNS
from ellm_sgl.client.workloads import LENGTHS, drawn
from ellm_sgl.eval.bench.result import Result
from ellm_sgl.eval.bench.runner import run
from ellm_sgl.eval.bench.scenario import Setting
from ellm_sgl.eval.bench.scenarios.learnt_lengths import (
    NOTHING,
    ON_LINE,
    OTHER,
    SAME,
    Cell,
    LearntLengths,
)
from ellm_sgl.eval.simulator import Load, Settings, Simulation, preset
from ellm_sgl.eval.simulator.elastic import Elastic
from ellm_sgl.policies.lengths import Seen
from ellm_sgl.serve.cli import main

AZURE = Path(__file__).parents[4] / "shared" / "data" / "azure_conv_2023.csv"
BEGIN = datetime(2023, 11, 16, 18, 15)


def write(file: Path, answers: list[int]) -> str:
    """A trace of one request a second, with these answers."""
    rows = (f"{BEGIN + timedelta(seconds=i)},{100 + i},{n}" for i, n in enumerate(answers))
    file.write_text("\n".join([",".join(AZURE_COLUMNS), *rows, ""]))
    return str(file)


def test_each_half_is_served_from_another_place_by_what_the_other_says(tmp_path: Path) -> None:
    made = LearntLengths(trace=write(tmp_path / "trace.csv", [10] * 30 + [90] * 30), requests=20)
    first, again, second = (
        made.load(Cell(half, "loose"), seed)
        for half, seed in (("first", 0), ("first", 1), ("second", 0))
    )
    assert len(first.trace) == 20 and first.trace.at_s[0] == 0.0
    assert first.trace.prompt_tokens[0] == 100 and again.trace.prompt_tokens[0] == 109
    assert second.trace.prompt_tokens[0] == 130
    for one, lengths in ((first, {SAME: 10, OTHER: 90}), (second, {SAME: 90, OTHER: 10})):
        for name, answer in lengths.items():
            assert one.known[name].spent.sum() == 30 * (answer - 1)
            assert one.known[name].ended.sum() == 30
        assert one.known[NOTHING].spent.sum() == 0 and ON_LINE not in one.known
    tight = made.load(Cell("first", "tight"), 0)
    assert 0 < tight.slo_s < first.slo_s
    assert tight.trace.at_s.tolist() == first.trace.at_s.tolist()


def test_a_taught_server_plans_with_that_and_learns_nothing_more() -> None:
    requests = drawn(LENGTHS["sharegpt"], np.arange(20.0), np.random.default_rng(0))
    load, seen = Load.of(requests.scaled(lengths=0.1), 500), Seen.of(np.full(100, 50))
    simulation = Simulation(preset("llama3-8b"), Settings(lengths=seen), load)
    simulation.run()
    assert isinstance(simulation.mode, Elastic)
    assert simulation.mode.iteration.requests.answers.seen is seen


def test_too_short_a_trace_is_told(tmp_path: Path) -> None:
    trace = write(tmp_path / "trace.csv", [10] * 9)
    for given, problem in (
        (["--trace", trace], "9 requests; give --requests 4 or fewer"),
        (["--trace", str(tmp_path / "none.csv")], "none.csv"),
        ([], "give --trace FILE"),
    ):
        done = CliRunner().invoke(main, ["bench", "learnt-lengths", *given])
        assert done.exit_code != 0 and problem in done.stderr


@pytest.mark.slow
def test_a_run_has_every_setting(tmp_path: Path) -> None:
    trace = write(tmp_path / "trace.csv", [10] * 30 + [90] * 30)
    made = LearntLengths(rounds=1, trace=trace, requests=20)
    result = run(made, lambda _: None, lambda: None)
    for cell in made.cells():
        for setting in made.settings():
            assert result.median(cell, setting.name, "tokens_per_s") > 0


class Part(LearntLengths):
    def cells(self) -> tuple[Cell, ...]:
        return Cell("first", "tight"), Cell("second", "tight")

    def settings(self) -> Sequence[Setting]:
        return [Setting(name, "simulator") for name in (SAME, OTHER, ON_LINE)]


@pytest.mark.slow
@pytest.mark.skipif(not AZURE.exists(), reason="the public trace is not at hand")
def test_what_one_half_of_the_public_trace_teaches_serves_the_other() -> None:
    made = Part(rounds=1, trace=str(AZURE), requests=1500)
    result = run(made, lambda _: None, lambda: None)
    for cell in made.cells():
        for name in (OTHER, ON_LINE):
            assert ratio(result, cell, name) >= 0.97
            lost = result.median(cell, SAME, "tpot_attainment")
            assert result.median(cell, name, "tpot_attainment") >= lost - 0.02


def ratio(result: Result, cell: Cell, name: str) -> float:
    return result.ratio(cell, name, SAME, "slo_tokens_per_s").median
