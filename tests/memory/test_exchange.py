"""What neither the device nor the host has comes back, and others go to the host in its place."""

from __future__ import annotations

import numpy as np
import pytest

from ellm_sgl.memory import NONE, ElasticMemory, PageTable, PoolShape, UnderWay
from tests.engine.scene import BLOCK, GROUPS, SHAPE, Scene


def scene_of(room: int, host_blocks: int) -> tuple[Scene, list[int]]:
    """With a host tier of so many blocks; and the device units that were copied to it."""
    return over(PageTable(SHAPE, 100, room * GROUPS, host_units=host_blocks * GROUPS))


def over(table: PageTable) -> tuple[Scene, list[int]]:
    scene, copied = Scene(1), list[int]()
    scene.table = table

    def save(device: np.ndarray, host: np.ndarray) -> None:
        copied.extend(device.tolist())

    scene.elastic = ElasticMemory(scene.table, 1000, scene.reclaim, save, slots=1)
    return scene, copied


def lost(scene: Scene, seq_id: int) -> list[int]:
    """Which of a request's blocks are nowhere."""
    table = scene.table
    blocks = table.blocks_of(seq_id)
    return [i for i in scene.missing(seq_id) if table.lost(blocks[[i]]).any()]


def crowded(host_blocks: int) -> tuple[Scene, list[int]]:
    """A request of eight blocks, of which two shall be missing; its first two were born without
    units and are nowhere; another has the rest of memory."""
    scene, copied = scene_of(room=16, host_blocks=host_blocks)
    crowd(scene)
    return scene, copied


def crowd(scene: Scene) -> None:
    blocks = scene.request(1, 8 * BLOCK - 1)
    scene.evict(blocks[:2])
    scene.request(2, 10 * BLOCK - 1)
    scene.elastic.bring_to_ratios([1, 2], [2.5 / 8, 0.0])
    assert lost(scene, 1) == [0, 1] and scene.table.free_units == 0


def step(scene: Scene, seq_ids: list[int]) -> list[int]:
    """As a decode step does: room is made, the step planned, and what comes back placed."""
    assert scene.elastic.make_room_for_step(0, seq_ids)
    return scene.restore(seq_ids)


def test_others_of_the_same_request_are_sent_in_its_place() -> None:
    scene, copied = crowded(host_blocks=10)
    restored = step(scene, [1])
    blocks = scene.table.blocks_of(1).tolist()
    assert sorted(restored) == blocks[:2] and lost(scene, 1) == []
    assert scene.missing(1) == [2, 3], "as many as its target, now on the host"
    assert len(copied) >= 2 * GROUPS
    scene.table.check_integrity()
    # From now on nothing is computed again, and nothing is sent for it.
    copied.clear()
    step(scene, [1])
    assert not copied and scene.missing(1) == [2, 3]


@pytest.mark.parametrize(("host_blocks", "left"), [(0, 2), (1, 2), (2, 1), (3, 1), (4, 0)])
def test_no_more_than_the_host_has_room_for(host_blocks: int, left: int) -> None:
    """What is sent is fetched by the same step, for which as much has to go again."""
    scene, _ = crowded(host_blocks)
    step(scene, [1])
    assert len(lost(scene, 1)) == left
    scene.table.check_integrity()


def test_copies_of_what_the_device_has_make_way() -> None:
    scene, _ = crowded(host_blocks=4)
    other = scene.table.blocks_of(2)[:4]
    units = np.repeat(other, GROUPS), np.tile(np.arange(GROUPS, dtype=np.int32), 4)
    assert len(scene.table.keep_copies(*units)) == 4 * GROUPS
    assert scene.table.host.free_units == 0
    assert scene.table.host.spare_units(scene.table.units) == 4 * GROUPS
    step(scene, [1])
    assert lost(scene, 1) == []
    scene.table.check_integrity()


