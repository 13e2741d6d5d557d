"""The page table by example: blocks, sequences, units; what it refuses leaves no trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ellm_sgl.memory import NONE, IntegrityError, OutOfBlocksError, PageTable, PoolShape
from ellm_sgl.memory.page_table import RESERVED

SHAPE = PoolShape(num_layers=5, layer_group=2, block_tokens=4)  # groups of 2, 2 and 1 layers


def make_table(num_blocks: int = 6, num_units: int = 18) -> PageTable:
    return PageTable(SHAPE, num_blocks, num_units)


def add_sequence(table: PageTable, seq_id: int, length: int, placed: bool = True) -> list[int]:
    """A new request of `length` tokens; its blocks in token order."""
    blocks = table.allocate(SHAPE.blocks_for(length))
    if placed:
        table.place(blocks)
    table.map(seq_id, blocks, length)
    result: list[int] = blocks.tolist()
    return result


def everything(table: PageTable) -> Any:
    """All that callers can see of a table."""
    return (
        table.units.tolist(),
        table.references(range(table.num_blocks + 1)).tolist(),
        sorted(table.free_block_ids.tolist()),
        {s: (table.blocks_of(s).tolist(), table.length_of(s)) for s in table.sequence_ids},
        table.statistics(),
    )


# -- blocks ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_blocks", "num_units"), [(0, 18), (6, 2)])
def test_a_pool_without_room_for_one_block_is_refused(num_blocks: int, num_units: int) -> None:
    with pytest.raises(ValueError, match="at least one block"):
        PageTable(SHAPE, num_blocks, num_units)


@pytest.mark.parametrize("committed", [SHAPE.num_groups - 1, 21, -1])
def test_units_that_a_table_cannot_begin_with(committed: int) -> None:
    with pytest.raises(ValueError, match=f"{committed} units committed, of 3 to 20"):
        PageTable(SHAPE, 10, 20, committed=committed)


def test_new_blocks_are_distinct_referenced_once_and_empty() -> None:
    table = make_table()
    blocks = table.allocate(6)
    assert sorted(blocks) == [1, 2, 3, 4, 5, 6]
    assert (table.references(blocks) == 1).all() and (table.units[blocks] == NONE).all()


def test_allocating_more_than_is_left_changes_nothing() -> None:
    table = make_table()
    add_sequence(table, seq_id=0, length=10)
    before = everything(table)
    with pytest.raises(OutOfBlocksError, match="4 blocks asked for, 3 left"):
        table.allocate(4)
    assert everything(table) == before


@pytest.mark.parametrize("blocks", [[1, 1, 1], [2, 2], [6], [1, 2, 6], [RESERVED]])
def test_releasing_what_is_not_held_changes_nothing(blocks: list[int]) -> None:
    table = make_table()
    add_sequence(table, seq_id=0, length=4)  # block 1: two references
    table.allocate(1)  # block 2: one reference
    before = everything(table)
    with pytest.raises(IntegrityError, match="not held"):
        table.release(blocks)
    assert everything(table) == before


def test_a_block_is_free_at_once_when_its_last_reference_goes() -> None:
    table = make_table()
    blocks = add_sequence(table, seq_id=0, length=8)
    table.release(blocks)
    assert (table.free_blocks, table.free_units) == (4, 12)
    table.unmap(0)
    assert (table.free_blocks, table.free_units) == (6, 18)


def test_a_block_used_again_remembers_nothing() -> None:
    table = make_table(num_blocks=1)
    for length in (4, 1):
        blocks = add_sequence(table, seq_id=0, length=length)
        table.note_computed([0], [length])
        assert table._computed[blocks].tolist() == [length]
        table.unmap(0)
        table.release(blocks)


def test_clear_frees_everything() -> None:
    table = make_table()
    add_sequence(table, seq_id=0, length=8, placed=False)
    table.clear()
    assert everything(table) == everything(make_table())


# -- sequences ------------------------------------------------------------------------------


def test_mapping_again_replaces_what_was_mapped() -> None:
    table = make_table()
    first, second, third = add_sequence(table, seq_id=0, length=12)
    table.map(0, [first, second], 8)
    assert table.references([first, second, third]).tolist() == [2, 2, 1]


@pytest.mark.parametrize("length", [0, 4, 9])
def test_mapping_the_wrong_number_of_blocks_changes_nothing(length: int) -> None:
    table = make_table()
    blocks = add_sequence(table, seq_id=0, length=8)
    before = everything(table)
    with pytest.raises(ValueError, match=f"{length} tokens need"):
        table.map(0, blocks, length)
    assert everything(table) == before


@pytest.mark.parametrize(("length", "added"), [(8, 1), (9, 0), (9, 2), (4, 0)])
def test_extending_by_the_wrong_number_of_blocks_changes_nothing(length: int, added: int) -> None:
    table = make_table()
    add_sequence(table, seq_id=0, length=7)
    blocks = table.allocate(added)
    before = everything(table)
    with pytest.raises(ValueError, match=f"{length} tokens need"):
        table.extend(0, length, blocks)
    assert everything(table) == before


def test_a_token_in_another_block_than_the_one_being_filled_changes_nothing() -> None:
    table = make_table()
    full = add_sequence(table, seq_id=0, length=8)
    filling = add_sequence(table, seq_id=1, length=7)
    blocks = np.array([*table.allocate(1), full[-1]], np.int32)
    before = everything(table)
    with pytest.raises(ValueError, match=f"lies in block {filling[-1]}, not in {full[-1]}"):
        table.extend_each([0, 1], blocks)
    assert everything(table) == before


def test_extending_an_unknown_sequence_is_refused() -> None:
    with pytest.raises(KeyError):
        make_table().extend(0, 1, [1])
    with pytest.raises(KeyError):
        make_table().extend_each([0], np.array([1], np.int32))


def test_unmapping_an_unknown_sequence_does_nothing() -> None:
    table = make_table()
    table.unmap(0)
    assert everything(table) == everything(make_table())


def test_a_sequence_grows_token_by_token() -> None:
    table = make_table()
    add_sequence(table, seq_id=0, length=1)
    for length in range(2, 25):
        table.extend(0, length, table.allocate(1) if length % 4 == 1 else ())
        table.note_computed([0], [1])
        assert table._computed[table.blocks_of(0)][-1] == (length - 1) % 4 + 1
    assert len(set(table.blocks_of(0).tolist())) == 6


# -- units ----------------------------------------------------------------------------------


def test_place_completes_blocks_in_the_order_given_while_units_last() -> None:
    table = make_table(num_units=8)
    first, second, third = table.allocate(3)
    assert table.place([third, first, second]).tolist() == [third, first]
    assert (table.units[second] == NONE).all() and table.free_units == 2


def test_place_gives_a_block_only_what_it_misses() -> None:
    table = make_table(num_units=4)
    first, second = table.allocate(2)
    table.place([first])
    table.evict(first, slice(0, 2))
    kept = table.units[first, 2]
    assert table.place([first, second]).tolist() == [first]
    assert table.units[first, 2] == kept and table.free_units == 1


def test_place_over_the_limit_still_names_the_complete_blocks() -> None:
    table = make_table()
    blocks = table.allocate(3)
    table.place(blocks[:2])
    table.limit_units(3)
    assert table.place(blocks).tolist() == blocks[:2].tolist()


def test_evict_drops_the_groups_asked_for() -> None:
    table = make_table()
    (block,) = add_sequence(table, seq_id=0, length=4)
    assert table.evict(block, slice(1, 3)) == 2
    assert (table.units[block] == NONE).tolist() == [False, True, True]
    assert table.evict(block) == 1 and table.evict(block) == 0


def test_evict_of_the_reserved_block_is_refused() -> None:
    with pytest.raises(IntegrityError, match="not allocated"):
        make_table().evict(RESERVED)


def test_adopt_moves_only_what_the_destination_lacks() -> None:
    table = make_table()
    destination, source = table.allocate(2)
    table.place([destination, source])
    for seq_id, block in enumerate((destination, source)):
        table.map(seq_id, [block], 4)
        table.note_computed([seq_id], [4])
    table.evict(destination, slice(0, 2))
    table.evict(source, slice(0, 1))
    moved = int(table.units[source, 1])
    assert table.adopt(destination, source) == 1
    assert table.units[destination, 1] == moved
    assert (table.units[source] == NONE).tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("missing", "depth"), [([], 0), ([0], 1), ([1], 2), ([0, 1], 2), ([2], 3), ([0, 2], 3)]
)
def test_depth_reaches_up_to_the_highest_missing_group(missing: list[int], depth: int) -> None:
    table = make_table()
    complete, block = table.allocate(2)
    table.place([complete, block])
    for group in missing:
        table.evict(block, slice(group, group + 1))
    assert table.depth([block, complete]).tolist() == [depth, 0]


# -- the unit limit -------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [2, 19])
def test_a_limit_below_one_block_or_above_the_pool_is_refused(limit: int) -> None:
    with pytest.raises(ValueError, match="between 3 and 18"):
        make_table().limit_units(limit)


def test_lowering_the_limit_takes_nothing_away() -> None:
    table = make_table()
    blocks = add_sequence(table, seq_id=0, length=24)
    table.limit_units(6)
    assert table.free_units == -12 and (table.units[blocks] != NONE).all()
    assert table.num_units == 18


def test_a_raised_limit_can_be_used_at_once() -> None:
    table = make_table()
    table.limit_units(3)
    blocks = table.allocate(2)
    assert len(table.place(blocks)) == 1
    table.limit_units(6)
    assert np.array_equal(table.place(blocks), blocks)
