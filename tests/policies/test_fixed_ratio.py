"""The fixed ratio, and what it refuses."""

from __future__ import annotations

import math
from importlib.metadata import entry_points

import pytest

from ellm_sgl.policies import FixedRatio, RequestView, SystemState


def state_of(requests: int) -> SystemState:
    views = tuple(RequestView(i, 100 * i, 0, 10 * i) for i in range(requests))
    return SystemState(views, device_tokens_total=4000, device_tokens_free=0, block_tokens=16)


@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.999])
def test_every_request_has_the_same_ratio(ratio: float) -> None:
    policy = FixedRatio(ratio)
    assert list(policy.ratio(state_of(3))) == [ratio] * 3
    assert policy.joining_ratio(state_of(3)) == ratio


def test_everything_is_cached_unless_told_otherwise() -> None:
    assert list(FixedRatio().ratio(state_of(1))) == [0.0]


def test_no_requests_no_ratios() -> None:
    assert list(FixedRatio(0.5).ratio(state_of(0))) == []


@pytest.mark.parametrize("ratio", [-0.1, 1.0, 1.5, math.nan, math.inf])
def test_a_ratio_outside_its_range_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match=f"below 1, got {ratio}"):
        FixedRatio(ratio)


def test_it_is_found_by_name() -> None:
    (entry,) = entry_points(group="ellm_sgl.policies", name="fixed-ratio")
    assert entry.load() is FixedRatio
