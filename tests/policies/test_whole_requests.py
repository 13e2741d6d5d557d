"""Whole requests: who pauses, who resumes, and that none is ever there in part."""

from __future__ import annotations

import numpy as np
import pytest

from ellm_sgl.policies import SystemState
from ellm_sgl.policies.baselines.whole_requests import WholeRequests
from ellm_sgl.policies.checks import check_batch, check_ratios
from ellm_sgl.policies.planned import evictable_tokens, planned_tokens
from ellm_sgl.policies.testing import Size, make_state, random_state, requests

BLOCK = 16


def four(blocks: int, paused: int = 0) -> SystemState:
    """Four running requests of 160 tokens (11 blocks with the next token), one that waits, and a
    device of so many blocks. The last `paused` running ones have only their last block there."""
    uncached = [0] * (4 - paused) + [9 * BLOCK] * paused
    free = blocks * BLOCK - 4 * 10 * BLOCK + sum(uncached)
    return make_state(
        requests([160] * 4, uncached_tokens=uncached),
        requests([50], request_id=[9]),
        device_tokens=blocks * BLOCK,
        device_free_tokens=max(free, 0),
    )


def test_all_run_and_all_are_admitted_while_all_fit() -> None:
    batch = WholeRequests().batch(four(44))
    assert batch.pause == () and batch.admit == (0,)


def test_the_last_is_evicted_whole_and_nobody_is_admitted() -> None:
    policy, state = WholeRequests(), four(43)
    batch = policy.batch(state)
    assert batch.pause == (3,) and batch.admit == ()
    ratios = policy.ratio(state, batch).running
    evicted = planned_tokens(state.running, ratios, BLOCK)
    assert evicted.tolist() == [0, 0, 0, evictable_tokens(state.running, BLOCK)[3]]


def test_only_as_many_pause_as_must() -> None:
    assert WholeRequests().batch(four(30)).pause == (2, 3)


def test_the_first_stays_whatever_happens() -> None:
    assert WholeRequests().batch(four(3)).pause == (1, 2, 3)


def test_it_resumes_only_when_all_of_it_fits_with_room_to_grow() -> None:
    policy = WholeRequests()
    policy.batch(four(43))
    assert policy.batch(four(47, paused=1)).pause == (3,)  # 44 and a further block of all four
    back = policy.batch(four(48, paused=1))
    assert back.pause == () and back.admit == ()
    assert policy.batch(four(48)).admit == (0,)


def test_paused_requests_resume_in_order() -> None:
    policy = WholeRequests()
    assert policy.batch(four(30)).pause == (2, 3)
    assert policy.batch(four(40, paused=2)).pause == (3,)


def test_one_resumes_when_all_that_ran_have_finished() -> None:
    policy = WholeRequests()
    assert policy.batch(four(3)).pause == (1, 2, 3)
    rest = make_state(
        requests([160] * 2, request_id=[2, 3], uncached_tokens=[144, 144]), device_tokens=160
    )
    assert policy.batch(rest).pause == (1,)


@pytest.mark.parametrize("seed", range(40))
def test_answers_are_valid_and_nobody_is_there_in_part(seed: int) -> None:
    policy = WholeRequests()
    for step in range(3):
        state = random_state(np.random.default_rng([seed, step]), Size(24, 48, 4096))
        batch = policy.batch(state)
        check_batch(state, batch)
        ratios = policy.ratio(state, batch)
        check_ratios(state, batch, ratios)
        evicted = planned_tokens(state.running, ratios.running, state.memory.block_tokens)
        most = evictable_tokens(state.running, state.memory.block_tokens)
        paused = np.isin(np.arange(len(state.running)), batch.pause)
        # A shared part of a block may keep one block more.
        kept = most[paused] - evicted[paused]
        assert np.all(evicted[~paused] == 0) and np.all(kept <= state.memory.block_tokens)
