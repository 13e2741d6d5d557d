"""Blocks evicted many at once: the host keeps what it would of one after the other, in one copy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ellm_sgl.memory import NONE, IntegrityError, PageTable, PoolShape
from ellm_sgl.memory.eviction import Evictor
from ellm_sgl.memory.totals import Totals

SHAPE = PoolShape(num_layers=6, layer_group=2, block_tokens=4)
GROUPS = SHAPE.num_groups
BLOCKS = 6


class Scene:
    """Requests 1 and 2 of three blocks each; request 3 shares the first one's first two."""

    def __init__(self, host_units: int) -> None:
        self.table = PageTable(SHAPE, 12, 12 * GROUPS, host_units)
        self.totals = Totals()
        self.copies: list[tuple[list[int], list[int]]] = []
        self.evictor = Evictor(self.table, self.totals, self._save if host_units else None)
        ids = self.table.allocate(BLOCKS)
        self.table.place(ids)
        self.table.map(1, ids[:3], 12)
        self.table.map(2, ids[3:], 12)
        self.table.map(3, ids[:2], 8)
        self.table.note_computed([1, 2, 3], [12, 12, 8])

    def _save(self, device: np.ndarray, host: np.ndarray) -> None:
        self.copies.append((device.tolist(), host.tolist()))

    def copied(self, block: int) -> int:
        return int(np.count_nonzero(self.table.host.units[block] != NONE))

    def check(self) -> None:
        self.table.check_integrity()
        for device, host in self.copies:
            assert len(set(device)) == len(device) == len(set(host)) == len(host)


def test_all_are_copied_at_once() -> None:
    scene = Scene(host_units=12 * GROUPS)
    units = scene.table.units[[4, 5]].ravel().tolist()
    scene.evictor.blocks(np.array([4, 5], np.int32))
    scene.check()
    assert [device for device, _ in scene.copies] == [units]
    assert scene.copies[0][1] == scene.table.host.units[[4, 5]].ravel().tolist()
    assert scene.totals.saved_units == scene.totals.evicted_units == 2 * GROUPS
    scene.table.place([4, 5])
    scene.evictor.blocks(np.array([4, 5], np.int32))  # for free: the host has them
    assert len(scene.copies) == 1 and scene.totals.evicted_units == 4 * GROUPS


@given(host_units=st.integers(1, 20), order=st.permutations([1, 2, 3, 4, 5, 6]))
def test_the_first_ones_are_kept_where_the_host_has_no_room_for_all(
    host_units: int, order: list[int]
) -> None:
    scene = Scene(host_units)
    scene.evictor.blocks(np.array(order, np.int32))
    scene.check()
    kept = [scene.copied(block) for block in order]
    expected = [min(max(host_units - i * GROUPS, 0), GROUPS) for i in range(len(order))]
    assert kept == expected and scene.table.used_units == 0


def test_what_leaves_with_others_keeps_its_own_copies() -> None:
    """They are of what is on the device as well, when the others look for room."""
    scene = Scene(host_units=GROUPS)
    scene.evictor.blocks(np.array([6], np.int32))
    scene.table.place([6])
    scene.evictor.blocks(np.array([5, 6], np.int32))
    scene.check()
    assert (scene.copied(5), scene.copied(6)) == (0, GROUPS)
    assert scene.table.depth([6]).tolist() == [0]


@given(count=st.integers(1, BLOCKS * GROUPS), shared=st.booleans(), host=st.sampled_from([0, 36]))
def test_as_many_units_as_wanted_leave_the_last_block_from_its_lowest_group(
    count: int, shared: bool, host: int
) -> None:
    scene = Scene(host)
    table = scene.table
    before = table.used_units
    scene.evictor.units(count, shared, {})
    scene.check()
    possible = before if shared else 4 * GROUPS  # of blocks that only one request uses
    freed = min(count, possible)
    assert before - table.used_units == freed == scene.totals.evicted_units
    assert scene.totals.saved_units == (freed if host else 0)
    missing = table.units[1 : BLOCKS + 1] == NONE
    partly = missing.any(axis=1) & ~missing.all(axis=1)
    assert partly.sum() == (freed % GROUPS > 0)
    for row in missing[partly]:
        assert row.tolist() == sorted(row.tolist(), reverse=True)
    if not shared:
        assert not missing[:2].any()


def test_a_block_that_nobody_has_is_refused_before_anything_changes() -> None:
    table = Scene(host_units=0).table
    with pytest.raises(IntegrityError, match="not allocated"):
        table.evict_each(np.array([1, 9], np.int32))
    with pytest.raises(IntegrityError, match="more than once"):
        table.evict_each(np.array([1, 1], np.int32))
    assert table.missing_units == 0
    table.check_integrity()
