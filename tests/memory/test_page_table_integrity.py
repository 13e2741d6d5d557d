"""`check_integrity` notices every kind of damage it claims to."""

from __future__ import annotations

import pytest

from ellm_sgl.memory import NONE, IntegrityError, PageTable, PoolShape


@pytest.fixture
def table() -> PageTable:
    """Sequence 0 maps blocks 1 and 2; block 3 is owned only; block 4 is free. Units to spare."""
    table = PageTable(PoolShape(num_layers=4, layer_group=2, block_tokens=4), 4, 10)
    blocks = table.allocate(3)
    table.place(blocks)
    table.map(0, blocks[:2], 7)
    table.check_integrity()
    return table


def test_a_unit_owned_twice(table: PageTable) -> None:
    table._units[1, 0] = table.units[2, 0]
    with pytest.raises(IntegrityError, match="owned more than once"):
        table.check_integrity()


def test_a_unit_both_owned_and_free(table: PageTable) -> None:
    table._units[1, 0] = table._free_units.ids[0]
    with pytest.raises(IntegrityError, match="owned more than once"):
        table.check_integrity()


def test_a_lost_unit(table: PageTable) -> None:
    table._units[1, 0] = NONE
    table.missing_units += 1
    with pytest.raises(IntegrityError, match="some unit is lost"):
        table.check_integrity()


def test_a_unit_that_does_not_exist(table: PageTable) -> None:
    table._units[1, 0] = 11
    with pytest.raises(IntegrityError, match="units"):
        table.check_integrity()


def test_a_block_twice_on_the_free_list(table: PageTable) -> None:
    table._free_blocks.give(table.free_block_ids[:1].copy())
    with pytest.raises(IntegrityError, match="free list more than once"):
        table.check_integrity()


def test_a_referenced_block_on_the_free_list(table: PageTable) -> None:
    table._refs[4] = 1
    with pytest.raises(IntegrityError, match="a free block is referenced"):
        table.check_integrity()


def test_a_lost_block(table: PageTable) -> None:
    table._free_blocks.take(1)
    with pytest.raises(IntegrityError, match="a held one is free"):
        table.check_integrity()


def test_a_free_block_with_units(table: PageTable) -> None:
    table._units[4, 0], table._units[3, 0] = table.units[3, 0], NONE
    with pytest.raises(IntegrityError, match="free block still holds units"):
        table.check_integrity()


def test_a_wrong_count_of_missing_units(table: PageTable) -> None:
    table.missing_units = 1
    with pytest.raises(IntegrityError, match="count of missing units"):
        table.check_integrity()


def test_a_sequence_longer_than_its_blocks(table: PageTable) -> None:
    table._sequences[0].length = 9
    with pytest.raises(IntegrityError, match="sequence 0: blocks do not fit"):
        table.check_integrity()


def test_a_sequence_with_blocks_to_spare(table: PageTable) -> None:
    table._sequences[0].length = 4
    with pytest.raises(IntegrityError, match="sequence 0: blocks do not fit"):
        table.check_integrity()


def test_a_sequence_without_references_to_its_blocks(table: PageTable) -> None:
    table.release([1, 2])  # the owner's
    table._sequences[1] = table._sequences[0]
    with pytest.raises(IntegrityError, match="holds no reference to"):
        table.check_integrity()


@pytest.mark.parametrize("block", [1, 3])
def test_a_reference_that_nobody_holds(table: PageTable, block: int) -> None:
    table._refs[block] += 1
    with pytest.raises(IntegrityError, match="neither a sequence's nor the owner's"):
        table.check_integrity()


def test_a_wrong_count_of_units_that_a_block_lacks(table: PageTable) -> None:
    table._missing_groups[1] += 1
    with pytest.raises(IntegrityError, match="count of units that a block lacks"):
        table.check_integrity()


def test_a_wrong_count_of_blocks_that_a_request_lacks(table: PageTable) -> None:
    table._sequences[0].lacking += 1
    with pytest.raises(IntegrityError, match="sequence 0: lacks 0 blocks, and not 1"):
        table.check_integrity()


def test_a_block_mapped_by_another_than_counted(table: PageTable) -> None:
    table._lacking._mapper[1] += 1
    with pytest.raises(IntegrityError, match="who maps them is not as counted"):
        table.check_integrity()
