"""When requests rotate, and who goes on pausing where the way changes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from ellm_sgl.policies import SystemState
from ellm_sgl.policies.pausing.choice import Pausing
from ellm_sgl.policies.pausing.limits import Deadlines, can_rotate, full_step_s
from ellm_sgl.policies.pausing.rotation import MOST_WAITS, Rotation, RotationDecision
from ellm_sgl.policies.pausing.urgency import Urgency
from ellm_sgl.policies.testing import make_state, requests
from tests.policies.slo_server import CpuServer


def in_the_way(slo_s: float) -> SystemState:
    """Two requests on a device that holds one, whose host has room."""
    running = requests([200, 200], prompt_tokens=100, tpot_s=0.01, max_new_tokens=500)
    return make_state(running, device_tokens=320, host_tokens=9999, tpot_slo_s=slo_s,
                      latency=CpuServer())  # fmt: skip


def test_who_rotates_goes_on_until_the_slo_is_too_tight() -> None:
    step_s, first_s = full_step_s(in_the_way(1.0)), full_step_s(in_the_way(1.0), at_first=True)
    assert 2.05 * step_s < 1.95 * first_s  # rows are half as long, and twice as many
    rotation, pausing = Rotation(), Pausing()
    said = [rotation.applies(in_the_way(slo_s), pausing)
            for slo_s in (2.05 * step_s, 1.95 * first_s, 2.05 * first_s, 1.95 * first_s,
                          1.92 * step_s, 1.85 * step_s, 2.05 * step_s)]  # fmt: skip
    assert said == [False, False, True, True, True, False, False]


def test_whoever_waits_counts_as_a_newcomer_of_a_full_device() -> None:
    """Nobody begins to rotate and, once short prompts are admitted, takes it back."""
    running = requests([800] * 4, prompt_tokens=800, tpot_s=0.01)
    of = [make_state(running, requests(waits), device_tokens=3200, host_tokens=9999,
                     tpot_slo_s=0.03, latency=CpuServer())
          for waits in ([], [800] * 4, [16] * 4)]  # fmt: skip
    assert [can_rotate(state) for state in of] == [True, True, False]
    assert [can_rotate(state, before=True) for state in of] == [True] * 3


def test_what_those_that_wait_share_is_known_from_those_that_run() -> None:
    """A common prompt counts in full for whoever waits, and for newcomers only once."""
    running = requests([15900] * 4, prompt_tokens=8100, shared_tokens=8000, tpot_s=0.01)
    state = make_state(running, requests([8100] * 19), device_tokens=40000, device_free_tokens=320,
                       host_tokens=99999, tpot_slo_s=0.036, latency=CpuServer())  # fmt: skip
    assert full_step_s(state, at_first=True) > 0.5 and not can_rotate(state)
    assert can_rotate(state, before=True)


def test_blocks_that_all_share_are_not_room_for_more() -> None:
    """Half of memory is a shared prompt: the rest has room for 19 requests' own, not for 38."""
    running = requests([8416] * 19, prompt_tokens=8400, shared_tokens=8000, tpot_s=0.01)
    state = make_state(running, device_tokens=16000, device_free_tokens=0, host_tokens=99999,
                       tpot_slo_s=0.15, latency=CpuServer())  # fmt: skip
    assert full_step_s(state) == pytest.approx(4e-3 + 2e-3 * 18.5 + 18.5 * 8416e-7, rel=0.03)
    assert can_rotate(state)


def test_an_slo_that_nobody_could_keep_stops_nobody_from_taking_turns() -> None:
    given: dict[str, Any] = {"prompt_tokens": 100, "tpot_s": 0.01, "max_new_tokens": 500}
    running = requests([200, 200], tpot_slo_s=[np.inf, 0.002], **given)
    state = make_state(running, device_tokens=320, host_tokens=9999, tpot_slo_s=1.0,
                       latency=CpuServer())  # fmt: skip
    assert can_rotate(state)
    active = np.ones(2, bool)
    like = Deadlines.of(in_the_way(1.0), active)
    assert Deadlines.of(state, active).slack_s.tolist() == like.slack_s.tolist()


def test_whoever_has_no_slo_takes_turns_at_the_loosest_of_the_others() -> None:
    """Requests bring their own here; one without any ends nobody's turns."""
    given: dict[str, Any] = {"prompt_tokens": 100, "tpot_s": 0.01, "max_new_tokens": 500}

    def bring(*slos_s: float) -> SystemState:
        running = requests([200] * 3, tpot_slo_s=list(slos_s), **given)
        return make_state(running, device_tokens=480, host_tokens=9999, latency=CpuServer())

    assert not can_rotate(bring(np.inf, np.inf, np.inf))
    state = bring(0.5, 1.0, np.inf)
    assert can_rotate(state)
    first, second, third = Deadlines.of(state, np.ones(3, bool)).slack_s.tolist()
    assert first < second == third < np.inf
    rotation, pausing = Rotation(), Pausing()
    assert [rotation.applies(each, pausing) for each in (bring(0.5, 1.0, 1.0), state)] == [True] * 2


@pytest.mark.parametrize(("host", "rotates"), [(95, False), (96, True)])
def test_nobody_rotates_beyond_what_both_tiers_hold(host: int, rotates: bool) -> None:
    """Who pauses then would be computed again, in the steps of all."""
    state = make_state(requests([200, 200], prompt_tokens=100, tpot_s=0.01), device_tokens=320,
                       host_tokens=host, tpot_slo_s=1.0, latency=CpuServer())  # fmt: skip
    assert can_rotate(state) is rotates


