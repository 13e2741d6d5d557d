"""Free ids, the lowest first."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ellm_sgl.memory.ids import FreeList


def test_ids_begin_at_one() -> None:
    free = FreeList(3)
    assert free.take(2).tolist() == [1, 2] and free.ids.tolist() == [3]


def test_taken_ids_are_the_callers_own() -> None:
    free = FreeList(2)
    taken = free.take(2)
    free.give(taken)
    taken[:] = 0
    assert sorted(free.ids.tolist()) == [1, 2]


def test_taking_nothing_from_an_empty_list() -> None:
    free = FreeList(1)
    free.take(1)
    assert len(free.take(0)) == len(free) == 0


@given(st.integers(1, 700), st.lists(st.tuples(st.booleans(), st.integers(0, 400)), max_size=30))
def test_the_lowest_free_ids_are_taken(capacity: int, doings: list[tuple[bool, int]]) -> None:
    free, expected = FreeList(capacity), set(range(1, capacity + 1))
    for gives, count in doings:
        taken = sorted(set(range(1, capacity + 1)) - expected)
        if gives:
            back = taken[count % 7 :: 3]
            free.give(np.array(back, np.int32))
            expected |= set(back)
        else:
            lowest = sorted(expected)[: min(count, len(expected))]
            assert free.take(len(lowest)).tolist() == lowest
            expected -= set(lowest)
        assert free.ids.tolist() == sorted(expected) and len(free) == len(expected)
        assert free.highest_taken == max(set(range(capacity + 1)) - expected)
