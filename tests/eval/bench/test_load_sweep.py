"""Intervals over seeds, the table and the plot; the sweep itself needs real servers."""

from __future__ import annotations

from typing import Any

import pytest
from scipy import stats

from ellm_sgl.eval.bench.report import document, plot
from ellm_sgl.eval.bench.result import Interval, Result, Sample, Taken
from ellm_sgl.eval.bench.scenario import Setting
from ellm_sgl.eval.bench.scenarios.load_sweep import SERVERS, LoadSweep

SWEEP = LoadSweep(rates=(2.0, 1.0))


def sweep() -> Result:
    samples = [
        Sample(rate, server, seed, {"slo_attainment": 1 / rate, "tokens_per_s": 100 * rate + seed,
                                    "ttft_mean": 0.1 * rate, "tpot_mean": 0.01})
        for server in SERVERS
        for rate in (1.0, 2.0)
        for seed in range(3)
    ]  # fmt: skip
    return Result(tuple(samples), {"ellm": (1.9, 2.0, 2.1), "stock": (1.0, 1.0, 1.3)})


def test_an_interval_is_students():
    found = Interval.of([1.0, 2.0, 4.0])
    low, high = stats.t.interval(0.95, 2, loc=7 / 3, scale=stats.sem([1.0, 2.0, 4.0]))
    assert found.low == pytest.approx(low) and found.high == pytest.approx(high)


def test_a_point_is_told_with_its_interval():
    found = sweep()
    assert SWEEP.cells() == [1.0, 2.0]
    assert Interval.of(found.values(2.0, "stock", "tokens_per_s")).mean == 201
    said = document("load-sweep", SWEEP, found)
    assert said["goodput"]["ellm"]["mean"] == pytest.approx(2.0)
    assert said["goodput"]["stock"]["by_seed"] == (1.0, 1.0, 1.3)
    (table,) = SWEEP.tables(found)
    cells = list(zip(*table.rows, strict=True))
    assert cells[0][-2:] == ("goodput", "goodput") and str(cells[2][-2]).startswith("2.00 ± 0.25")


def test_it_is_plotted(tmp_path):
    plot(SWEEP, sweep(), tmp_path / "sweep.svg")
    drawn = (tmp_path / "sweep.svg").read_text()
    assert drawn.startswith("<?xml") and len(drawn) > 10_000


NO_SERVER: Any = None


class Served(LoadSweep):
    """A stand-in for a server that meets all SLOs up to `most` requests per second, and none
    beyond: a load is its rate."""

    most = 0.0

    def load(self, cell, seed):
        return cell

    def measure(self, server, setting, load):
        return Taken({"slo_attainment": float(load <= self.most)})


def goodput_of(scenario: Served, result: Result) -> float:
    servers = dict.fromkeys(SERVERS, NO_SERVER)
    found = scenario.finish(servers, result, lambda line: None)
    assert found.keys() == SERVERS.keys() and len(found["ellm"]) == scenario.rounds
    return found["ellm"][0]


@pytest.mark.parametrize("most", [5.0, 8.9, 20.0])
def test_the_search_goes_beyond_the_sweep_where_it_must(most):
    scenario = Served(rounds=2, rates=(4.0, 9.0))
    object.__setattr__(scenario, "most", most)
    taken = {r: scenario.measure(NO_SERVER, Setting("ellm", "ellm"), r) for r in scenario.rates}
    samples = [Sample(rate, "ellm", 0, one.figures) for rate, one in taken.items()]
    assert most / 1.1 <= goodput_of(scenario, Result(tuple(samples))) <= most


def test_a_server_that_meets_no_slo_at_the_lowest_rate_has_no_goodput():
    assert goodput_of(Served(rounds=2, rates=(4.0, 9.0)), Result()) == 0.0
