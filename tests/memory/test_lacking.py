"""How many blocks each request lacks is counted as blocks come and go, alone and shared."""

from __future__ import annotations

import numpy as np
import pytest

from ellm_sgl.memory import PageTable, PoolShape


@pytest.fixture
def table() -> PageTable:
    """Request 7 maps blocks 1 to 3, request 9 blocks 1 and 4; all computed, all on the device."""
    table = PageTable(PoolShape(num_layers=4, layer_group=2, block_tokens=4), 8, 16)
    blocks = table.allocate(4)
    table.place(blocks)
    table.map(7, blocks[:3], 12)
    table.map(9, blocks[[0, 3]], 7)
    table.note_computed([7, 9], [12, 7])
    return table


def lacking(table: PageTable) -> list[int]:
    table.check_integrity()
    return table.lacking_blocks([7, 9]).tolist()


def test_a_block_is_missed_once_in_however_many_groups(table: PageTable) -> None:
    table.evict(2, slice(0, 1))
    table.evict(2, slice(1, 2))
    table.evict(2)
    assert lacking(table) == [1, 0]
    table.place([2])
    assert lacking(table) == [0, 0]


def test_a_shared_block_is_missed_by_all_that_map_it(table: PageTable) -> None:
    table.evict(1)
    table.evict(4)
    assert lacking(table) == [1, 2]
    assert table.missing_of_each([9, 7]).tolist() == [1, 4, 1]
    table.place([1])
    assert lacking(table) == [0, 1]


def test_it_is_one_requests_affair_again_when_the_other_has_left(table: PageTable) -> None:
    table.unmap(9)
    table.evict(1)
    assert table.lacking_blocks([7]).tolist() == [1]
    table.map(9, [1, 4], 7)
    table.unmap(7)
    table.place([1])
    assert table.lacking_blocks([9]).tolist() == [0]
    table.check_integrity()


def test_blocks_without_units_are_missed_from_the_start(table: PageTable) -> None:
    new = table.allocate(2)
    table.extend(7, 13, new[:1])
    table.extend_each([9], np.array([4], np.int32))
    table.extend_each([9], new[1:])
    assert lacking(table) == [1, 1]
    assert table.uncached_tokens([7, 9]).tolist() == [1, 1]


def test_adopted_units_change_who_misses_what(table: PageTable) -> None:
    copy = table.allocate(1)
    table.place(copy)
    table.map(11, copy, 4)
    table.note_computed([11], [4])
    table.evict(2)
    assert lacking(table) == [1, 0]
    table.adopt(2, int(copy[0]))
    assert lacking(table) == [0, 0]
    assert table.lacking_blocks([11]).tolist() == [1]
