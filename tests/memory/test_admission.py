"""Room for those who wait, each charged for what it keeps at its own ratio."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ellm_sgl.memory import AdmissionRoom

ratios = st.floats(0, 0.99)


@given(
    free=st.integers(0, 10_000),
    gained=st.floats(0, 1),
    ratio=ratios,
    others=st.integers(0, 500),
    tokens=st.lists(st.integers(1, 500), max_size=8),
)
def test_requests_of_one_ratio_share_what_there_is_eventually(
    free: int, gained: float, ratio: float, others: int, tokens: list[int]
) -> None:
    room = AdmissionRoom(free, gained, lambda r: int(1000 * r))
    _, eventually = room.tokens(ratio)
    for count in tokens:
        room.take(ratio, count)
    left = eventually - others - sum(tokens)
    assert room.offer(ratio, others)[1] == pytest.approx(left, abs=1e-6)


@given(free=st.integers(0, 10_000), requests=st.lists(st.tuples(ratios, st.integers(1, 2_000))))
def test_those_who_are_admitted_fit_at_their_own_ratios(
    free: int, requests: list[tuple[float, int]]
) -> None:
    room, kept = AdmissionRoom(free), 0.0
    for ratio, tokens in requests:
        if tokens <= room.offer(ratio, others=0)[1]:
            room.take(ratio, tokens)
            kept += (1 - ratio) * tokens
        else:
            assert kept + (1 - ratio) * (tokens + 1) > free - 1e-6, "it would have fitted"
    assert kept <= free + 1e-6


def test_who_keeps_little_is_offered_more_than_who_keeps_all_whatever_comes_behind() -> None:
    room = AdmissionRoom(100)
    assert room.offer(0.75, 0) == (100, 400)
    assert room.offer(0.0, 0) == (100, 100)
    room.take(0.75, 200)
    assert room.offer(0.0, 0) == (100, 50)
    assert room.offer(0.5, 0) == (100, 100)


def test_those_that_run_make_room_down_to_the_least_ratio_among_the_admitted() -> None:
    room = AdmissionRoom(100, yields=lambda ratio: int(80 * ratio))
    assert room.offer(0.5, others=20) == (140, 280 - 20)
    assert room.offer(0.25, others=20) == (120, 160 - 20)
    room.take(0.25, 40)
    # At 0.5 a token takes half; those that run stay at 0.25, where 20 tokens take 15; 30 are taken.
    assert room.offer(0.5, others=20) == (120, 240 - 30 - 60)


def test_who_was_not_admitted_takes_nothing() -> None:
    room = AdmissionRoom(100, yields=lambda ratio: int(80 * ratio))
    room.take(0.0, 0)
    assert room.offer(0.5, 0) == (140, 280)


def test_what_fetching_takes_of_the_device_is_not_gained() -> None:
    assert AdmissionRoom(100, gained=0.5, yields=lambda _: 40).tokens(0.5) == (120, 160)
