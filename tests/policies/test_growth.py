"""fcfs makes the pool grow before it lets anybody restore."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ellm_sgl.policies import Fcfs, Growth, SystemState
from ellm_sgl.policies.fcfs.growth import inflated
from ellm_sgl.policies.testing import make_state, requests

TOKENS = 1600


def state(growth: Growth) -> SystemState:
    """Four requests that need about twice of what the pool holds."""
    running = requests([400] * 4, uncached_tokens=[208] * 4, max_new_tokens=50)
    made = make_state(running, requests([]), device_tokens=TOKENS // 2)
    return dataclasses.replace(made, memory=dataclasses.replace(made.memory, growth=growth))


def ratios(growth: Growth) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    policy, asked = Fcfs(pause=False), state(growth)
    return policy.ratio(asked, policy.batch(asked)).running


def test_where_nothing_can_grow_it_restores() -> None:
    assert (ratios(Growth()) > 0).all()


def test_where_the_pool_can_grow_nothing_is_to_be_missing() -> None:
    assert not ratios(Growth(TOKENS, TOKENS, 1e-9)).any()


def test_with_what_others_do_not_need_too() -> None:
    assert not ratios(Growth(0, TOKENS, 1e-9)).any()


def test_what_it_cannot_grow_by_is_restored() -> None:
    some = ratios(Growth(0, TOKENS // 4, 1e-9))
    assert (some > 0).all() and (some < ratios(Growth())).all()


def test_growth_that_costs_more_than_restoring_is_left() -> None:
    assert (ratios(Growth(TOKENS, TOKENS, 1e3)) == ratios(Growth())).all()


@pytest.mark.parametrize("tokens", [0, 7, 16, 40])
def test_memory_grows_by_whole_blocks(tokens: int) -> None:
    asked = state(Growth(0, tokens, 0.0))
    memory = inflated(asked).memory
    assert memory.device_tokens - asked.memory.device_tokens == tokens // 16 * 16
    assert memory.device_free_tokens - asked.memory.device_free_tokens == tokens // 16 * 16
