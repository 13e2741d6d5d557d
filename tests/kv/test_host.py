"""The host tier's bookkeeping: one copy per unit for a block's life, nothing lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ellm_sgl.kv import NONE, IntegrityError, PageTable, Placement, PoolShape

SHAPE = PoolShape(num_layers=6, layer_group=2, block_tokens=4)
BOTH = np.array([0, 1], np.int32)


def table_with(
    host_units: int, blocks: int = 4, hidden_groups: int = 0
) -> tuple[PageTable, list[int]]:
    """A table and `blocks` placed blocks of it."""
    table = PageTable(SHAPE, 8, blocks * 3, host_units, hidden_groups)
    ids = table.allocate(blocks)
    table.place(ids)
    return table, ids.tolist()


def test_a_copy_stays_when_the_block_leaves_the_device_and_when_it_returns() -> None:
    table, (block, *_) = table_with(host_units=6)
    kept = table.host.keep(block, BOTH, table.units)
    assert kept.tolist() == [0, 1]
    copies = table.host.units[block].tolist()
    table.evict(block)
    table.place([block])
    assert table.host.units[block].tolist() == copies and copies[2] == NONE
    table.check_integrity()


def test_the_map_table_says_which_pool_a_unit_is_in() -> None:
    table, (block, *_) = table_with(host_units=6)
    table.map(7, [block], 4)
    table.host.keep(block, BOTH, table.units)
    assert table.lookup(7, 0, layer_id=0).placement is Placement.DEVICE
    table.evict(block)
    entry = table.lookup(7, 0, layer_id=2)
    assert entry.placement is Placement.HOST
    assert entry.physical_block_id == table.host.units[block, 1]
    entry = table.lookup(7, 0, layer_id=4)
    assert entry.placement is Placement.NONE and entry.physical_block_id == NONE


def test_only_what_is_nowhere_needs_recomputation() -> None:
    table, (block, other, *_) = table_with(host_units=6)
    table.host.keep(block, BOTH, table.units)
    table.evict(block)
    table.evict(other)
    assert table.depth([block, other]).tolist() == [3, 3]
    table.place([block])
    assert table.depth([block]).tolist() == [0]
    table.evict(block, slice(0, 2))
    assert table.depth([block]).tolist() == [0]  # both groups are on the host


def test_a_full_tier_keeps_what_it_can() -> None:
    table, (block, other, *_) = table_with(host_units=3)
    table.host.keep(block, BOTH, table.units)
    table.evict(block)
    kept = table.host.keep(other, np.array([0, 1, 2], np.int32), table.units)
    assert kept.tolist() == [0] and table.host.free_units == 0


def test_copies_of_what_is_on_the_device_make_way() -> None:
    table, (block, other, *_) = table_with(host_units=2)
    table.host.keep(block, BOTH, table.units)  # block is on the device as well
    kept = table.host.keep(other, BOTH, table.units)
    assert kept.tolist() == [0, 1] and (table.host.units[block] == NONE).all()
    table.check_integrity()


def test_a_freed_block_gives_its_copies_back() -> None:
    table, (block, *_) = table_with(host_units=6)
    table.host.keep(block, BOTH, table.units)
    table.evict(block)
    table.release([block])
    assert table.host.free_units == 6
    table.check_integrity()


def test_clearing_empties_the_host_too() -> None:
    table, (block, *_) = table_with(host_units=6)
    table.host.keep(block, BOTH, table.units)
    table.clear()
    assert table.host.free_units == 6 and (table.host.units == NONE).all()


def test_without_a_host_tier_nothing_is_kept() -> None:
    table, (block, *_) = table_with(host_units=0)
    assert table.host.keep(block, BOTH, table.units).tolist() == []


@pytest.mark.parametrize("fault", ["lost", "twice", "freed"])
def test_contradictions_are_found(fault: str) -> None:
    table, (block, other, *_) = table_with(host_units=6)
    table.host.keep(block, BOTH, table.units)
    if fault == "lost":
        table.host.units[block, 0] = NONE
    elif fault == "twice":
        table.host.units[other, 0] = table.host.units[block, 0]
    else:
        table.host.units[8, 0] = table.host.units[block, 0]
        table.host.units[block, 0] = NONE
    with pytest.raises(IntegrityError, match="host units"):
        table.check_integrity()


def test_hidden_states_of_all_groups_are_kept_or_none() -> None:
    table, (block, other, *_) = table_with(host_units=3, hidden_groups=2)
    host, both = table.host, np.array([block, other], np.int32)
    host.begin_hidden(both)
    assert host.free_units == 1 and (host.filling[both] != NONE).tolist() == [True, False]
    assert table.depth([block]).tolist() == [0] and (host.units[both] == NONE).all()
    host.finish_hidden(both[:1])
    table.evict(block, slice(0, 2))
    assert table.depth([block]).tolist() == [0]
    table.map(7, [block], 4)
    assert table.lookup(7, 0, layer_id=3).placement is Placement.HIDDEN
    assert host.units[block, :2].tolist() == [2, 3]  # slot 1 of two groups
    table.check_integrity()


def test_a_block_released_while_it_fills_gives_its_room_back() -> None:
    table, (block, *_) = table_with(host_units=6, hidden_groups=3)
    table.host.begin_hidden(np.array([block], np.int32))
    table.release([block])
    assert table.host.free_units == 6
    table.check_integrity()


EVENTS = st.tuples(
    st.sampled_from(["keep", "evict", "place", "release", "begin", "finish"]), st.integers(0, 5)
)


@given(st.lists(EVENTS), st.integers(0, 12), st.integers(0, 3))
def test_any_order_of_events_adds_up(
    events: list[tuple[str, int]], host_units: int, hidden_groups: int
) -> None:
    table = PageTable(SHAPE, 6, 12, host_units, hidden_groups)
    blocks: list[int | None] = [None] * 6
    for event, which in events:
        block = blocks[which]
        if block is None:
            blocks[which] = int(table.allocate(1)[0])
            table.place([blocks[which]])  # type: ignore[list-item]
        elif event == "keep":
            held = (table.units[block] != NONE) & (table.host.units[block] == NONE)
            held[:hidden_groups] = False
            table.host.keep(block, np.flatnonzero(held).astype(np.int32), table.units)
        elif event == "evict":
            table.evict(block)
        elif event == "place":
            table.place([block])
        elif event == "begin" and hidden_groups:
            table.host.begin_hidden(np.array([block], np.int32))
        elif event == "finish":
            if table.host.filling[block] != NONE:
                table.host.finish_hidden(np.array([block], np.int32))
        elif event == "release":
            table.release([block])
            blocks[which] = None
        table.check_integrity()