def on_a_device_of_one(waited_s: float, tpot_s: float, small_waits: bool = True) -> SystemState:
    """A large request that pauses, another that is active, and a small one. Memory holds either of
    the large ones beside the small one."""
    missing = [1184, 0, 48 * small_waits]
    running = requests([1200, 480, 64], request_id=[1, 2, 3], prompt_tokens=[1000, 400, 48],
                       tpot_s=[0.01, tpot_s, 0.01], waited_s=[waited_s, 0.0, 0.0],
                       uncached_tokens=missing, uncached_on_host=missing,
                       max_new_tokens=4000)  # fmt: skip
    return make_state(running, device_tokens=1600, host_tokens=10**6, tpot_slo_s=0.06,
                      latency=CpuServer())  # fmt: skip


def turn(state: SystemState, paused: list[int], levels: list[int]) -> tuple[list[int], int | None]:
    """Ids of those who decode next, and of the one that is fetched."""
    rotation = Rotation()
    rotation._paused = np.array(paused)
    decision = rotation.decide(state, Urgency(np.array(levels), np.empty(0, np.int64)))
    ids = state.running.request_id
    back = None if decision.resuming is None else int(ids[decision.resuming])
    return ids[~decision.paused].tolist(), back


@pytest.mark.parametrize(("waited_s", "tpot_s", "active"), [(20.0, 0.01, 1), (9.6, 0.06, 2)])
def test_where_one_alone_fits_they_change_places(
    waited_s: float, tpot_s: float, active: int
) -> None:
    """One is overdue, the other far ahead or behind, too; a third one, that fits, need not wait."""
    state = on_a_device_of_one(waited_s, tpot_s)
    assert turn(state, [1, 3], [0, 0, 0]) == ([active], 3)


def test_who_fits_beside_it_stays() -> None:
    """Though it is further ahead than the one that has to leave: that one alone is asked."""
    state = on_a_device_of_one(20.0, 0.05, small_waits=False)
    assert turn(state, [1], [0, 0, 0]) == ([1, 3], None)


def test_nobody_changes_places_before_it_is_due() -> None:
    """That somebody less urgent runs is no reason to pause one that is as urgent."""
    ahead = on_a_device_of_one(5.0, 0.01, small_waits=False)
    assert turn(ahead, [1], [0, 0, 1]) == ([2, 3], None)
    assert turn(ahead, [1], [1, 0, 1]) == ([2, 3], None)
    due = on_a_device_of_one(20.0, 0.01, small_waits=False)
    assert turn(due, [1], [0, 0, 1])[0] == [1, 3]
    assert turn(due, [1], [1, 0, 1]) == ([2, 3], None)  # the other is more urgent
    less_ahead = on_a_device_of_one(5.0, 0.05, small_waits=False)
    assert turn(less_ahead, [1], [0, 0, 1]) == ([2, 3], None)
    assert turn(less_ahead, [1], [0, 1, 1]) == ([1, 3], None)  # and here it is less so


def test_who_cannot_fit_is_not_asked_about_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [480, *[1200] * 100]
    missing = [0, *[1184] * 100]
    running = requests(tokens, request_id=np.arange(101), prompt_tokens=[400, *[1000] * 100],
                       tpot_s=0.01, waited_s=[0.0, *[1.0] * 100], uncached_tokens=missing,
                       uncached_on_host=missing, max_new_tokens=4000)  # fmt: skip
    state = make_state(running, device_tokens=3200, device_free_tokens=1104, host_tokens=10**6,
                       tpot_slo_s=0.06, latency=CpuServer())  # fmt: skip
    asked: list[int | None] = []

    def to_pause(self: RotationDecision, resuming: int | None, *given: int, **by: int) -> Any:
        asked.append(resuming)
        return original(self, resuming, *given, **by)

    original = RotationDecision._to_pause
    monkeypatch.setattr(RotationDecision, "_to_pause", to_pause)
    assert turn(state, list(range(1, 101)), [0] * 101) == ([0], None)
    assert len(asked) < 5


def test_whoever_pauses_goes_on_where_the_way_changes() -> None:
    step_s = full_step_s(in_the_way(1.0))
    rotation, pausing = Rotation(), Pausing()
    pausing.take_over(np.array([1]))
    assert rotation.applies(in_the_way(3 * step_s), pausing)
    assert rotation.decide(in_the_way(3 * step_s)).paused.tolist() == [False, True]
    pausing.take_over(np.array([0]))
    assert not rotation.applies(in_the_way(step_s), pausing)
    assert pausing.paused_ids.tolist() == [1]


def test_a_prompt_under_way_is_no_sign_that_the_host_has_nothing() -> None:
    """Nothing is fetched while it is computed."""
    running = requests([200, 200], uncached_tokens=[0, 160], uncached_on_host=[0, 160],
                       prompt_tokens=100, tpot_s=[0.001, 0.05], waited_s=[0.0, 1.0],
                       max_new_tokens=500)  # fmt: skip
    state = make_state(running, device_tokens=640, host_tokens=9999, tpot_slo_s=1.0,
                       latency=CpuServer())  # fmt: skip
    busy = dataclasses.replace(state, prefilling=requests([4000], request_id=9))
    for seen, resumes in ((busy, True), (state, False)):
        rotation = Rotation()
        rotation._paused, rotation._resuming, rotation._missing = np.array([1]), 1, 160
        for _ in range(2 * MOST_WAITS):
            decision = rotation.decide(seen)
        assert (decision.resuming == 1) is resumes