def test_where_there_is_room_nothing_is_sent() -> None:
    scene, copied = scene_of(room=16, host_blocks=10)
    blocks = scene.request(1, 8 * BLOCK - 1)
    scene.evict(blocks[:2])
    assert sorted(step(scene, [1])) == blocks[:2]
    assert not copied and scene.missing(1) == []


def test_what_the_host_has_comes_back_after_what_is_nowhere() -> None:
    """Units that growth may need are kept from the former only."""
    scene, _ = scene_of(room=10, host_blocks=10)
    blocks = scene.request(1, 9 * BLOCK - 1)
    scene.elastic.bring_to_ratios([1], [4.5 / 9])
    assert scene.missing(1) == [0, 1, 2, 3]
    scene.table.host.drop(np.array(blocks[:2], np.int32))
    assert lost(scene, 1) == [0, 1]
    scene.elastic.bring_to_ratios([1], [0.0])
    scene.request(2, 2 * BLOCK - 1)  # three are left, and one is staged twice
    restored = scene.restore([1])
    assert sorted(restored)[:2] == blocks[:2] and lost(scene, 1) == []
    assert (scene.table.units[blocks[2]] == NONE).any()


def beside_a_prefix() -> tuple[Scene, list[int], list[int]]:
    """A request whose first two blocks are nowhere, while a prefix that nobody uses has the last
    units but for another request's; what was copied to the host, and its blocks."""
    scene, copied = scene_of(room=12, host_blocks=10)
    scene.cache_prefix(blocks=3)
    blocks = scene.request(1, 9 * BLOCK - 1)
    scene.evict(blocks[:2])
    scene.request(2, 2 * BLOCK - 1)
    assert scene.table.free_units == 0
    return scene, copied, blocks


def test_what_is_reclaimed_for_what_comes_back_is_no_less_restored() -> None:
    scene, _, blocks = beside_a_prefix()
    assert sorted(scene.restore([1])) == blocks[:2] and len(scene.tree) < 3
    assert scene.elastic.totals.restored_units == 2 * GROUPS


def test_nothing_is_sent_where_units_lie_with_prefixes_that_nobody_uses() -> None:
    scene, copied, blocks = beside_a_prefix()
    assert sorted(step(scene, [1])) == blocks[:2]
    assert not copied and scene.missing(1) == []


def test_a_prompt_that_waits_for_units_gets_none_by_it() -> None:
    """What the step leaves free would be the prompt's: those who decode would lose more with each
    of its chunks."""
    scene, copied = crowded(host_blocks=10)
    scene.elastic.under_way = UnderWay(0, 8, 0)
    assert scene.elastic.make_room_for_step(0, [1])
    assert not copied and scene.missing(1) == [0, 1]


def test_a_step_that_places_nothing_sends_nothing() -> None:
    scene, copied = crowded(host_blocks=10)
    assert scene.elastic.make_room_for_step(0, [1], exchanges=False)
    assert not copied and scene.missing(1) == [0, 1]


@pytest.mark.parametrize(("slots", "left"), [(0, 2), (1, 1), (5, 0)])
def test_blocks_whose_hidden_states_nobody_has_stay(slots: int, left: int) -> None:
    """Of what has no slot the host would lack the lowest groups, and all of it be computed."""
    shape = PoolShape(num_layers=8, layer_group=2, block_tokens=BLOCK)
    groups = shape.num_groups
    scene, _ = over(PageTable(shape, 100, 16 * groups, host_units=16 * groups, hidden_groups=1))
    host = scene.table.host
    crowd(scene)
    unused = scene.table.allocate(16 - slots)
    host.begin_hidden(unused)
    own = scene.table.blocks_of(1)[2:]
    host.begin_hidden(own[:slots])
    host.finish_hidden(own[:slots])
    assert scene.elastic.make_room_for_step(0, [1])
    assert lost(scene, 1) == [0, 1], "what was sent is there"
    scene.restore([1])
    assert len(lost(scene, 1)) == left
    scene.table.check_integrity()
