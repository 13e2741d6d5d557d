"""Prompts under way count as those that run, where it is decided who is admitted beside them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ellm_sgl.latency import StepWork
from ellm_sgl.policies import Batch, Fcfs, Policy, SystemState
from ellm_sgl.policies.checks import InvalidAnswer, check_batch
from ellm_sgl.policies.pausing.limits import can_rotate
from ellm_sgl.policies.problem.candidates import unowned_tokens
from ellm_sgl.policies.problem.under_way import as_running
from ellm_sgl.policies.slo_priority import SloPriority
from ellm_sgl.policies.testing import Size, make_state, random_state, requests
from tests.policies.slo_server import CpuServer

MEMORY, LONG, SHORT = 56_112, 49_168, 16_752
"""L-Eval on an A100 that holds Llama2-13B: one fits, both do not."""
POLICIES = [Fcfs, SloPriority]


def under_way(waiting: int, memory: int = MEMORY) -> SystemState:
    """A long prompt is being computed, nobody decodes, and one waits."""
    left = memory - LONG // 16 * 16
    return make_state(
        requests([]),
        requests([waiting], request_id=1, max_new_tokens=4096),
        prefilling=requests([LONG], request_id=0, max_new_tokens=4096, waited_s=9.0),
        device_tokens=left,
        device_free_tokens=left,
        host_tokens=MEMORY,
        tpot_slo_s=0.06,
    )


def test_nobody_is_admitted_beside_one_that_lacks_kv_itself() -> None:
    state = under_way(SHORT)
    lacks = requests([LONG], request_id=0, max_new_tokens=4096, uncached_tokens=LONG // 32 * 16)
    kept = LONG - LONG // 32 * 16
    memory = replace(state.memory, device_tokens=MEMORY - kept, device_free_tokens=MEMORY - kept)
    state = replace(state, prefilling=lacks, memory=memory)
    assert as_running(state).memory.device_tokens == MEMORY
    assert Fcfs().batch(state) == SloPriority().batch(state) == Batch(admit=())


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_is_admitted_beside_a_prompt_that_leaves_no_room(policy: type[Policy]) -> None:
    state = under_way(SHORT)
    assert policy().batch(state) == Batch(admit=())
    check_batch(state, Batch(admit=()))


@pytest.mark.parametrize("policy", POLICIES)
def test_who_fits_beside_it_is_admitted(policy: type[Policy]) -> None:
    assert policy().batch(under_way(SHORT, 2 * MEMORY)).admit == (0,)


@pytest.mark.parametrize("policy", POLICIES)
def test_somebody_is_admitted_to_an_idle_server_whatever_it_needs(policy: type[Policy]) -> None:
    state = replace(under_way(SHORT), prefilling=requests([]))
    assert policy().batch(state).admit == (0,)
    with pytest.raises(InvalidAnswer, match="while nothing runs"):
        check_batch(state, Batch(admit=()))


@pytest.mark.parametrize("policy", POLICIES)
def test_it_takes_a_place(policy: type[Policy]) -> None:
    assert policy().batch(replace(under_way(16, 2 * MEMORY), max_running=1)).admit == ()


@pytest.mark.parametrize("policy", POLICIES)
def test_it_takes_a_place_where_others_rotate(policy: type[Policy]) -> None:
    state = make_state(
        requests([512] * 4, tpot_s=0.02, prompt_tokens=256),
        requests([64] * 4, request_id=np.arange(5, 9), priority=1),
        prefilling=requests([64], request_id=4),
        device_tokens=4096,
        host_tokens=4096,
        max_running=6,
        tpot_slo_s=1.0,
    )
    assert can_rotate(state)
    assert len(policy().batch(state).admit) == 1


def test_it_decodes_with_its_prompt_in_memory_and_has_not_waited_for_a_token() -> None:
    state = under_way(SHORT)
    seen = as_running(state)
    assert seen.running.request_id.tolist() == [0] and len(seen.prefilling) == 0
    assert seen.running.waited_s.tolist() == [0.0]
    assert seen.memory.device_tokens == MEMORY
    assert seen.memory.device_free_tokens == state.memory.device_free_tokens


def test_memory_that_nobody_owns_stays_what_it_is() -> None:
    for seed in range(50):
        state = random_state(np.random.default_rng(seed), Size(20, 20, 2048))
        seen = as_running(state)
        assert unowned_tokens(seen) == unowned_tokens(state)
        assert (seen is state) == (len(state.prefilling) == 0)
        count = len(state.running)
        assert np.array_equal(seen.running.tokens[:count], state.running.tokens)


@pytest.mark.parametrize("policy", POLICIES)
def test_those_who_decode_wait_for_the_rest_of_it(policy: type[Policy]) -> None:
    """One that fits is not admitted where the prompt under way uses up what is left of an SLO."""
    state = make_state(
        requests([256] * 2, prompt_tokens=250, max_new_tokens=16, tpot_s=0.02),
        requests([4000], request_id=7, max_new_tokens=16),
        prefilling=requests([2048], request_id=5, max_new_tokens=16),
        device_tokens=100_000,
        max_running=64,
        latency=CpuServer(),
        tpot_slo_s=0.1,
    )
    assert policy().batch(state).admit == (0,)
    left = StepWork(0, 0, prefill_rows=10_000, prefill_pairs=1)
    assert policy().batch(replace(state, prefill_left=left)).admit == ()
