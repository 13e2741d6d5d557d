"""Following the policy: down to its targets, and back up as room returns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ellm_sgl.memory import ElasticMemory, PageTable
from ellm_sgl.memory.elastic import GROWING
from tests.engine.scene import BLOCK, GROUPS, SHAPE, Scene

# -- bring_to_ratios --------------------------------------------------------------------------


@given(tokens=st.integers(1, 60), ratio=st.floats(0, 1, exclude_max=True))
def test_targets_are_reached_in_whole_blocks(tokens: int, ratio: float) -> None:
    scene = Scene(room=20, ratios=ratio)
    scene.request(0, tokens)
    scene.bring_to_ratios([0])
    assert scene.uncached() == [int(ratio * tokens) // BLOCK * BLOCK]
    assert scene.elastic.totals.evicted_units == scene.table.missing_units


def test_targets_take_the_oldest_blocks() -> None:
    scene = Scene(room=10, ratios=0.5)
    scene.request(0, tokens=6 * BLOCK)
    scene.bring_to_ratios([0])
    assert scene.missing(0) == [0, 1, 2]


def test_targets_are_each_requests_own() -> None:
    scene = Scene(room=20, ratios={0: 0.25, 2: 0.5})
    for seq_id in range(3):
        scene.request(seq_id, tokens=4 * BLOCK)
    scene.bring_to_ratios([0, 1, 2])
    assert scene.uncached() == [BLOCK, 0, 2 * BLOCK]


def test_targets_of_requests_outside_the_batch_are_left_alone() -> None:
    scene = Scene(room=20, ratios=0.5)
    for seq_id in range(2):
        scene.request(seq_id, tokens=4 * BLOCK)
    scene.bring_to_ratios([1])
    assert scene.uncached() == [0, 2 * BLOCK]


def test_what_is_missing_already_counts_towards_the_target() -> None:
    scene = Scene(room=10, ratios=0.5)
    blocks = scene.request(0, tokens=6 * BLOCK)
    scene.evict(blocks[4:5])
    scene.bring_to_ratios([0])
    assert scene.missing(0) == [0, 1, 4]


def test_a_block_that_lost_some_groups_does_not_count_twice() -> None:
    scene = Scene(room=10, ratios=0.5)
    blocks = scene.request(0, tokens=6 * BLOCK)
    scene.table.evict(blocks[0], slice(0, 1))
    scene.bring_to_ratios([0])
    assert scene.missing(0) == [0, 1, 2]


def test_shared_blocks_stay_whatever_the_target() -> None:
    scene = Scene(room=20, ratios=0.75)
    shared = scene.request(0, tokens=7 * BLOCK + 1)[:4]
    scene.request(1, tokens=7 * BLOCK + 1, prefix=shared)
    scene.bring_to_ratios([0, 1])
    assert [scene.missing(s) for s in range(2)] == [[4, 5, 6], [4, 5, 6]]


@pytest.mark.parametrize("max_restored", [0, BLOCK - 1, 5 * BLOCK, 6 * BLOCK + 1])
def test_targets_never_outgrow_what_a_step_can_recompute(max_restored: int) -> None:
    scene = Scene(room=20, ratios=0.5, max_restored=max_restored)
    for seq_id in range(2):
        scene.request(seq_id, tokens=8 * BLOCK)
    scene.bring_to_ratios([0, 1])
    assert sum(scene.uncached()) == min(max_restored // BLOCK, 8) * BLOCK


def test_what_a_step_can_recompute_counts_what_later_requests_miss() -> None:
    scene = Scene(room=20, ratios=0.5, max_restored=3 * BLOCK)
    scene.request(0, tokens=8 * BLOCK)
    scene.evict(scene.request(1, tokens=8 * BLOCK)[:2])
    scene.bring_to_ratios([0, 1])
    assert scene.uncached() == [BLOCK, 2 * BLOCK]


def test_what_the_host_has_counts_as_well_for_there_may_be_no_room_to_fetch_it() -> None:
    table = PageTable(SHAPE, num_blocks=100, num_units=20 * GROUPS, host_units=20 * GROUPS)
    elastic = ElasticMemory(table, 3 * BLOCK, lambda tokens: 0, save=lambda _device, _host: None)
    blocks = elastic.allocate(8)
    table.map(0, blocks, 8 * BLOCK)
    table.note_computed([0], [8 * BLOCK])
    elastic.bring_to_ratios([0], [0.75])
    assert table.uncached_tokens([0]) == table.uncached_on_host([0]) == 3 * BLOCK
    elastic.max_restored_tokens = 2 * BLOCK
    assert elastic.fits_one_step([0])  # all three are fetched
    table.limit_units(table.used_units)
    assert not elastic.fits_one_step([0])  # there is no room to


def test_what_a_policy_is_told_of_requests_and_memory() -> None:
    scene = Scene(room=10)
    shared = scene.request(0, tokens=3 * BLOCK)[:2]
    scene.request(1, tokens=3 * BLOCK + 1, prefix=shared)
    scene.evict(shared[:1])
    elastic = scene.elastic
    assert elastic.shared_tokens([1, 0]).tolist() == [2 * BLOCK, 2 * BLOCK]
    assert elastic.table.uncached_tokens([1, 0]).tolist() == [BLOCK, BLOCK]
    memory = elastic.memory_state([1, 0])
    assert (memory.device_tokens, memory.device_free_tokens) == (10 * BLOCK, 6 * BLOCK)


def test_blocks_cease_to_be_shared_when_the_other_request_leaves() -> None:
    scene = Scene(room=10)
    shared = scene.request(0, tokens=3 * BLOCK)[:2]
    scene.request(1, tokens=3 * BLOCK, prefix=shared)
    assert scene.elastic.shared_tokens([0]).tolist() == [2 * BLOCK]
    scene.elastic.forget(1)
    assert scene.elastic.shared_tokens([0]).tolist() == [0]


# -- restore --------------------------------------------------------------------------------


def test_with_nothing_missing_there_is_nothing_to_restore() -> None:
    scene = Scene(room=10)
    scene.request(0, tokens=4 * BLOCK)
    assert scene.restore([0]) == [] and not scene.reclaim_asked


def test_the_newest_blocks_return_first() -> None:
    scene = Scene(room=6)
    blocks = scene.request(0, tokens=6 * BLOCK)
    scene.evict(blocks[:3])
    assert scene.restore([0]) == [blocks[2], blocks[1]]
    assert scene.elastic.totals.restored_units == 2 * GROUPS


@pytest.mark.parametrize("requests", [1, GROWING, GROWING + 1, 2 * GROWING + 1])
def test_some_blocks_are_left_for_growth(requests: int) -> None:
    scene, ids = Scene(room=3 * requests), list(range(requests))
    for seq_id in ids:
        scene.evict(scene.request(seq_id, tokens=3 * BLOCK)[:1])
    left = -(-requests // GROWING)
    assert len(scene.restore(ids)) == requests - left
    assert scene.table.free_units == left * GROUPS
    assert scene.restore(ids) == []


def test_nothing_returns_while_a_lowered_limit_is_exceeded() -> None:
    scene = Scene(room=8)
    scene.evict(scene.request(0, tokens=8 * BLOCK)[:2])
    scene.table.limit_units(4 * GROUPS)
    assert scene.restore([0]) == []


def test_cached_prefixes_make_way_for_what_returns() -> None:
    scene = Scene(room=8)
    blocks = scene.request(0, tokens=4 * BLOCK)
    scene.evict(blocks[:2])
    scene.cache_prefix(blocks=6)
    assert scene.restore([0]) == [blocks[1], blocks[0]]
    assert len(scene.tree) == 3


def test_only_what_is_missing_beyond_the_target_returns() -> None:
    scene = Scene(room=20, ratios=0.5)
    blocks = scene.request(0, tokens=8 * BLOCK)
    scene.bring_to_ratios([0])
    scene.evict(blocks[4:6])
    assert scene.restore([0]) == [blocks[5], blocks[4]]
    assert scene.uncached() == [4 * BLOCK]


def test_a_block_that_returned_for_one_request_counts_for_those_that_share_it() -> None:
    scene = Scene(room=20, ratios=0.5)
    shared = scene.request(0, tokens=4 * BLOCK + 1)[:4]
    scene.request(1, tokens=4 * BLOCK + 1, prefix=shared)
    scene.bring_to_ratios([0, 1])  # 2 blocks each, but shared ones stay
    scene.evict(shared)
    assert scene.restore([0, 1]) == [shared[3], shared[2]]
    assert scene.uncached() == [2 * BLOCK, 2 * BLOCK]


def test_a_last_block_that_is_not_full_returns_too() -> None:
    scene = Scene(room=4)
    blocks = scene.request(0, tokens=2)
    scene.evict(blocks)
    assert scene.restore([0]) == blocks


def test_lower_targets_let_blocks_return() -> None:
    scene = Scene(room=20, ratios=0.5)
    blocks = scene.request(0, tokens=8 * BLOCK)
    scene.bring_to_ratios([0])
    scene.ratios = 0.25
    scene.bring_to_ratios([0])
    assert scene.restore([0]) == [blocks[3], blocks[2]]


def test_a_new_request_does_not_inherit_the_target_of_an_old_one() -> None:
    scene = Scene(room=20, ratios=0.5)
    scene.request(0, tokens=8 * BLOCK)
    scene.bring_to_ratios([0])
    scene.elastic.forget(0)
    blocks = scene.request(0, tokens=2 * BLOCK)
    scene.evict(blocks[:1])
    assert scene.restore([0]) == blocks[:1]


def test_a_restored_block_is_complete() -> None:
    scene = Scene(room=8)
    blocks = scene.request(0, tokens=4 * BLOCK)
    scene.table.evict(blocks[0], slice(0, 1))
    kept = int(scene.table.units[blocks[0], 1])
    assert scene.restore([0]) == blocks[:1]
    assert scene.missing(0) == [] and scene.table.units[blocks[0], 1] == kept


def test_memory_is_taken_first_from_those_whose_target_is_not_reached() -> None:
    scene = Scene(room=16, ratios={0: 0.0, 1: 0.5}, max_restored=2 * BLOCK)
    for seq_id in (0, 1):
        scene.request(seq_id, tokens=8 * BLOCK)
    scene.bring_to_ratios([0, 1])  # request 1 may miss 4 blocks, but a step may restore only 2
    assert [len(scene.missing(s)) for s in (0, 1)] == [0, 2]
    scene.elastic.make_room(4 * GROUPS)
    assert [len(scene.missing(s)) for s in (0, 1)] == [0, 4]
    scene.elastic.make_room(6 * GROUPS)
    assert [len(scene.missing(s)) for s in (0, 1)] == [1, 5]
