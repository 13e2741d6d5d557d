"""slo-priority as a whole: who is admitted, who keeps what, and what a served trace looks like."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ellm_sgl.latency import StepWork
from ellm_sgl.policies import Fcfs
from ellm_sgl.policies.base import Batch, StepReport, SystemState
from ellm_sgl.policies.planned import planned_tokens
from ellm_sgl.policies.slo_priority import SloPriority
from ellm_sgl.policies.slo_priority.levels import (
    AGE_S,
    LEVELS,
    Overtaken,
    keep_weights,
    queue_order,
    rank_levels,
)
from ellm_sgl.policies.slo_priority.schedule import MAX_STEPS_PER_TOKEN
from ellm_sgl.policies.testing import Size, make_state, random_state, requests
from tests.policies.slo_server import CpuServer, Request, Simulation, two_classes
from tests.policies.test_pausing import BLOCK, COSTLY, Linear, four


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="below 1, got 1"):
        SloPriority(loss=1.0)


def test_without_allowed_loss_nobody_pauses() -> None:
    running = requests([256] * 24, priority=np.arange(24) % 2)
    state = make_state(running, requests([9999]), device_tokens=7000, latency=CpuServer())
    assert SloPriority().batch(state).pause
    assert not SloPriority(loss=0.0).batch(state).pause


def test_levels() -> None:
    running = requests([1, 1, 1], priority=[0, 3, 0], tpot_slo_s=[np.inf, np.inf, 0.1])
    levels = rank_levels(running, requests([1] * 3, priority=[-9, 3, 0]))
    assert levels.running.tolist() == [2, 0, 1]
    assert levels.waiting.tolist() == [LEVELS - 1, 0, 2]


def test_no_less_urgent_request_weighs_as_much() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        level = rng.integers(0, LEVELS, 30)
        slo = np.where(rng.random(30) < 0.5, rng.uniform(0.01, 1, 30), np.inf)
        weight = keep_weights(level, slo, rng.uniform(0, 100, 30))
        for one in range(LEVELS - 1):
            above, below = weight[level == one], weight[level > one]
            assert above.min(initial=np.inf) > below.max(initial=0.0)


def test_urgent_requests_go_first_and_patience_is_bounded() -> None:
    arrival = [0.0, 5.0, AGE_S - 1, AGE_S + 1]
    waiting = requests([64] * 4, priority=[0, 0, 1, 1], arrival_s=arrival)
    level = rank_levels(requests([]), waiting).waiting
    assert queue_order(waiting, level).tolist() == [2, 0, 3, 1]


@pytest.mark.parametrize(
    ("lower", "slo_s", "admitted"),
    [(1, 0.03, 9), (0, 0.03, 12), (16, 0.03, 7), (1, 0.001, 30), (80, 0.03, 30)],
    ids=["one", "nobody", "many", "none alone keeps it", "nor beside so many"],
)
def test_less_urgent_requests_do_not_lift_the_slo_of_those_that_come(
    lower: int, slo_s: float, admitted: int
) -> None:
    """So many of 30 urgent ones are admitted beside them."""
    running = requests([256] * lower)
    waiting = requests(
        [16] * 30, request_id=100 + np.arange(30), priority=1, tpot_slo_s=slo_s, max_new_tokens=64
    )
    state = make_state(running, waiting, device_tokens=10**6, max_running=200, latency=CpuServer())
    assert len(SloPriority().batch(state).admit) == admitted


def crowded(*waiting: tuple[int, float]) -> SystemState:
    """Two urgent and two other requests run, and memory is too short for the others. Who waits is
    given by priority, and by the seconds since it came."""
    running = replace(four(30 * BLOCK, COSTLY).running, priority=np.array([1, 1, 0, 0]))
    state = replace(four(30 * BLOCK, COSTLY), running=running)
    priority, waited_s = np.array(waiting).T
    arrival_s = state.now_s - waited_s
    line = requests(
        [BLOCK] * len(waiting), request_id=[4, 5], priority=priority, arrival_s=arrival_s
    )
    return replace(state, waiting=line)


def later(state: SystemState, seconds: float) -> SystemState:
    """With something to do meanwhile."""
    return replace(state, now_s=state.now_s + seconds, busy_s=state.busy_s + seconds)


def test_nobody_goes_ahead_of_a_paused_request_for_longer_than_of_a_waiting_one() -> None:
    state, policy = crowded((1, 0.0), (1, 0.0)), SloPriority(loss=0.0)
    for passed, admitted in ((0.0, True), (AGE_S - 1, True), (AGE_S + 1, False)):
        batch = policy.batch(later(state, passed))
        assert batch.pause == (2, 3)
        assert bool(batch.admit) == admitted


def test_nobody_goes_ahead_of_a_waiting_request_for_longer_while_others_pause() -> None:
    for age_s, admitted in ((AGE_S - 1, (1,)), (AGE_S + 1, ())):
        batch = SloPriority(loss=0.0).batch(crowded((0, age_s), (1, 0.0)))
        assert batch == Batch(admitted, pause=(2, 3))


def test_pauses_add_up_but_for_those_ahead_of_their_slo() -> None:
    slo_s = [np.inf, np.inf, 0.02, 0.02]
    running = requests(
        [160] * 4,
        prompt_tokens=[80] * 4,
        tpot_slo_s=slo_s,
        tpot_s=0.01,
        waited_s=[0.0, 0.0, 0.5, 5.0],  # the third is ahead by 79 * 9 ms less this
    )
    state = make_state(running, device_tokens=999)
    overtaken, level = Overtaken(), np.full(4, 2)
    found = []
    for ages, paused in ((0.0, [0, 2]), (0.6, [2, 3]), (1.1, [0, 2]), (1.6, [0, 2, 3]), (9.0, [])):
        now = later(state, ages * AGE_S)
        found.append(overtaken.aged(now, level).tolist())
        overtaken.note(np.array(paused))
    # In all 0.6, 1.1 and 8.5 times AGE_S of the first, and 0.5 and 7.9 of the last.
    assert found == [[2, 2, 2, 2], [2, 2, 2, 2], [2, 2, 2, 2], [1, 2, 2, 2], [0, 2, 2, 0]]


def test_a_server_that_stood_still_has_aged_nobody() -> None:
    state = make_state(requests([160, 160]), device_tokens=999)
    overtaken, level = Overtaken(), np.full(2, 2)
    overtaken.aged(state, level)
    overtaken.note(np.array([0]))
    # Generation was paused meanwhile.
    state = replace(state, now_s=state.now_s + 10 * AGE_S)
    assert overtaken.aged(state, level).tolist() == [2, 2]
    # A prompt of minutes was computed, behind steps of 10 ms.
    state = replace(later(state, 2 * AGE_S), last_step=StepReport(StepWork(2, 320), 0.01, 0.01))
    assert overtaken.aged(state, level).tolist() == [0, 2]


def test_who_is_out_for_lack_of_room_takes_nobodys_turn() -> None:
    """Of the others some decode in each step, though those that are out have waited longest."""
    urgent = np.arange(24) < 4
    running = requests([160] * 24, priority=urgent, tpot_slo_s=np.where(urgent, 0.03, np.inf))
    latency = Linear(0.005, 0.002, 0.001)
    state = make_state(running, device_tokens=20 * 176, device_free_tokens=0, latency=latency)
    out = set(SloPriority(loss=0.0).batch(state).pause)
    waited = replace(running, waited_s=np.where(np.isin(np.arange(24), list(out)), 9.0, 0.0))
    pause = set(SloPriority().batch(replace(state, running=waited)).pause)
    assert out < pause < set(range(4, 24))


def test_urgent_requests_are_admitted_to_a_full_server() -> None:
    running = requests([256] * 8)
    waiting = requests([256] * 4, request_id=np.arange(8, 12), priority=[0, 0, 1, 0])
    state = make_state(running, waiting, device_tokens=8 * 256 + 64, latency=CpuServer())
    assert SloPriority().batch(state).admit == (2,)
    assert Fcfs().batch(state).admit == ()


def test_less_urgent_requests_give_up_their_kv_first() -> None:
    running = requests([320] * 8, priority=[0, 1] * 4)
    state = make_state(running, device_tokens=8 * 320 - 640, device_free_tokens=0)
    evicted = planned_tokens(running, SloPriority().ratio(state, Batch(())).running, 16)
    assert evicted[1::2].sum() == 0
    assert 640 <= evicted[::2].sum() < 640 + 8 * 16 + 16


def test_where_all_are_alike_all_give_up_the_same_share() -> None:
    running = requests(320 + 40 * np.arange(8), arrival_s=np.arange(8.0))
    state = make_state(running, device_tokens=2400, device_free_tokens=0)
    ratios = SloPriority().ratio(state, Batch(())).running
    assert ratios.min() > 0.3 and np.ptp(ratios) <= 16 / 320 + 0.01  # a block, more or less
    assert np.array_equal(ratios, Fcfs().ratio(state, Batch(())).running)


def test_who_waits_does_not_change_what_those_that_run_give_up() -> None:
    running = requests([320] * 8, arrival_s=np.arange(8.0))
    state = make_state(running, device_tokens=8 * 320 - 640, device_free_tokens=0)
    waiting = requests([4000], request_id=8, priority=-1)
    alone, beside = (
        SloPriority().ratio(s, Batch(())).running for s in (state, replace(state, waiting=waiting))
    )
    assert np.array_equal(alone, beside)


ALIKE, TWO_LEVELS = 0, [0, 1] * 4


@pytest.mark.parametrize("priority", [ALIKE, TWO_LEVELS])
def test_everything_is_cached_when_pressure_has_gone(priority: int | list[int]) -> None:
    running = requests([320] * 8, uncached_tokens=160, priority=priority)
    tight = make_state(running, device_tokens=8 * 160)
    roomy = make_state(running, device_tokens=8 * 400)
    policy = SloPriority()
    assert policy.ratio(tight, Batch(())).running.any()
    assert not policy.ratio(roomy, Batch(())).running.any()


@pytest.mark.parametrize("priority", [ALIKE, TWO_LEVELS])
def test_a_steady_load_has_steady_ratios(priority: int | list[int]) -> None:
    """Blocks are evicted one by one as requests grow, and not restored."""
    policy, before, plans = SloPriority(), None, 0
    for step in range(64):
        running = requests(np.full(8, 320 + step), priority=priority)
        state = make_state(running, device_tokens=8 * 300, device_free_tokens=0)
        evicted = planned_tokens(running, policy.ratio(state, Batch(())).running, 16)
        if before is not None:
            assert (evicted >= before).all()
            plans += int((evicted != before).any())
        before = evicted
    assert 1 <= plans <= 20


def test_the_same_history_gives_the_same_answers() -> None:
    first, second = SloPriority(), SloPriority()
    for seed in range(30):
        state = random_state(np.random.default_rng(seed), Size(32, 32, 2048))
        for s in (state, later(state, 0.05)):
            a, b = first.batch(s), second.batch(s)
            assert a == b
            assert np.array_equal(first.ratio(s, a).running, second.ratio(s, b).running)


def served(policy, tpot_slo_s: float = np.inf, device: int = 6000, seed: int = 1) -> Simulation:
    trace = two_classes(np.random.default_rng(seed), 80, 5.0, 0.2, tpot_slo_s)
    return Simulation(policy, trace, device).run()


@pytest.mark.parametrize("device", [3000, 6000])
def test_two_classes_under_pressure(device: int) -> None:
    """The machine of `CpuServer`, with more requests than it can serve at a time."""
    fcfs, slo = served(Fcfs(), device=device), served(SloPriority(), device=device)
    assert len(slo.finished) == len(slo.trace)

    def p99(server: Simulation, what: str) -> float:
        return float(np.percentile([getattr(r, what) for r in server.of(1)], 99))

    def mean(server: Simulation, what: str) -> float:
        return float(np.mean([getattr(r, what) for r in server.of(1)]))

    assert p99(slo, "ttft_s") <= p99(fcfs, "ttft_s") / 2
    assert mean(slo, "tpot_s") <= mean(fcfs, "tpot_s") / 1.15
    assert slo.throughput >= 0.95 * fcfs.throughput
    # MAX_STEPS_PER_TOKEN expected steps, of which some turn out longer. Others may have to wait
    # until there is room again, under either policy.
    assert max(r.longest_gap for r in slo.of(1)) <= 2 * MAX_STEPS_PER_TOKEN


def test_an_slo_is_what_urgent_requests_get_where_it_costs_little() -> None:
    slo = served(SloPriority(), tpot_slo_s=0.03)
    late = [r for r in slo.of(1) if r.tpot_s > 0.03]
    assert len(late) <= len(slo.of(1)) // 10


@pytest.mark.slow
def test_a_stream_of_urgent_requests_does_not_starve_the_others() -> None:
    """More urgent requests than can be served, for ever; a few others from the start on."""
    stream = [Request(i, 0.25 * i, 160, 120, priority=1) for i in range(5, 800)]
    few = [Request(i, 0.0, 160, 60) for i in range(5)]
    server = Simulation(SloPriority(), few + stream, device_tokens=1200)
    server.run(until_s=3 * AGE_S)

    def gap(priority: int) -> int:
        return max(r.longest_gap for r in server.of(priority))

    assert len(server.of(0)) == len(few)
    assert server.waiting
    assert gap(0) <= 2 * MAX_STEPS_PER_TOKEN
    # Among equals who came last pauses, until others have ended.
    assert gap(1) <= 12 * MAX_STEPS_PER_TOKEN


def test_while_requests_rotate_nothing_is_lost_to_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedule that stood before costs nothing then, however long that lasts."""
    running = requests([256] * 24, priority=np.arange(24) % 2)
    state = make_state(running, device_tokens=7000, latency=CpuServer(), device_free_tokens=900)
    lost = []
    for rotates in (False, True):
        policy = SloPriority()
        assert policy.batch(state).pause, "in turns"
        with monkeypatch.context() as patch:
            patch.setattr(policy._rotation, "applies", lambda *_, now=rotates: now)
            policy.batch(later(state, 100.0))
        policy.batch(later(state, 100.1))
        lost.append(policy._losses.allowed)
    assert lost[1] > lost[0]
