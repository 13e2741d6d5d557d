"""When requests rotate, and who goes on pausing where the way changes."""

from __future__ import annotations

import dataclasses

import numpy as np

from ellm_sgl.policies import SystemState
from ellm_sgl.policies.pausing.choice import Pausing
from ellm_sgl.policies.pausing.limits import full_step_s
from ellm_sgl.policies.pausing.rotation import MOST_WAITS, Rotation
from ellm_sgl.policies.testing import make_state, requests
from tests.policies.slo_server import CpuServer


def in_the_way(slo_s: float) -> SystemState:
    """Two requests on a device that holds one, whose host has room."""
    running = requests([200, 200], prompt_tokens=100, tpot_s=0.01, max_new_tokens=500)
    return make_state(running, device_tokens=320, host_tokens=9999, tpot_slo_s=slo_s,
                      latency=CpuServer())  # fmt: skip


def test_who_rotates_goes_on_until_the_slo_is_too_tight() -> None:
    step_s = full_step_s(in_the_way(1.0))
    rotation, pausing = Rotation(), Pausing()
    said = [rotation.applies(in_the_way(times * step_s), pausing)
            for times in (1.95, 2.05, 1.95, 1.92, 2.05, 1.85, 1.95)]  # fmt: skip
    assert said == [False, True, True, True, True, False, False]


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
