"""Generated states are possible, various, and equal for equal seeds."""

from __future__ import annotations

import numpy as np
import pytest

from ellm_sgl.policies import SystemState
from ellm_sgl.policies.testing.generate import (
    Size,
    make_state,
    random_state,
    requests,
    resident_tokens,
)

STATES = 150


@pytest.fixture(scope="module")
def states() -> list[SystemState]:
    return [random_state(np.random.default_rng(seed)) for seed in range(STATES)]


def test_what_is_resident_fits(states: list[SystemState]) -> None:
    for state in states:
        memory = state.memory
        resident = resident_tokens(state.running, memory.block_tokens)
        assert resident + memory.device_free_tokens == memory.device_tokens
        assert memory.device_tokens % memory.block_tokens == 0
        assert state.running.uncached_tokens.sum() <= memory.max_restored_tokens
        assert len(state.running) <= state.max_running


def test_no_request_contradicts_itself(states: list[SystemState]) -> None:
    for state in states:
        for part in (state.running, state.waiting):
            assert (part.tokens >= 1).all() and (part.tokens <= 32_768).all()
            assert (part.prompt_tokens <= part.tokens).all()
            assert (part.max_new_tokens >= 1).all()
            assert (part.shared_tokens < part.tokens).all()
            assert (part.shared_tokens + part.uncached_tokens < part.tokens).all()
            assert (part.arrival_s <= state.now_s).all()
            assert (part.waited_s >= 0.0).all()
            assert (part.tpot_slo_s > 0.0).all() and (part.ttft_slo_s > 0.0).all()
        assert not state.waiting.uncached_tokens.any()
        ids = np.append(state.running.request_id, state.waiting.request_id)
        assert (np.diff(ids) > 0).all()


def test_states_are_of_all_kinds(states: list[SystemState]) -> None:
    def some(kinds: list[object]) -> bool:
        return len(set(kinds)) > 1

    assert some([type(s.latency) for s in states])
    assert some([s.model.experts for s in states])
    assert some([s.hardware for s in states])
    assert some([s.memory.host_tokens > 0 for s in states])
    assert some([s.tpot_slo_s for s in states])
    assert some([bool(s.running.priority.any()) for s in states])
    assert some([bool(s.running.shared_tokens.any()) for s in states])
    assert some([bool(s.waiting.shared_tokens.any()) for s in states])
    assert some([bool(s.running.uncached_tokens.any()) for s in states])
    need = [s.running.tokens.sum() + s.waiting.tokens.sum() for s in states]
    shares = [s.memory.device_tokens / n for s, n in zip(states, need, strict=True)]
    assert min(shares) < 0.2 and max(shares) > 2.0


def test_equal_seeds_give_equal_states() -> None:
    first, second = (random_state(np.random.default_rng(7)) for _ in range(2))
    assert first.memory == second.memory
    for name, column in vars(first.running).items():
        assert np.array_equal(column, getattr(second.running, name), equal_nan=True)


def test_a_state_may_be_asked_for_in_full_size() -> None:
    state = random_state(np.random.default_rng(0), Size(20, 30, 100), exact_size=True)
    assert (len(state.running), len(state.waiting)) == (20, 30)
    assert state.running.tokens.max() <= 100


def test_columns_are_given_one_by_one_or_for_all() -> None:
    two = requests([5, 6], shared_tokens=4, priority=[1, 2])
    assert list(two.request_id) == [0, 1]
    assert list(two.shared_tokens) == [4, 4]
    assert list(two.priority) == [1, 2]
    assert np.isinf(two.tpot_slo_s).all()
    assert all(not column.flags.writeable for column in vars(two).values())


def test_free_memory_is_what_resident_blocks_leave() -> None:
    # Blocks of 16: 3 + 2 of their own, and 2 that both share.
    two = requests([80, 70], shared_tokens=32, uncached_tokens=[0, 16])
    assert make_state(two, device_tokens=160).memory.device_free_tokens == 160 - 7 * 16
