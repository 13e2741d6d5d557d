"""Who pauses when memory cannot hold all that run, and who resumes when."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ellm_sgl.latency import LatencyModel, StepWork
from ellm_sgl.latency.base import FloatArray
from ellm_sgl.policies import Batch, SystemState
from ellm_sgl.policies.checks import check_batch, check_ratios
from ellm_sgl.policies.fcfs import Fcfs
from ellm_sgl.policies.pausing.choice import GROWTH_STEPS, evicted_tokens, participants
from ellm_sgl.policies.pausing.turns import AMPLE_STEPS
from ellm_sgl.policies.planned import planned_tokens
from ellm_sgl.policies.problem.candidates import SLO_SHARE, decode_seconds, slack_s
from ellm_sgl.policies.testing import Size, make_state, random_state, requests
from tests.policies.known_lengths import TO_THE_BOUND

BLOCK = 16


class Linear(LatencyModel):
    """A step of a fixed time, and so much per row decoded and per token restored."""

    def __init__(self, step_s: float, row_s: float, restored_s: float) -> None:
        self.costs = step_s, row_s, restored_s

    def step_seconds(self, work: StepWork) -> FloatArray:
        step, row, restored = self.costs
        return np.asarray(step + row * work.decode_rows + restored * work.restored_tokens)

    def observe(self, work: StepWork, seconds: float) -> None:
        raise AssertionError("a policy must not calibrate the model")


COSTLY = Linear(0.005, 0.001, 0.001)
"""Restoring a token takes as long as decoding one."""
CHEAP = Linear(0.005, 0.001, 1e-9)


def four(
    device_tokens: int, latency: LatencyModel, missing: int = 0, most: int = 10_000
) -> SystemState:
    """Four running requests of 160 tokens (11 blocks with the next token), the last of which
    lack `missing` tokens each; they go on for `most` tokens."""
    running = requests([160] * 4, uncached_tokens=[0, 0, missing, missing], max_new_tokens=most)
    return make_state(
        running,
        device_tokens=device_tokens,
        device_free_tokens=max(device_tokens - (4 * 160 - 2 * missing), 0),
        latency=latency,
        lengths=TO_THE_BOUND,
    )


def test_all_take_part_while_all_fit() -> None:
    assert participants(four(11 * 4 * BLOCK, COSTLY), active=4) == 4


def test_where_restoring_is_cheap_nobody_pauses() -> None:
    assert participants(four(30 * BLOCK, CHEAP), active=4) == 4


def test_where_restoring_is_costly_the_last_pause() -> None:
    # Of those who pause a block or two stays: 3 x 11 + 2 blocks is too much, 2 x 11 + 2 x 2 not.
    assert participants(four(30 * BLOCK, COSTLY), active=4) == 2


def test_a_small_gain_is_not_worth_it() -> None:
    # One block short: three of four requests in 8 ms, or four in 9 + 0.1 ms.
    slightly = Linear(0.005, 0.001, 0.0001 / BLOCK)
    assert participants(four((11 * 4 - 1) * BLOCK, slightly), active=4) == 4


def test_they_resume_when_there_is_room_for_what_comes_back() -> None:
    # Each has 11 blocks, and a further one stays free; of who pauses two stay.
    three, all_four = 3 * 12 + 2, 4 * 12
    for blocks, count in ((three - 1, 2), (three, 3), (all_four - 1, 3), (all_four, 4)):
        assert participants(four(blocks * BLOCK, CHEAP, missing=144, most=64), active=2) == count


def test_they_resume_where_others_wait_if_that_makes_up_for_bringing_them_back() -> None:
    # There is room for all until they end. Two decode 2 tokens in 7 ms, four 4 in 9; to bring two
    # back takes 288 ms, which n steps make up for if 4 n / (9 n + 288) > 2 / 7: from 58 on.
    for most, count in ((32, 2), (72, 4)):
        state = four(4 * (12 * BLOCK + 72), COSTLY, missing=144, most=most)
        others_wait = dataclasses.replace(state, waiting=requests([16]))
        assert participants(others_wait, active=2) == count
        assert participants(state, active=2) == 4


def test_no_more_resume_than_a_step_can_restore() -> None:
    state = four(10_000, COSTLY, missing=144, most=64)
    memory = dataclasses.replace(state.memory, max_restored_tokens=150)
    assert participants(dataclasses.replace(state, memory=memory), active=2) == 3


@pytest.mark.parametrize("active", [1, 2, 3])
def test_the_last_are_evicted_first_and_only_what_is_needed(active: int) -> None:
    state = four(34 * BLOCK, COSTLY)
    tokens = evicted_tokens(state, active)
    assert (np.diff(tokens[active:]) >= 0).all()
    kept = 4 * 11 * BLOCK - tokens.sum()
    assert kept <= 34 * BLOCK
    if tokens[active:].min() < 9 * BLOCK:
        assert not tokens[:active].any()
        grown = active * ((160 + GROWTH_STEPS) // BLOCK + 1 - 11) * BLOCK
        assert 33 * BLOCK < kept + grown <= 34 * BLOCK
    else:
        assert kept > 33 * BLOCK or not tokens[:active].any()


def test_fcfs_pauses_and_resumes_them() -> None:
    policy = Fcfs()
    crowded = four(30 * BLOCK, COSTLY)
    batch = policy.batch(crowded)
    assert batch == Batch(admit=(), pause=(2, 3))
    ratios = policy.ratio(crowded, batch)
    # 4 x 11 blocks are 14 more than there are.
    evicted = planned_tokens(crowded.running, ratios.running, BLOCK)
    assert evicted.tolist() == [0, 0, 5 * BLOCK, 9 * BLOCK]
    two_left = make_state(
        requests([170, 160], request_id=crowded.running.request_id[[1, 3]],
                 uncached_tokens=[0, 144], max_new_tokens=32),
        device_tokens=30 * BLOCK, device_free_tokens=18 * BLOCK, latency=COSTLY,
    )  # fmt: skip
    assert policy.batch(two_left).pause == ()


def test_nobody_is_admitted_while_somebody_is_paused() -> None:
    crowded = dataclasses.replace(four(30 * BLOCK, COSTLY), waiting=requests([16]))
    assert Fcfs().batch(crowded).admit == ()


@pytest.mark.parametrize("seed", range(60))
def test_answers_are_valid_and_fit_whenever_somebody_is_paused(seed: int) -> None:
    state = random_state(np.random.default_rng(seed), Size(24, 24, 4096))
    policy = Fcfs(rotate=False)
    batch = policy.batch(state)
    check_batch(state, batch)
    ratios = policy.ratio(state, batch)
    check_ratios(state, batch, ratios)
    if batch.pause:
        active = ~np.isin(np.arange(len(state.running)), batch.pause)
        ample_s = AMPLE_STEPS * decode_seconds(state) if state.memory.host_tokens == 0 else np.inf
        slack = np.minimum(slack_s(state, SLO_SHARE), ample_s)
        assert active.any() and slack[active].max() <= slack[~active].min()
        evicted = planned_tokens(state.running, ratios.running, state.memory.block_tokens)
        assert evicted[active].sum() <= state.memory.max_restored_tokens
