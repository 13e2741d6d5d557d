"""Whoever is furthest ahead of its SLO pauses first, and places change before a slack runs out."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ellm_sgl.policies import SystemState
from ellm_sgl.policies.fcfs import Fcfs
from ellm_sgl.policies.pausing.turns import GAP, RESERVE_STEPS, exchange, pause_order
from ellm_sgl.policies.problem.candidates import slack_s
from ellm_sgl.policies.slo_priority import SloPriority
from tests.policies.test_pausing import BLOCK, CHEAP, COSTLY, four

STEP_S = 0.005 + 0.001 * 2
"""Of two that decode, nothing restored, by `CHEAP` and `COSTLY`."""
RESERVE_S = RESERVE_STEPS * STEP_S

Running = st.lists(
    st.tuples(
        st.sampled_from([-5.0, -1.0, 0.0, 2.0, 7.0, np.inf]), st.booleans(), st.integers(0, 2)
    ),
    min_size=1,
    max_size=8,
)


@given(Running, st.sampled_from([2.0, np.inf]))
def test_the_order_is_by_urgency_then_who_takes_part_then_slack(
    running: list[tuple[float, bool, int]], ample_s: float
) -> None:
    slack, paused, level = map(np.array, zip(*running, strict=True))
    ids = np.arange(len(running))[::-1]

    def key(i: int) -> tuple[float, ...]:
        if np.isinf(slack[i]):
            return level[i], 1, ids[i]
        if not paused[i] and slack[i] >= ample_s:
            return level[i], 0, 0, 1, ids[i]
        lost = paused[i] and slack[i] < 0
        return level[i], 0, paused[i], lost, -slack[i] if lost else slack[i], ids[i]

    order = pause_order(ids, slack, paused, level, ample_s).tolist()
    assert order == sorted(range(len(running)), key=key)


def exchanged(
    slack: list[float], paused: list[int], level: tuple[int, ...] = (0, 0, 0, 0), missing: int = 0
) -> list[int]:
    """Who of four is paused afterwards. The last two miss so many tokens."""
    out = np.isin(np.arange(4), paused)
    state = four(30 * BLOCK, COSTLY if missing else CHEAP, missing)
    exchange(state, np.array(slack), out, np.array(level))
    return np.flatnonzero(out).tolist()


def test_one_whose_slack_runs_out_takes_the_place_of_the_one_furthest_ahead() -> None:
    soon, ahead = 0.5 * RESERVE_S, 4 * RESERVE_S
    assert exchanged([ahead, 2 * ahead, soon, ahead], [2, 3]) == [1, 3]
    assert exchanged([ahead, 2 * ahead, 2 * soon, ahead], [2, 3]) == [2, 3]  # there is time yet
    assert exchanged([2 * soon, soon, soon, ahead], [2, 3]) == [2, 3]  # nobody is far enough ahead
    assert exchanged([ahead, 2 * ahead, soon, ahead], [2, 3], (1, 0, 1, 1)) == [0, 3]
    assert exchanged([ahead, 2 * ahead, -soon, ahead], [2, 3]) == [2, 3]  # it is late already
    assert exchanged([np.inf] * 4, [2, 3]) == [2, 3]


def test_what_comes_back_is_worth_its_time() -> None:
    # 144 tokens take 144 ms and a row's 1 ms to restore: 20 times that is 2.9 s.
    assert GAP * RESERVE_S < 2.8
    assert exchanged([0.0, 2.8, 0.0, 9.0], [2, 3], missing=144) == [2, 3]
    assert exchanged([0.0, 3.0, 0.0, 9.0], [2, 3], missing=144) == [1, 3]


def told(tpot_s: list[float], slo_s: float = 0.02) -> SystemState:
    """Four of which two have to pause, with such times per token so far, of 80 tokens each."""
    state = four(30 * BLOCK, COSTLY)
    running = dataclasses.replace(
        state.running,
        prompt_tokens=np.full(4, 80),
        tpot_slo_s=np.full(4, slo_s),
        tpot_s=np.array(tpot_s),
        waited_s=np.zeros(4),
    )
    return dataclasses.replace(state, running=running)


@pytest.mark.parametrize("policy", [Fcfs(), SloPriority(loss=0.0)])
def test_policies_pause_those_furthest_ahead(policy: Fcfs | SloPriority) -> None:
    state = told([0.004, 0.018, 0.006, 0.017])
    assert np.argsort(slack_s(state, 1.0)).tolist() == [1, 3, 2, 0]
    assert policy.batch(state).pause == (0, 2)


def test_without_an_slo_the_last_pause() -> None:
    assert Fcfs().batch(told([0.004, 0.018, 0.006, 0.017], np.inf)).pause == (2, 3)


def test_slack_is_the_time_by_which_a_request_is_ahead_of_its_slo() -> None:
    state = told([0.01, 0.02, 0.03, np.nan])
    state.running.waited_s[:] = [0.0, 0.0, 0.0, 0.5]
    # The prompt, and 80 of the 81 tokens after it: the last one's KV comes with the next step.
    expected = 80 * 0.02 - 80 * np.array([0.01, 0.02, 0.03, 0.0]) - [0, 0, 0, 0.5]
    assert slack_s(state, 1.0) == pytest.approx(expected)
    assert slack_s(state, 0.5) == pytest.approx(expected - 80 * 0.01)
