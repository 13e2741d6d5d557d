"""Prompts of less urgent requests, while more urgent ones decode."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ellm_sgl.policies import Fcfs, Policy, SystemState
from ellm_sgl.policies.pausing.limits import can_rotate
from ellm_sgl.policies.slo_priority import SloPriority
from ellm_sgl.policies.slo_priority.admission import (
    CONTENDED_S,
    PATIENCE,
    PREFILL_SHARE,
    PrefillBudget,
)
from ellm_sgl.policies.testing import make_state, requests
from tests.policies.slo_server import CpuServer, Request, Simulation

LONG = 1000
"""Tokens of a prompt that takes `CpuServer` 0.1 s, many times a step."""


def scene(now_s: float, urgent_runs: bool = True) -> SystemState:
    """Two requests run, one of them perhaps urgent; three long ones wait that are not."""
    ids = [1, 2] if urgent_runs else [3, 4]
    running = requests([100, 100], request_id=ids, priority=[5 * urgent_runs, 0], arrival_s=0.0)
    waiting = requests([LONG] * 3, request_id=[7, 8, 9], arrival_s=0.0)
    return make_state(
        running, waiting, device_tokens=100_000, latency=CpuServer(), now_s=now_s, max_running=64
    )


def test_urgent_requests_are_found_behind_however_many_less_urgent_ones() -> None:
    """Those came long before, but have to save up for their prompts; here requests rotate."""
    running = requests([200] * 2, priority=[5, 0], prompt_tokens=100, tpot_s=0.01)
    waiting = requests([LONG] * 100 + [16], request_id=np.arange(7, 108),
                       priority=[0] * 100 + [5], arrival_s=[0.0] * 100 + [100.0])  # fmt: skip
    for host in (0, 10**6):
        state = make_state(
            running, waiting, device_tokens=6400, host_tokens=host, tpot_slo_s=1.0, now_s=100.0,
            max_running=64, latency=CpuServer(),
        )  # fmt: skip
        assert can_rotate(state) == (host > 0)
        assert SloPriority().batch(state).admit == (100,)


def at(state: SystemState, now_s: float) -> SystemState:
    """With something to do all the time."""
    return replace(state, now_s=now_s, busy_s=now_s)


def test_a_long_prompt_waits_until_its_time_is_saved_up() -> None:
    policy = SloPriority()
    assert policy.batch(scene(0.0)).admit == ()
    assert policy.batch(scene(0.5 * 0.1 / PREFILL_SHARE)).admit == ()
    assert policy.batch(scene(1.5 * 0.1 / PREFILL_SHARE)).admit == (0,)


@pytest.mark.parametrize(
    ("further", "tpot_s", "waits"),
    [(2, 0.01, True), (20, 0.01, False), (20, 0.04, False)],
    ids=["has just begun", "is ahead", "misses its SLO anyway"],
)
def test_a_prompt_waits_longer_for_one_that_could_not_make_up_for_it(
    further: int, tpot_s: float, waits: bool
) -> None:
    """An urgent request with an SLO of 0.02 s per token; the prompt takes 0.1 s."""
    first = scene(0.0)
    running = requests(
        [101 + further, 100], prompt_tokens=[100, 100], request_id=[1, 2], priority=[5, 0],
        arrival_s=0.0, tpot_slo_s=[0.02, np.inf], tpot_s=tpot_s,
    )  # fmt: skip
    policy = SloPriority()
    policy.batch(replace(first, running=running))
    for times, admitted in ((1.5, () if waits else (0,)), (1.5 * PATIENCE, (0,))):
        later = at(replace(first, running=running), times * 0.1 / PREFILL_SHARE)
        assert policy.batch(later).admit == admitted


def test_what_a_prompt_took_has_to_be_saved_up_again() -> None:
    budget, state = PrefillBudget(), scene(0.0)
    budget.note(state, several=True)
    budget.note(at(state, 1.0 / PREFILL_SHARE), several=True)
    assert budget.affords(1.0) and not budget.affords(1.1)
    budget.offer(state.running, np.array([0.25, 0.25]))  # both of them run in the next state
    budget.note(at(state, 1.0 / PREFILL_SHARE), several=True)
    assert budget.affords(0.5) and not budget.affords(0.6)


def test_an_offer_that_the_server_did_not_take_costs_nothing() -> None:
    budget, state = PrefillBudget(), scene(0.0)
    budget.note(state, several=True)
    budget.note(at(state, 1.0 / PREFILL_SHARE), several=True)
    budget.offer(state.waiting, np.full(3, 0.3))
    budget.note(at(state, 1.0 / PREFILL_SHARE), several=True)
    assert budget.affords(1.0)


def test_without_urgent_requests_prompts_do_not_wait() -> None:
    assert SloPriority().batch(scene(0.0, urgent_runs=False)).admit == (0, 1, 2)


def test_prompts_are_computed_a_few_at_a_time_while_urgent_requests_are_expected() -> None:
    policy = SloPriority()
    policy.batch(scene(0.0))
    assert policy.batch(scene(1.0, urgent_runs=False)).admit == (0,)
    assert policy.batch(scene(2 * CONTENDED_S, urgent_runs=False)).admit == (0, 1, 2)


def test_urgent_requests_decode_through_a_stream_of_long_prompts() -> None:
    """Their tokens come at least twice as fast as under fcfs, and everybody is served."""
    slowest = {policy: _slowest_urgent(policy()) for policy in (Fcfs, SloPriority)}
    assert slowest[SloPriority] < slowest[Fcfs] / 2


def _slowest_urgent(policy: Policy) -> float:
    """Largest TPOT of an urgent request, in seconds."""
    others = [Request(i, 0.1 * i, 768, 24, max_new=24) for i in range(24)]
    urgent = [Request(100 + i, 0.5 + 0.8 * i, 64, 32, priority=1, max_new=32) for i in range(3)]
    trace = sorted([*others, *urgent], key=lambda r: r.arrival_s)
    served = Simulation(policy, trace, device_tokens=8192).run()
    assert len(served.finished) == len(trace)
    return max(r.tpot_s for r in served.of(1))


def test_a_prompt_computed_in_chunks_has_to_be_paid_for_too() -> None:
    """When time is noted next, it is under way and does not decode yet."""
    budget, state = PrefillBudget(), scene(0.0)
    budget.note(state, several=True)
    later = at(state, 1.0 / PREFILL_SHARE)
    budget.note(later, several=True)
    budget.offer(state.waiting, np.full(3, 0.75))
    budget.note(replace(later, prefilling=requests([LONG], request_id=8)), several=True)
    assert budget.affords(0.25) and not budget.affords(0.3)


def test_nothing_is_saved_up_while_all_are_alike_or_nobody_is_there() -> None:
    alike, idle = PrefillBudget(), PrefillBudget()
    state = scene(0.0)
    for several, now_s in ((False, 0.0), (False, 50.0), (True, 100.0)):
        alike.note(at(state, now_s), several)
    assert alike.affords(0.0) and not alike.affords(0.01)
    for now_s in (0.0, 100.0):
        idle.note(replace(state, now_s=now_s), several=True)
    assert not idle.affords(0.1)
