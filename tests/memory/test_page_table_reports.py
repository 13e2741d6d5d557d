"""What the page table tells: the map table, uncached tokens, statistics."""

from __future__ import annotations

import pytest

from ellm_sgl.memory import PageTable, PoolShape

SHAPE = PoolShape(num_layers=5, layer_group=2, block_tokens=4)


@pytest.fixture
def table() -> PageTable:
    """Sequence 7 has 10 tokens in blocks 1, 2, 3, all placed; six blocks in all."""
    table = PageTable(SHAPE, num_blocks=6, num_units=12)
    blocks = table.allocate(3)
    table.place(blocks)
    table.map(7, blocks, 10)
    return table


def test_uncached_tokens_count_a_block_once_however_much_it_misses(table: PageTable) -> None:
    assert table.uncached_tokens([7]) == 0
    table.evict(1, slice(0, 1))
    assert table.uncached_tokens([7]) == 4
    table.evict(1)
    assert table.uncached_tokens([7]) == 4


def test_uncached_tokens_count_the_last_block_as_far_as_it_is_filled(table: PageTable) -> None:
    table.evict(3)
    assert table.uncached_tokens([7]) == 2


def test_uncached_tokens_are_the_sequences_own(table: PageTable) -> None:
    """A block that another sequence filled further counts as far as this one uses it."""
    table.map(8, [1], 3)
    table.evict(1)
    assert table.uncached_tokens([7, 8]).tolist() == [4, 3]


def test_a_prefix_that_only_the_host_has_holds_no_units(table: PageTable) -> None:
    """Blocks 4, 5 and 6 are the tree's, and nobody's but its."""
    idle = 2 * SHAPE.block_tokens
    table.evict(1)
    table.evict(2)  # of a request: not idle
    for block in table.allocate(2).tolist():
        table.place([block])
        table.note_read([block])
    assert table.idle_units(idle) == 2 * SHAPE.num_groups
    table.evict(4)
    table.allocate(1)  # new, and nobody's yet
    assert table.missing_units == 12 and table.idle_units(idle) == SHAPE.num_groups
    table.evict(5, slice(0, 1))
    assert table.idle_units(idle) == SHAPE.num_groups - 1 and table.any_idle_unit()
    table.map(8, [5], 4)
    assert table.idle_units(idle - 4) == table.idle_units(0) == 0 and not table.any_idle_unit()


def test_fragmentation_is_the_share_of_empty_places(table: PageTable) -> None:
    assert table.statistics().fragmentation == pytest.approx(2 / 12)
    table.extend(7, 12)
    assert table.statistics().fragmentation == 0


def test_fragmentation_is_below_one_block_per_sequence(table: PageTable) -> None:
    for seq_id, length in ((8, 1), (9, 5)):
        table.map(seq_id, table.allocate(SHAPE.blocks_for(length)), length)
    places = 6 * SHAPE.block_tokens
    assert table.statistics().fragmentation == pytest.approx((2 + 3 + 3) / places)


def test_occupancy_is_the_share_of_units_in_use(table: PageTable) -> None:
    assert table.statistics().occupancy == pytest.approx(9 / 12)
    table.evict(1, slice(0, 1))
    assert table.statistics().occupancy == pytest.approx(8 / 12)


def test_occupancy_exceeds_one_while_a_lowered_limit_is_exceeded(table: PageTable) -> None:
    table.limit_units(6)
    statistics = table.statistics()
    assert (statistics.units_total, statistics.units_free) == (6, 0)
    assert statistics.occupancy == pytest.approx(9 / 6)


def test_a_shared_prefix_counts_once_per_sequence_and_its_units_once(table: PageTable) -> None:
    table.map(8, [1, 2], 8)
    table.evict(1)
    statistics = table.statistics()
    assert (statistics.sequences, statistics.mapped_tokens) == (2, 18)
    assert (statistics.uncached_tokens, statistics.missing_units) == (8, 3)
    assert (statistics.units_free, statistics.blocks_free) == (6, 3)


def test_an_empty_table_is_not_fragmented() -> None:
    assert PageTable(SHAPE, 6, 12).statistics().fragmentation == 0


def test_missing_blocks_of_several_requests_are_named_once(table: PageTable) -> None:
    table.map(8, [1, 2], 8)
    assert table.missing_blocks([7, 8]).tolist() == []
    table.evict(2, slice(0, 1))
    table.evict(3)
    assert table.missing_blocks([8, 7]).tolist() == [2, 3]
    assert table.missing_blocks([8]).tolist() == [2]
    assert table.missing_blocks([]).tolist() == []


def test_tables_are_alike_where_the_same_blocks_are_in_the_same_units() -> None:
    def table(order: tuple[int, ...]) -> PageTable:
        made = PageTable(SHAPE, 8, 8 * SHAPE.num_groups, 8 * SHAPE.num_groups)
        blocks = made.allocate(2)
        made.place(blocks[list(order)])
        made.map(0, blocks, 2 * SHAPE.block_tokens)
        return made

    same, other = table((0, 1)), table((1, 0))
    assert same.digest() == table((0, 1)).digest() != other.digest()
    assert same.statistics() == other.statistics(), "which do not tell"
