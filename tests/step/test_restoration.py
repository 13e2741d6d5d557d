"""What is fetched, what is computed again, and where fetched units go."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ellm_sgl.memory import NONE, ElasticMemory, PageTable, PoolShape
from ellm_sgl.policies.work_split import CONFIGURATIONS, RECOMPUTE_ALL
from ellm_sgl.step import Missing, plan_restoration

SHAPE = PoolShape(num_layers=4, layer_group=1, block_tokens=4)
GROUPS = 4


def scene(blocks: int = 3, spare_units: int = 40, host_units: int = 100) -> PageTable:
    """Sequence 0 with `blocks` blocks on the device, and units to spare."""
    table = PageTable(SHAPE, 20, blocks * GROUPS + spare_units, host_units)
    ids = table.allocate(blocks)
    table.place(ids)
    table.map(0, ids, blocks * 4)
    table.note_computed([0], [blocks * 4])
    return table


def save_and_evict(table: PageTable, block: int, saved: slice = slice(None)) -> None:
    groups = np.arange(GROUPS, dtype=np.int32)[saved]
    table.keep_copies(block, groups)
    table.evict(block)


def test_nothing_missing_nothing_to_do() -> None:
    table = scene()
    restoration = plan_restoration(table, Missing.of(table, [0]), 0.5, slots=2)
    assert restoration.transfers == () and len(restoration.borrowed) == 0
    assert restoration.depths_of(table.blocks_of(0)).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("share", "depth"), [(0.0, 0), (0.25, 1), (0.4, 2), (0.5, 2), (2 / 3, 3), (1.0, 4)]
)
def test_layers_are_split_by_the_share_recomputed(share: float, depth: int) -> None:
    table = scene()
    block = int(table.blocks_of(0)[1])
    save_and_evict(table, block)
    restoration = plan_restoration(table, Missing.of(table, [0]), share, slots=2)
    assert restoration.depths_of(table.blocks_of(0)).tolist() == [0, depth, 0]
    fetched = [len(t.sources) for t in restoration.transfers] or [0] * GROUPS
    assert fetched == [0] * depth + [1] * (GROUPS - depth)


@pytest.mark.parametrize(("saved", "depth"), [(slice(0, 2), 4), (slice(2, 4), 2), (slice(0, 0), 4)])
def test_what_the_host_lacks_is_recomputed_as_far_as_needed(saved: slice, depth: int) -> None:
    table = scene()
    save_and_evict(table, int(table.blocks_of(0)[0]), saved)
    restoration = plan_restoration(table, Missing.of(table, [0]), 0.0, slots=2)
    assert restoration.depths_of(table.blocks_of(0)).tolist() == [depth, 0, 0]


def test_a_block_placed_for_good_is_fetched_into_its_own_units() -> None:
    table = scene()
    block = int(table.blocks_of(0)[0])
    save_and_evict(table, block)
    missing = Missing.of(table, [0])
    table.place([block])
    restoration = plan_restoration(table, missing, 0.0, slots=2)
    assert len(restoration.borrowed) == 0
    targets = [t.targets.tolist() for t in restoration.transfers]
    assert targets == [[u] for u in table.units[block].tolist()]


@pytest.mark.parametrize("blocks", [1, 5])
@pytest.mark.parametrize("layers", CONFIGURATIONS)
def test_the_staging_overhead_is_what_a_step_holds_whatever_the_split(
    blocks: int, layers: tuple[int, int]
) -> None:
    shape = PoolShape(num_layers=32, layer_group=4, block_tokens=4)
    table = PageTable(shape, 20, 20 * shape.num_groups, 20 * shape.num_groups)
    elastic = ElasticMemory(table, 1000, lambda tokens: 0, save=lambda _device, _host: None)
    table.map(0, elastic.allocate(blocks), blocks * 4)
    table.note_computed([0], [blocks * 4])
    assert elastic.make_room(20 * shape.num_groups)  # all of it goes to the host
    share = layers[1] / sum(layers)
    restoration = plan_restoration(table, Missing.of(table, [0]), share, elastic.slots)
    held = len(restoration.borrowed) / shape.num_groups  # in blocks of all layers
    assert elastic.staging_overhead() == 2 / 8 == 0.25
    assert held == (0.25 * blocks if layers != RECOMPUTE_ALL else 0.0)


def test_without_room_blocks_are_recomputed_instead() -> None:
    table = scene(blocks=3, spare_units=0)
    blocks = table.blocks_of(0)
    save_and_evict(table, int(blocks[0]))
    save_and_evict(table, int(blocks[1]))
    table.limit_units(4 + 2)  # one block is resident: two units are free, one for each slot
    restoration = plan_restoration(table, Missing.of(table, [0]), 0.0, slots=2)
    assert sorted(restoration.depths_of(blocks).tolist()) == [0, 0, 4]
    assert len(restoration.borrowed) == 2


@given(
    events=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, GROUPS), st.integers(0, GROUPS)), max_size=6
    ),
    spare=st.integers(0, 30),
    share=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    slots=st.integers(1, 3),
    placed=st.integers(0, 5),
)
def test_every_missing_unit_is_restored_once_and_the_ring_never_collides(
    events: list[tuple[int, int, int]], spare: int, share: float, slots: int, placed: int
) -> None:
    table = scene(blocks=6, spare_units=spare)
    blocks = table.blocks_of(0).copy()
    for which, first, last in events:
        block = int(blocks[which])
        unsaved = (table.host.units[block] == NONE) & (table.units[block] != NONE)
        unsaved[:first] = False
        table.keep_copies(block, np.flatnonzero(unsaved).astype(np.int32))
        table.evict(block, slice(0, last))
    lacked = table.units == NONE
    missing = Missing.of(table, [0])
    table.place(blocks[:placed])
    free = table.free_units
    restoration = plan_restoration(table, missing, share, slots)
    depths = restoration.depths_of(blocks)
    in_use: list[set[int]] = []
    for group in range(GROUPS):
        targets = restoration.transfers[group].targets.tolist() if restoration.transfers else []
        assert len(set(targets)) == len(targets)
        in_use.append(set(targets))
        fetched = lacked[blocks, group] & (depths <= group)
        assert fetched.sum() == len(targets)
        assert (table.host.units[blocks[fetched], group] != NONE).all()
        staged = restoration.staged_units(blocks)[:, group]
        for i in np.flatnonzero(fetched):
            own = table.units[blocks[i], group]
            assert (staged[i] if own == NONE else own) in targets
        resident = set(table.units[blocks, group].tolist()) - {NONE}
        assert not (set(staged.tolist()) - {NONE}) & resident
    borrowed = set(restoration.borrowed.tolist())
    for group in range(GROUPS):  # groups in flight together use different borrowed units
        for other in range(group + 1, min(group + slots, GROUPS)):
            assert not in_use[group] & in_use[other] & borrowed
    table.return_units(restoration.borrowed)
    assert table.free_units == free
    table.check_integrity()
