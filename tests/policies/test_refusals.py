"""Whom the server does not admit, though the policy would: no room is kept for it for long."""

from __future__ import annotations

import numpy as np

from ellm_sgl.policies import SystemState
from ellm_sgl.policies.pausing.refusals import IN_VAIN, Refusals
from ellm_sgl.policies.pausing.rotation import Rotation
from ellm_sgl.policies.testing import make_state, requests
from tests.policies.slo_server import CpuServer


def waits(first: int, running: int = 3, prefilling: bool = False) -> SystemState:
    return make_state(
        requests([100] * running),
        requests([50], request_id=first),
        prefilling=requests([4000], request_id=99) if prefilling else None,
        device_tokens=9999,
    )


def test_the_same_who_is_first_in_vain_is_kept_out() -> None:
    queue = Refusals()
    for seen in range(IN_VAIN + 3):
        assert queue.kept_out(waits(7)) is (seen >= IN_VAIN)
        queue.offered = True


def test_until_another_is_first_or_somebody_ends_or_nobody_waits() -> None:
    for change in (waits(8), waits(7, running=2), make_state(requests([100]), device_tokens=999)):
        queue = Refusals()
        queue.offered = True
        for _ in range(IN_VAIN + 1):
            out = queue.kept_out(waits(7))
        assert out
        assert not queue.kept_out(change)


def test_it_is_not_while_a_prompt_is_computed_nor_if_it_was_not_to_be_admitted() -> None:
    for offered, prefilling in ((True, True), (False, False)):
        queue = Refusals()
        queue.offered = offered
        assert not any(queue.kept_out(waits(7, prefilling=prefilling)) for _ in range(20))


def test_who_is_paused_comes_back_into_the_room_of_one_that_is_kept_out() -> None:
    running = requests([200] * 5, uncached_tokens=[0, 192, 0, 0, 0], prompt_tokens=100,
                       uncached_on_host=[0, 192, 0, 0, 0], tpot_s=0.001,
                       max_new_tokens=500)  # fmt: skip
    state = make_state(
        running,
        requests([60], request_id=9, max_new_tokens=500),
        device_tokens=1120,
        device_free_tokens=272,
        host_tokens=9999,
        tpot_slo_s=1.0,
        latency=CpuServer(),
    )
    rotation = Rotation()
    rotation._paused = np.array([1])
    decisions = [rotation.decide(state) for _ in range(IN_VAIN + 1)]
    assert [d.admit for d in decisions] == [1] * IN_VAIN + [1]
    assert [d.resuming for d in decisions] == [None] * IN_VAIN + [1]
    # There is no room for both: it stays so until somebody has ended.
    later = rotation.decide(state)
    assert (later.admit, later.resuming) == (0, 1)
