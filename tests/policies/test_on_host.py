"""Those that take part are promised what the host has for them, not what it keeps of the others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ellm_sgl.latency import FetchingLatencyModel, HostCopies, LatencyModel, StepWork
from ellm_sgl.latency.base import FloatArray
from ellm_sgl.policies import SystemState
from ellm_sgl.policies.pausing.choice import participants
from ellm_sgl.policies.planned import host_copies, latency_seen
from ellm_sgl.policies.problem.candidates import decode_seconds
from ellm_sgl.policies.problem.forecast import Forecast
from ellm_sgl.policies.problem.on_host import copies_of_first
from ellm_sgl.policies.testing import Size, make_state, random_state, requests
from tests.policies.known_lengths import TO_THE_BOUND

STEP_S, ROW_S, FETCHED_S, COMPUTED_S = 5e-3, 1e-3, 1e-7, 1e-3


class DearToCompute(LatencyModel):
    """A step of a fixed time, and so much per row, per token fetched and per token recomputed."""

    def step_seconds(self, work: StepWork) -> FloatArray:
        computed = work.recompute_share * np.asarray(work.restored_tokens)
        fetched = work.restored_tokens - computed
        return np.asarray(
            STEP_S + ROW_S * work.decode_rows + FETCHED_S * fetched + COMPUTED_S * computed
        )

    def observe(self, work: StepWork, seconds: float) -> None:
        raise AssertionError("a policy must not calibrate the model")


def ten(host_tokens: int, on_host: int) -> SystemState:
    """Ten requests of 2,000 tokens, of which the device holds five. Eight take part, each of whom
    lacks 800 tokens; of these the host has so many. The last two pause, and the host has what they
    lack."""
    running = requests(
        [2000] * 10,
        uncached_tokens=[800] * 8 + [1984] * 2,
        uncached_on_host=[on_host] * 8 + [1984] * 2,
        max_new_tokens=4000,
    )
    state = make_state(running, device_tokens=10_000, host_tokens=host_tokens)
    seen = latency_seen(DearToCompute(), running, state.memory)
    return make_state(
        running,
        device_tokens=10_000,
        host_tokens=host_tokens,
        latency=seen,
        lengths=TO_THE_BOUND,
    )


@given(seed=st.integers(0, 2**32 - 1))
def test_the_host_holds_no_more_than_it_has_room_for(seed: int) -> None:
    rng = np.random.default_rng(seed)
    state = random_state(rng, Size(running=24, waiting=8))
    sizes = np.arange(len(state.running) + 1)
    copies = copies_of_first(state, sizes)
    uncached, held, capacity = map(np.asarray, (copies.uncached, copies.held, copies.capacity))
    kept = state.running.uncached_on_host.sum() - held
    assert (held <= capacity).all() and (held <= uncached).all()
    assert (capacity + kept <= max(state.memory.host_tokens, kept[0])).all()
    everybody = host_copies(state.running, state.memory)
    assert (uncached[-1], held[-1]) == (everybody.uncached, everybody.held)
    assert capacity[-1] == max(everybody.capacity, everybody.held)


def test_what_a_step_takes_of_those_that_run_as_they_are() -> None:
    state = ten(host_tokens=8000, on_host=496)
    active = np.arange(10) < 8
    lost, fetched = 8 * (800 - 496), 8 * 496
    expected = STEP_S + 8 * ROW_S + FETCHED_S * fetched + COMPUTED_S * lost
    assert decode_seconds(state, active) == pytest.approx(expected)


@pytest.mark.parametrize(("host_tokens", "on_host", "active"), [(8000, 496, 5), (1 << 20, 800, 10)])
def test_no_more_take_part_than_the_host_has_room_for(
    host_tokens: int, on_host: int, active: int
) -> None:
    """Of seven, 4,800 tokens would have to be away; the host has 3,472 of theirs, and no more room
    beside what the others keep there. Six could; five now and five later end before six and four.
    """
    assert participants(ten(host_tokens, on_host), active=8) == active


def test_who_pauses_where_the_host_is_full_is_computed_again() -> None:
    """So fewer are admitted than where the host has room: no step may restore part of each."""

    def admitted(host_tokens: int) -> int:
        running, waiting = requests([400] * 8, max_new_tokens=2000), requests([400] * 20)
        empty = HostCopies(uncached=0, held=0, capacity=host_tokens)
        state = make_state(
            running,
            waiting,
            device_tokens=8000,
            host_tokens=host_tokens,
            max_restored_tokens=0,
            latency=FetchingLatencyModel(DearToCompute(), empty),
            lengths=TO_THE_BOUND,
        )
        return Forecast.of(state, 20).solve() - len(running)

    assert admitted(500) < admitted(1 << 20)
