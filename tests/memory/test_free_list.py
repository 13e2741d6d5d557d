"""The stack of free ids."""

from __future__ import annotations

import numpy as np

from ellm_sgl.memory.ids import FreeList


def test_ids_begin_at_one() -> None:
    free = FreeList(3)
    assert free.take(2).tolist() == [1, 2] and free.ids.tolist() == [3]


def test_the_last_given_back_is_the_first_taken() -> None:
    free = FreeList(4)
    free.take(4)
    free.give(np.array([2, 4], np.int32))
    assert free.take(1).tolist() == [4] and free.take(1).tolist() == [2]


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
