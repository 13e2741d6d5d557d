"""States that decisions are timed on, and the times of the page table."""

from __future__ import annotations

import numpy as np
import pytest

from ellm_sgl.eval.paper.claims import CASES, MAX_RUNNING, TPOT_SLO_S
from ellm_sgl.eval.paper.jobs import paper_machine
from ellm_sgl.eval.paper.overheads import SOLVERS, busy_state, lookup_times, table_seconds
from ellm_sgl.policies.testing.bench import bench


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("room", [0.85, 1.6])
def test_a_busy_state_is_a_possible_one_of_the_load(case, room):
    machine = paper_machine(case[0])
    state = busy_state(machine, case, MAX_RUNNING, np.random.default_rng(0), room)
    assert 1 <= len(state.running) <= MAX_RUNNING == len(state.waiting)
    assert state.tpot_slo_s == TPOT_SLO_S[case]
    resident = (state.running.tokens - state.running.uncached_tokens).sum()
    assert resident <= state.memory.device_tokens
    needed = state.running.tokens.sum()
    bounded = len(state.running) == MAX_RUNNING
    assert bounded or (needed > machine.kv_tokens) == (room < 1) or len(state.running) == 1


@pytest.mark.parametrize("solver", SOLVERS)
def test_decisions_of_a_load_are_timed(solver):
    machine = paper_machine(CASES[0][0])
    timed = bench("fcfs", SOLVERS[solver], 3,
                  lambda rng, room: busy_state(machine, CASES[0], 64, rng, room))  # fmt: skip
    assert timed.decision.calls == 3 and 0 < timed.decision.mean_us <= timed.decision.p99_us * 1.01


def test_look_ups_and_bookkeeping_are_timed():
    found = lookup_times(layers=8, lookups=200)
    assert 0 < found.mean_us <= found.most_us and found.p90_us <= found.most_us
    assert 0 < table_seconds(layers=8, group=4) < 1
