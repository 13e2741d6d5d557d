"""Intervals over seeds, the table and the plot; the sweep itself needs real servers."""

from __future__ import annotations

from typing import Any

import pytest
from scipy import stats

from ellm_sgl.eval.load_sweep import SERVERS, Experiment, Interval, Point, Sweep, plot, table


def sweep() -> Sweep:
    points = [
        Point(server, rate, seed, 1 / rate, 100 * rate + seed, 0.1 * rate, 0.01)
        for server in SERVERS
        for rate in (1.0, 2.0)
        for seed in range(3)
    ]
    return Sweep(tuple(points), {"ellm": (1.9, 2.0, 2.1), "stock": (1.0, 1.0, 1.3)})


def test_an_interval_is_students():
    found = Interval.of([1.0, 2.0, 4.0])
    low, high = stats.t.interval(0.95, 2, loc=7 / 3, scale=stats.sem([1.0, 2.0, 4.0]))
    assert found.low == pytest.approx(low) and found.high == pytest.approx(high)


def test_a_point_is_told_with_its_interval():
    found = sweep()
    assert found.rates == [1.0, 2.0]
    assert found.interval("stock", 2.0, "tokens_per_s").mean == 201
    assert found.to_json()["goodput"]["ellm"]["mean"] == pytest.approx(2.0)
    cells = [list(column.cells) for column in table(found).columns]
    assert cells[0][-2:] == ["goodput", "goodput"] and str(cells[2][-2]).startswith("2.00 ± 0.25")


def test_it_is_plotted(tmp_path):
    plot(sweep(), tmp_path / "sweep.svg")
    drawn = (tmp_path / "sweep.svg").read_text()
    assert drawn.startswith("<?xml") and len(drawn) > 10_000


NO_SERVER: Any = None


class Served(Experiment):
    """A server that meets all SLOs up to `most` requests per second, and none beyond."""

    most = 0.0

    def _point(self, server, name, rate, seed):
        return Point(name, rate, seed, float(rate <= self.most), 1.0, 1.0, 1.0)


@pytest.mark.parametrize("most", [5.0, 8.9, 20.0])
def test_the_search_goes_beyond_the_sweep_where_it_must(most):
    experiment = Served((4.0, 9.0), 2, 1, 1.0, 1.0)
    object.__setattr__(experiment, "most", most)
    points = [experiment._point(NO_SERVER, "ellm", rate, 0) for rate in experiment.rates]
    found = experiment._search(NO_SERVER, "ellm", 0, points, lambda line: None)
    assert most / 1.1 <= found <= most


def test_a_server_that_meets_no_slo_at_the_lowest_rate_has_no_goodput():
    experiment = Served((4.0, 9.0), 2, 1, 1.0, 1.0)
    assert experiment._search(NO_SERVER, "ellm", 0, [], lambda line: None) == 0.0
