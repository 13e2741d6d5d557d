"""The fixed ratio, and what it refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ellm_sgl.policies import FixedRatio
from ellm_sgl.policies.testing import make_state, requests


@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.999])
def test_all_that_wait_are_admitted_and_every_request_has_the_same_ratio(ratio: float) -> None:
    policy = FixedRatio(ratio)
    state = make_state(requests([100] * 3), requests([100] * 2), device_tokens=160)
    batch = policy.batch(state)
    assert batch.admit == (0, 1) and batch.pause == ()
    ratios = policy.ratio(state, batch)
    assert np.array_equal(ratios.running, [ratio] * 3)
    assert np.array_equal(ratios.admitted, [ratio] * 2)


def test_everything_is_cached_unless_told_otherwise() -> None:
    state = make_state(requests([100]), device_tokens=160)
    assert not FixedRatio().ratio(state, FixedRatio().batch(state)).running.any()


@pytest.mark.parametrize("ratio", [-0.1, 1.0, 1.5, math.nan, math.inf])
def test_a_ratio_outside_its_range_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match=f"below 1, got {ratio}"):
        FixedRatio(ratio)
