"""Figures of a replay; those of a simulation are the same, made of the same tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from ellm_sgl.client.replay import Outcome, Request
from ellm_sgl.client.summary import Summary, summarize
from ellm_sgl.client.workloads import paper_workload
from ellm_sgl.eval.simulator import Load, Settings, Simulation, preset
from ellm_sgl.eval.simulator.report import sum_up


class Watched(Simulation):
    """Keeps the time of every token."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.token_s: list[list[float]] = [[] for _ in range(len(self.load))]

    def _tokens_came(self, ids: Any, ends: Any) -> None:
        super()._tokens_came(ids, ends)
        for request in ids.tolist():
            self.token_s[request] += ends.tolist()

    def outcome(self, request: int) -> Outcome:
        """Of a request that was sent when it arrived."""
        load, token_s = self.load, self.token_s[request]
        slos_ms = (1e3 * load.tpot_slo_s[request], 1e3 * load.ttft_slo_s[request])
        sent = Request(load.at_s[request], (1,), len(token_s), True, None, *slos_ms)
        return Outcome(sent, sent.at_s, token_s, finish="length")


def outcome(sent_s: float, token_s: list[float], tpot_slo_s: float | None = None) -> Outcome:
    slo = None if tpot_slo_s is None else tpot_slo_s * 1e3
    request = Request(sent_s, (1,), max(len(token_s), 1), tpot_slo_ms=slo, ttft_slo_ms=1e6)
    return Outcome(request, sent_s, token_s, finish="length" if token_s else "HTTP 400")


def close(a: Summary, b: Summary) -> None:
    for name, value in dataclasses.asdict(a).items():
        assert dataclasses.asdict(b)[name] == pytest.approx(value, nan_ok=True), name


def test_only_requests_within_their_tpot_slo_count_for_slo_tokens_per_s():
    fast, slow = outcome(0.0, [1.0, 2.0, 3.0], 1.5), outcome(0.0, [1.0, 3.0, 5.0], 1.5)
    found = summarize([fast, slow, outcome(0.0, [], 1.5), outcome(0.0, [2.0], 1.5)])
    assert (found.tokens_per_s, found.slo_tokens_per_s) == (7 / 5, 4 / 5)
    assert found.tpot_attainment == 0.5


def test_the_drain_tail_is_left_out_of_steady_tokens_per_s():
    found = summarize([outcome(1.0, [2.0, 3.0, 4.0, 11.0]), outcome(2.0, [3.0, 20.0])])
    assert found.tokens_per_s == 6 / 19  # from 1 s to 20 s
    assert found.steady_tokens_per_s == 3 / 2  # to the last first token, at 3 s


def test_nothing_served_is_no_tokens_per_second():
    for found in (summarize([]), summarize([outcome(1.0, [])])):
        assert found.tokens_per_s == found.steady_tokens_per_s == found.slo_tokens_per_s == 0.0
        assert found.tpot_attainment == 0.0


@pytest.mark.parametrize("mode", ["ellm", "recompute", "swap"])
def test_a_simulation_is_summed_up_as_a_replay_is(mode):
    trace = paper_workload("sharegpt", 30, 0, per_second=4.0).scaled(lengths=0.15)
    slos = np.tile([0.001, 1.0], 15)  # every other request misses its own
    load = dataclasses.replace(Load.of(trace, 500), tpot_slo_s=slos)
    machine = preset("llama3-8b").limited(3000, None)
    simulation = Watched(machine, Settings(mode, conservativeness=0.1), load)
    simulation.run()
    simulated = sum_up(simulation).summary
    assert 0 < simulated.slo_tokens_per_s < simulated.tokens_per_s
    assert simulated.steady_tokens_per_s != simulated.tokens_per_s
    assert simulated.tpot_attainment == 0.5
    seen = zip(load.at_s.tolist(), simulation.token_s, slos.tolist(), strict=True)
    close(simulated, summarize([outcome(*one) for one in seen]))


def test_each_class_has_figures_of_its_own():
    trace = paper_workload("sharegpt", 30, 0, per_second=4.0).scaled(lengths=0.15)
    urgent, others = trace.part(0, 10), trace.part(10, 30)
    loads = Load.of(urgent, 500, 0.08, 2.0, priority=7), Load.of(others, 500, 1.0, 3.0)
    load = Load.together(*loads)
    assert (np.diff(load.at_s) >= 0).all() and (load.priority == 7).sum() == 10
    machine = preset("llama3-8b").limited(3000, None)
    simulation = Watched(machine, Settings(), load)
    simulation.run()
    found = sum_up(simulation).classes
    assert [one.priority for one in found] == [7, 0]
    for one in found:
        own = np.flatnonzero(load.priority == one.priority).tolist()
        alike = summarize([simulation.outcome(i) for i in own])
        assert 0 < alike.slo_attainment < 1
        for name in ("requests", "ttft", "tpot", "slo_attainment", "tpot_attainment"):
            given = dataclasses.asdict(alike)[name]
            assert dataclasses.asdict(one)[name] == pytest.approx(given), name
