"""The host tier's bookkeeping: one copy per unit for a block's life, nothing lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ellm_sgl.memory import NONE, IntegrityError, PageTable, PoolShape

SHAPE = PoolShape(num_layers=6, layer_group=2, block_tokens=4)
BOTH = np.array([0, 1], np.int32)


def table_with(
    host_units: int, blocks: int = 4, hidden_groups: int = 0
) -> tuple[PageTable, list[int]]:
    """A table and `blocks` placed blocks of it, computed in full."""
    table = PageTable(SHAPE, 8, blocks * 3, host_units, hidden_groups)
    ids = table.allocate(blocks)
    table.place(ids)
    compute(table, ids.tolist())
    return table, ids.tolist()


def compute(table: PageTable, blocks: list[int]) -> None:
    """As the forward pass of a request that has left again."""
    table.map(99, blocks, 4 * len(blocks))
    table.note_computed([99], [4 * len(blocks)])
    table.unmap(99)


def test_a_copy_stays_when_the_block_leaves_the_device_and_when_it_returns() -> None:
    table, (block, *_) = table_with(host_units=6)
    kept = table.keep_copies(block, BOTH)
    assert kept.tolist() == [0, 1]
    copies = table.host.units[block].tolist()
    table.evict(block)
    table.place([block])
    assert table.host.units[block].tolist() == copies and copies[2] == NONE
    table.check_integrity()


def test_only_what_is_nowhere_needs_recomputation() -> None:
    table, (block, other, *_) = table_with(host_units=6)
    table.keep_copies(block, BOTH)
    table.evict(block)
    table.evict(other)
    assert table.depth([block, other]).tolist() == [3, 3]
    table.place([block])
    assert table.depth([block]).tolist() == [0]
    table.evict(block, slice(0, 2))
    assert table.depth([block]).tolist() == [0]  # both groups are on the host


def test_a_request_is_told_what_of_its_uncached_tokens_the_host_has() -> None:
    rng = np.random.default_rng(0)
    table = PageTable(SHAPE, 40, 40 * 3, 30)
    for seq_id in range(5):
        blocks = table.allocate(6)
        table.place(blocks)
        table.map(seq_id, blocks, 22)
        table.note_computed([seq_id], [22])
        for block in blocks[:5].tolist():  # the last one is not full
            table.keep_copies(block, np.flatnonzero(rng.random(3) < 0.8).astype(np.int32))
            if rng.random() < 0.7:
                table.evict(block, slice(0, int(rng.integers(1, 4))))
    expected = [
        sum(
            4
            for block in table.blocks_of(seq_id).tolist()
            if (lacks := table.units[block] == NONE).any()
            and (table.host.units[block][lacks] != NONE).all()
        )
        for seq_id in range(5)
    ]
    assert table.uncached_on_host(range(5)).tolist() == expected
    assert 0 < sum(expected) < table.uncached_tokens(range(5)).sum()
    assert table.uncached_on_host([]).tolist() == []


def test_a_full_tier_keeps_what_it_can() -> None:
    table, (block, other, *_) = table_with(host_units=3)
    table.keep_copies(block, BOTH)
    table.evict(block)
    kept = table.keep_copies(other, np.array([0, 1, 2], np.int32))
    assert kept.tolist() == [0] and table.host.free_units == 0


def test_copies_of_what_is_on_the_device_make_way() -> None:
    table, (block, other, *_) = table_with(host_units=2)
    table.keep_copies(block, BOTH)  # block is on the device as well
    kept = table.keep_copies(other, BOTH)
    assert kept.tolist() == [0, 1] and (table.host.units[block] == NONE).all()
    table.check_integrity()


def test_a_block_that_leaves_does_not_lose_its_own_copies() -> None:
    """They are of what is on the device as well, but no more in a moment."""
    table, (block, other, *_) = table_with(host_units=3)
    upper, rest = np.array([1, 2], np.int32), np.array([0], np.int32)
    table.keep_copies(block, upper)
    table.keep_copies(other, rest)
    assert table.keep_copies(block, rest).tolist() == [0]  # in the place of the other's
    table.evict(block)
    assert table.depth([block]).tolist() == [0] and (table.host.units[other] == NONE).all()
    table.place([block])
    table.keep_copies(other, rest)  # in the place of one of the first's
    table.evict(other)
    assert table.keep_copies(block, rest).tolist() == []
    table.evict(block)
    assert table.depth([block]).tolist() == [1]
    table.check_integrity()


def test_copies_of_what_came_back_make_way() -> None:
    table, (block, other, last, *_) = table_with(host_units=4)
    for evicted in (block, other):
        table.keep_copies(evicted, BOTH)
        table.evict(evicted)
    assert table.keep_copies(last, BOTH).tolist() == []  # the only copies
    table.place([other])
    table.check_integrity()
    assert table.keep_copies(last, BOTH).tolist() == [0, 1]
    assert (table.host.units[other] == NONE).all() and (table.host.units[block, BOTH] != NONE).all()
    table.check_integrity()


def test_copies_of_what_was_adopted_make_way() -> None:
    table, (block, other, last, *_) = table_with(host_units=2)
    table.keep_copies(block, BOTH)
    table.evict(block)
    assert table.keep_copies(last, BOTH).tolist() == []
    table.adopt(block, other)
    table.check_integrity()
    assert table.keep_copies(last, BOTH).tolist() == [0, 1]


def test_copies_that_make_way_are_found_among_many_blocks() -> None:
    shape = PoolShape(num_layers=1, layer_group=1, block_tokens=1)
    table, only = PageTable(shape, 400, 400, host_units=200), np.zeros(1, np.int32)
    ids = table.allocate(400)
    table.place(ids)
    table.map(99, ids.tolist(), 400)
    table.note_computed([99], [400])
    for block in ids[:200].tolist():
        table.keep_copies(block, only)
        table.evict(block)
    table.place(ids[150:190])
    kept = 0
    for block in ids[200:250].tolist():
        kept += len(table.keep_copies(block, only))
        table.evict(block)
    assert kept == 40
    assert (table.host.units[ids[150:190]] == NONE).all()
    table.check_integrity()


def test_integrity_names_copies_that_would_not_be_found() -> None:
    table, (block, *_) = table_with(host_units=2)
    table.keep_copies(block, BOTH)
    table.host._suspects[block] = False
    with pytest.raises(IntegrityError, match="would not be found"):
        table.check_integrity()


def test_a_freed_block_gives_its_copies_back() -> None:
    table, (block, *_) = table_with(host_units=6)
    table.keep_copies(block, BOTH)
    table.evict(block)
    table.release([block])
    assert table.host.free_units == 6
    table.check_integrity()


def test_clearing_empties_the_host_too() -> None:
    table, (block, *_) = table_with(host_units=6)
    table.keep_copies(block, BOTH)
    table.clear()
    assert table.host.free_units == 6 and (table.host.units == NONE).all()


def test_without_a_host_tier_nothing_is_kept() -> None:
    table, (block, *_) = table_with(host_units=0)
    assert table.keep_copies(block, BOTH).tolist() == []


@pytest.mark.parametrize("fault", ["lost", "twice", "freed"])
def test_contradictions_are_found(fault: str) -> None:
    table, (block, other, *_) = table_with(host_units=6)
    table.keep_copies(block, BOTH)
    if fault == "lost":
        table.host._units[block, 0] = NONE
    elif fault == "twice":
        table.host._units[other, 0] = table.host.units[block, 0]
    else:
        table.host._units[8, 0] = table.host.units[block, 0]
        table.host._units[block, 0] = NONE
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
            compute(table, [blocks[which]])  # type: ignore[list-item]
        elif event == "keep":
            held = (table.units[block] != NONE) & (table.host.units[block] == NONE)
            held[:hidden_groups] = False
            table.keep_copies(block, np.flatnonzero(held).astype(np.int32))
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


def test_what_no_forward_pass_has_computed_is_not_copied() -> None:
    table = PageTable(SHAPE, 8, 24, host_units=6)
    blocks = table.allocate(2)
    table.place(blocks)
    table.map(7, blocks, 8)
    first, last = blocks.tolist()
    with pytest.raises(IntegrityError, match="has not been computed in full"):
        table.keep_copies(first, BOTH)
    table.extend(7, 8)
    table.map(7, blocks, 7)
    table.note_computed([7], [7])
    with pytest.raises(IntegrityError, match="has not been computed in full"):
        table.keep_copies(last, BOTH)
    assert table.keep_copies(first, BOTH).tolist() == [0, 1]
    table.extend(7, 8)
    table.note_computed([7], [1])
    assert table.keep_copies(last, BOTH).tolist() == [0, 1]
    table.check_integrity()


def test_a_copy_needs_a_unit_to_copy_from_and_is_made_once() -> None:
    table, (block, other, *_) = table_with(host_units=12)
    table.evict(block)
    with pytest.raises(IntegrityError, match="has no unit"):
        table.keep_copies(block, BOTH)
    table.keep_copies(other, BOTH)
    with pytest.raises(IntegrityError, match="which has one"):
        table.keep_copies(other, BOTH)
    table.check_integrity()
