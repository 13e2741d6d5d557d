"""stock: as if there were no policy."""

from __future__ import annotations

from ellm_sgl.policies import Stock
from ellm_sgl.policies.testing import make_state, requests


def test_all_that_wait_are_admitted_in_order_and_all_is_cached() -> None:
    state = make_state(requests([500]), requests([400, 30, 2]), device_tokens=512)
    policy = Stock()
    batch = policy.batch(state)
    assert batch.admit == (0, 1, 2) and batch.pause == ()
    ratios = policy.ratio(state, batch)
    assert len(ratios.running) == 1 and not ratios.running.any()
    assert len(ratios.admitted) == 3 and not ratios.admitted.any()
