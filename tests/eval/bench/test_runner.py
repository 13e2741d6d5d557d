"""Order, pairing and statistics of the harness, with a stand-in for what is measured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from scipy import stats

from ellm_sgl.client.process import ServerError
from ellm_sgl.eval.bench.report import document, plot
from ellm_sgl.eval.bench.result import (
    SAME_OUTPUT,
    Column,
    Interval,
    Mean,
    MeasurementError,
    Paired,
    Ratio,
    Result,
    Sample,
    Taken,
)
from ellm_sgl.eval.bench.runner import run
from ellm_sgl.eval.bench.scenario import Scenario, Setting


@dataclass(frozen=True)
class StandIn(Scenario):
    """No server: what is asked of it is written down, and `speeds` are told one by one."""

    rounds: int = 2
    speeds: tuple[float, ...] = ()
    events: list[str] = field(default_factory=list)

    columns = (
        Column("tokens/s", "speed"),
        Paired("of a", "speed"),
        Column("same", SAME_OUTPUT, "{:.0%}"),
    )
    against: ClassVar = {"b": "a"}
    reference = "a"
    cell_heading = "load"

    def starters(self) -> dict[str, Any]:
        return {"one": lambda: self._server("one"), "two": lambda: self._server("two")}

    @contextlib.contextmanager
    def _server(self, name: str) -> Iterator[str]:
        self.events.append(f"start {name}")
        try:
            yield name
        finally:
            self.events.append(f"stop {name}")

    def settings(self) -> list[Setting]:
        return [Setting("a", "one"), Setting("b", "two"), Setting("c", "two")]

    def cells(self) -> list[str]:
        return ["light", "heavy"]

    def load(self, cell: str, seed: int) -> str:
        return f"{cell} {seed}"

    def warm_up(self, name: str, server: str) -> None:
        self.events.append(f"warm {name}")

    def measure(self, server: str, setting: Setting, load: str) -> Taken:
        taken = sum(e.startswith("measure") for e in self.events)
        self.events.append(f"measure {setting.name} on {server}: {load}")
        outputs = [(1, 2), (3, 4)] if setting.name != "b" else [(1, 2), (3, 5)]
        return Taken({"speed": self.speeds[taken] if self.speeds else 1.0}, outputs)

    def finish(self, servers: Any, result: Result, say: Any) -> dict[str, Any]:
        assert self.events[-1].startswith("measure")
        return {"standing": sorted(servers), "samples": len(result.samples)}


class Anew(StandIn):
    anew = True


class ByCell(Anew):
    def lives(self) -> list[list[str]]:
        return [[cell] for cell in self.cells()]


class WarmedUp(StandIn):
    warm_up = Scenario.warm_up


def ran(scenario: StandIn) -> Result:
    advanced: list[None] = []
    result = run(scenario, lambda line: None, lambda: advanced.append(None))
    assert len(advanced) == len(result.samples)
    return result


def test_every_other_round_goes_in_reverse():
    result = ran(StandIn())
    order = [(s.round, s.cell, s.setting) for s in result.samples]
    assert order == [
        (number, cell, setting)
        for number, settings in ((0, "abc"), (1, "cba"))
        for cell in ("light", "heavy")
        for setting in settings
    ]


def test_groups_of_cells_have_servers_of_their_own():
    scenario = ByCell()
    result = ran(scenario)
    assert [e for e in scenario.events if e == "start one"] == ["start one"] * 4
    begun = [scenario.events[i + 1] for i, e in enumerate(scenario.events) if e == "warm two"]
    assert begun == [
        "measure a on one: light 0", "measure a on one: heavy 0",
        "measure c on two: light 1", "measure c on two: heavy 1",
    ]  # fmt: skip
    assert len(result.samples) == 12 and result.extra["samples"] == 12


def test_all_settings_of_a_round_get_the_same_load_on_their_own_server():
    scenario = StandIn()
    ran(scenario)
    assert "measure a on one: light 0" in scenario.events
    assert "measure c on two: heavy 1" in scenario.events
    assert sum(e.endswith("heavy 1") for e in scenario.events) == 3


def test_servers_are_warmed_up_once_and_stand_until_the_end():
    scenario = StandIn()
    result = ran(scenario)
    assert scenario.events[:4] == ["start one", "warm one", "start two", "warm two"]
    assert scenario.events[-2:] == ["stop two", "stop one"]
    assert sum(e.startswith("start") for e in scenario.events) == 2
    assert result.extra == {"standing": ["one", "two"], "samples": 12}


def test_servers_anew_are_those_of_one_round():
    scenario = Anew(rounds=3)
    result = ran(scenario)
    kinds = [e.split()[0] for e in scenario.events]
    once = ["start", "warm"] * 2 + ["measure"] * 6 + ["stop"] * 2
    assert kinds == once * 3
    assert result.extra["samples"] == 18, "asked once, of the last round's servers"


def test_warming_up_is_a_round_of_its_own_that_is_dropped():
    scenario = WarmedUp()
    result = ran(scenario)
    warm = [e for e in scenario.events if e.endswith(" 2")]
    assert len(warm) == 6 and len(result.samples) == 12
    assert scenario.events.index("measure b on two: light 2") > scenario.events.index("start two")


def test_what_a_cold_server_is_too_slow_for_is_no_error():
    class Cold(WarmedUp):
        def measure(self, server, setting, load):
            taken = super().measure(server, setting, load)
            if load.endswith(" 2"):
                raise MeasurementError("no step in which all requests decode")
            return taken

    assert len(ran(Cold()).samples) == 12
    with pytest.raises(MeasurementError, match="all requests decode"):
        ran(Cold(rounds=3))


def test_without_rounds_nothing_is_started():
    scenario = StandIn(rounds=0)
    assert ran(scenario) == Result() and scenario.events == []


@pytest.mark.parametrize("error", [ServerError("went away"), KeyboardInterrupt()])
def test_no_server_is_left_when_it_ends_early(error):
    class Ends(StandIn):
        def measure(self, server, setting, load):
            raise error

    scenario = Ends()
    with pytest.raises(type(error)):
        ran(scenario)
    assert scenario.events[-2:] == ["stop two", "stop one"]


def test_outputs_are_held_against_the_references_of_the_same_round():
    result = ran(StandIn())
    shares = {s.setting: s.figures[SAME_OUTPUT] for s in result.samples}
    assert shares == {"a": 1.0, "b": 0.5, "c": 1.0}


def test_without_the_reference_nothing_is_said_of_outputs():
    class Without(StandIn):
        def settings(self):
            return super().settings()[1:]

    scenario = Without()
    result = ran(scenario)
    assert not any(SAME_OUTPUT in s.figures for s in result.samples)
    assert [row[-1] for row in scenario.rows(result, "light")] == ["", ""]


def test_ratios_are_those_within_a_round():
    """The machine is twice as fast in the second round: the ratio is the same."""
    light, heavy = (10.0, 8.0, 1.0), (5.0, 6.0, 1.0)
    faster = tuple(2 * s for s in reversed(light)), tuple(2 * s for s in reversed(heavy))
    scenario = StandIn(speeds=(*light, *heavy, *faster[0], *faster[1]))
    result = ran(scenario)
    assert result.ratio("light", "b", "a", "speed").by_round == (0.8, 0.8)
    assert result.ratio("heavy", "b", "a", "speed").median == pytest.approx(1.2)
    (one, _), (table,) = document("x", scenario, result)["ratios"], scenario.tables(result)
    assert (one["setting"], one["against"], one["cell"]) == ("b", "a", "light")
    assert one["median"] == pytest.approx(0.8) and one["interval"] == pytest.approx([0.8, 0.8])
    assert table.rows[:2] == (
        ("light", "a", "15", "", ""), ("light", "b", "12", "0.80 [0.80, 0.80]", "50%"),
    )  # fmt: skip


def test_a_ratios_interval_is_students_of_its_logarithm():
    found = Ratio.of((0.5, 1.0, 2.0))
    logs = [-0.6931471805599453, 0.0, 0.6931471805599453]
    low, high = stats.t.interval(0.95, 2, loc=0.0, scale=stats.sem(logs))
    assert found.median == 1.0 and found.interval is not None
    assert found.interval[0] == pytest.approx(2.718281828459045**low)
    assert found.interval[1] == pytest.approx(2.718281828459045**high)


@pytest.mark.parametrize("by_round", [(1.2,), (0.0, 1.0), (float("inf"), 1.0)])
def test_what_has_no_interval_is_shown_without(by_round):
    assert Ratio.of(by_round).interval is None


def test_a_mean_is_shown_with_half_its_interval():
    samples = [Sample("", "a", n, {"speed": v}) for n, v in enumerate((1.0, 2.0, 3.0))]
    half = Interval.of([1.0, 2.0, 3.0]).high - 2.0
    column, result = Mean("x", "speed", "{:.2f}"), Result(tuple(samples))
    assert column.show(result, "", "a", None) == f"2.00 ± {half:.2f}"
    assert column.show(Result(tuple(samples[:1])), "", "a", None) == "1.00"


def test_a_plot_is_drawn_of_every_round(tmp_path):
    scenario = StandIn()
    plot(scenario, ran(scenario), tmp_path / "rounds.svg")
    drawn = (tmp_path / "rounds.svg").read_text()
    assert drawn.startswith("<?xml") and len(drawn) > 5000
