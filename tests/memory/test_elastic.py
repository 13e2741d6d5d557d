"""Making room: what leaves, in which order, and what never does."""

from __future__ import annotations

import numpy as np
import pytest

from ellm_sgl.memory import NONE, ElasticMemory, PageTable
from tests.engine.scene import BLOCK, GROUPS, SHAPE, Scene

# -- make_room: order -----------------------------------------------------------------------


def test_where_there_is_room_nothing_happens() -> None:
    scene = Scene(room=6)
    scene.request(0, tokens=5 * BLOCK)
    assert scene.elastic.make_room(GROUPS)
    assert scene.uncached() == [0] and not scene.reclaim_asked


def test_cached_prefixes_go_before_blocks_of_running_requests() -> None:
    scene = Scene(room=6)
    scene.cache_prefix(blocks=2)
    scene.request(0, tokens=4 * BLOCK)
    assert scene.elastic.make_room(2 * GROUPS)
    assert scene.uncached() == [0] and scene.tree == []


def test_only_so_much_of_cached_prefixes_goes_as_is_short() -> None:
    scene = Scene(room=6)
    scene.cache_prefix(blocks=4)
    assert scene.elastic.make_room(3 * GROUPS)
    assert scene.reclaim_asked == [BLOCK]


def test_cached_prefixes_that_have_lost_their_units_do_not_stop_the_search() -> None:
    scene = Scene(room=2)
    scene.cache_prefix(blocks=2)
    scene.tree = [*scene.table.allocate(3).tolist(), *scene.tree]
    assert scene.elastic.make_room(GROUPS)
    assert len(scene.tree) == 1


def test_the_oldest_blocks_go_first() -> None:
    scene = Scene(room=5)
    scene.request(0, tokens=5 * BLOCK)
    assert scene.elastic.make_room(2 * GROUPS)
    assert scene.missing(0) == [0, 1]


def test_eviction_is_spread_over_requests() -> None:
    scene = Scene(room=12)
    for seq_id in range(3):
        scene.request(seq_id, tokens=4 * BLOCK)
    assert scene.elastic.make_room(6 * GROUPS)
    assert [scene.missing(s) for s in range(3)] == [[0, 1]] * 3


def test_the_request_that_misses_least_gives_first() -> None:
    scene = Scene(room=8)
    blocks = scene.request(0, tokens=4 * BLOCK)
    scene.request(1, tokens=4 * BLOCK)
    scene.evict(blocks[:2])
    scene.cache_prefix(blocks=2)  # takes what that freed
    scene.tree.clear()
    assert scene.elastic.make_room(2 * GROUPS)
    assert [scene.missing(s) for s in range(2)] == [[0, 1], [0, 1]]


def test_unshared_blocks_go_before_shared_ones() -> None:
    scene = Scene(room=6)
    shared = scene.request(0, tokens=3 * BLOCK + 1)[:2]
    scene.request(1, tokens=3 * BLOCK + 1, prefix=shared)
    assert scene.elastic.make_room(2 * GROUPS)
    assert [scene.missing(s) for s in range(2)] == [[2], [2]]
    assert scene.elastic.make_room(3 * GROUPS)
    assert [scene.missing(s) for s in range(2)] == [[0, 2], [0, 2]]


# -- make_room: how much --------------------------------------------------------------------


def test_of_the_last_block_only_the_lowest_groups_needed_go() -> None:
    scene = Scene(room=4)
    blocks = scene.request(0, tokens=4 * BLOCK)
    assert scene.elastic.make_room(GROUPS + 1)
    assert (scene.table.units[blocks] == NONE).tolist() == [
        [True, True],
        [True, False],
        [False, False],
        [False, False],
    ]


def test_a_block_that_lost_some_groups_gives_the_others() -> None:
    scene = Scene(room=3)
    blocks = scene.request(0, tokens=3 * BLOCK)
    for _ in range(2):
        assert scene.elastic.make_room(scene.table.free_units + 1)
    assert scene.missing(0) == [0] and (scene.table.units[blocks[0]] == NONE).all()


def test_evicted_units_are_counted() -> None:
    scene = Scene(room=4)
    scene.request(0, tokens=4 * BLOCK)
    scene.elastic.make_room(GROUPS + 1)
    assert scene.elastic.totals.evicted_units == GROUPS + 1


def test_a_lowered_limit_is_reached() -> None:
    scene = Scene(room=4)
    scene.request(0, tokens=4 * BLOCK)
    scene.table.limit_units(3 * GROUPS)
    assert scene.elastic.make_room(0)
    assert scene.missing(0) == [0]


# -- make_room: what stays ------------------------------------------------------------------


def test_the_block_being_filled_stays() -> None:
    scene = Scene(room=4)
    scene.request(0, tokens=2 * BLOCK + 1)
    scene.request(1, tokens=1)
    assert not scene.elastic.make_room(4 * GROUPS)
    assert [scene.missing(s) for s in range(2)] == [[0, 1], []]


def test_a_full_last_block_may_go() -> None:
    """The next token begins another one."""
    scene = Scene(room=2)
    scene.request(0, tokens=2 * BLOCK)
    assert scene.elastic.make_room(2 * GROUPS)
    assert scene.missing(0) == [0, 1]


# -- allocate -------------------------------------------------------------------------------


def test_new_blocks_take_the_room_of_old_ones() -> None:
    scene = Scene(room=4)
    scene.request(0, tokens=4 * BLOCK)
    new = scene.elastic.allocate(2)
    assert (scene.table.units[new] != NONE).all() and scene.missing(0) == [0, 1]


def test_when_units_run_short_the_earliest_new_blocks_go_without() -> None:
    scene = Scene(room=4)
    scene.request(0, tokens=BLOCK + 1)
    new = scene.elastic.allocate(5)
    complete = (scene.table.units[new] != NONE).all(axis=1)
    assert complete.tolist() == [False, False, True, True, True]


def test_placing_nothing_needs_nothing() -> None:
    scene = Scene(room=1)
    scene.request(0, tokens=BLOCK)
    assert len(scene.elastic.allocate(0)) == 0 and scene.missing(0) == []


# -- the bound on restored tokens ----------------------------------------------------------------


@pytest.mark.parametrize(("max_restored", "fits"), [(11, False), (12, True)])
def test_a_step_fits_if_it_can_recompute_all_that_its_requests_miss(
    max_restored: int, fits: bool
) -> None:
    scene = Scene(room=10, max_restored=max_restored)
    scene.evict(scene.request(0, tokens=4 * BLOCK)[:2])
    scene.evict(scene.request(1, tokens=4 * BLOCK)[1:2])
    assert scene.elastic.fits_one_step([0, 1]) == fits
    assert scene.elastic.fits_one_step([0])


# -- admission ------------------------------------------------------------------------------


def test_admission_counts_free_and_reclaimable_tokens() -> None:
    scene = Scene(room=10)
    scene.request(0, tokens=4 * BLOCK)
    assert scene.elastic.admission_room(8).tokens(0.0) == (
        6 * BLOCK + 8,
        6 * BLOCK + 8,
    )


@pytest.mark.parametrize(("ratio", "factor"), [(0.5, 2), (0.75, 4)])
def test_admission_counts_on_joining_requests_to_come_to_their_targets(
    ratio: float, factor: int
) -> None:
    scene = Scene(room=10, ratios={0: ratio})
    scene.request(0, tokens=4 * BLOCK)
    scene.bring_to_ratios([0])
    now = int((6 + 4 * ratio) * BLOCK)
    assert scene.elastic.admission_room(0).tokens(ratio) == (now, factor * now)


def test_admission_counts_on_running_requests_to_make_room_for_those_that_join() -> None:
    scene = Scene(room=10)
    scene.request(0, tokens=8 * BLOCK)
    # At 0.5 the device holds 20 blocks' worth of requests, 8 of which run; 2 are free, and the
    # running request gives up 4.
    assert scene.elastic.admission_room(0).tokens(0.5) == (6 * BLOCK, 12 * BLOCK)


def test_admission_counts_what_fetching_takes_of_the_device() -> None:
    scene = Scene(room=10)
    scene.request(0, tokens=8 * BLOCK)
    # Both layer groups are in flight at once: what leaves the device comes back into it.
    fetching = ElasticMemory(scene.table, 1000, scene.reclaim, save=lambda _device, _host: None)
    assert fetching.staging_overhead() == 1.0
    assert fetching.admission_room(0).tokens(0.5) == (2 * BLOCK, 2 * BLOCK)


def test_room_made_beyond_the_targets_admits_nobody() -> None:
    scene = Scene(room=10)
    scene.request(0, tokens=8 * BLOCK)
    before = scene.elastic.admission_room(0).tokens(0.0)
    scene.elastic.make_room(5 * GROUPS)
    assert scene.elastic.admission_room(0).tokens(0.0) == before


def test_room_made_to_reach_the_targets_admits_others() -> None:
    scene = Scene(room=10, ratios={0: 0.5})
    scene.request(0, tokens=8 * BLOCK)
    scene.bring_to_ratios([0])
    assert scene.elastic.admission_room(0).tokens(0.0) == (6 * BLOCK, 6 * BLOCK)


def test_admission_is_below_zero_while_a_lowered_limit_is_exceeded() -> None:
    scene = Scene(room=10)
    scene.request(0, tokens=8 * BLOCK)
    scene.table.limit_units(6 * GROUPS)
    assert scene.elastic.admission_room(0).tokens(0.0) == (-2 * BLOCK, -2 * BLOCK)


def test_policies_are_told_of_the_memory_that_is_theirs_to_divide() -> None:
    scene = Scene(room=10)
    scene.request(0, 8)
    scene.request(1, 12)
    memory = scene.elastic.memory_state(running=[0], reclaimable=4)
    assert (memory.block_tokens, memory.device_tokens) == (BLOCK, 10 * BLOCK - 12)
    assert memory.device_free_tokens == 5 * BLOCK + 4
    assert (memory.host_tokens, memory.host_free_tokens, memory.staging_overhead) == (0, 0, 0.0)
    assert memory.max_restored_tokens == scene.elastic.max_restored_tokens


def with_host(room: int) -> tuple[Scene, list[tuple[list[int], list[int]]]]:
    """A scene whose table has a host tier, and the copies made to it."""
    scene = Scene(room)
    scene.table = PageTable(SHAPE, 100, room * GROUPS, host_units=100)
    copies: list[tuple[list[int], list[int]]] = []
    scene.elastic = ElasticMemory(
        scene.table, 1000, scene.reclaim, lambda d, h: copies.append((d.tolist(), h.tolist()))
    )
    return scene, copies


def test_what_comes_back_is_fetched_ahead_as_far_as_units_are_free() -> None:
    scene, copies = with_host(room=8)
    table, elastic = scene.table, scene.elastic
    out, coming = scene.request(1, 13), scene.request(2, 13)
    elastic.bring_to_ratios([1, 2], [12 / 13, 12 / 13], paused=True)
    assert elastic.table.uncached_tokens([1, 2]).tolist() == [12, 12]
    saved = {h: d for device, host in copies for d, h in zip(device, host, strict=True)}
    assert len(saved) == 12
    elastic.bring_to_ratios([1, 2], [12 / 13, 0.0], paused=True)
    # Six blocks are free, of which three are for those who decode; the link brings two.
    host, device = elastic.fetch_ahead([1, 2], decoding=3, most_units=2 * GROUPS + 1)
    assert elastic.table.uncached_tokens([1, 2]).tolist() == [12, 4]
    assert host.tolist() == table.host.units[coming[:2]].flatten().tolist()
    assert device.tolist() == table.units[coming[:2]].flatten().tolist()
    host, _ = elastic.fetch_ahead([1, 2], decoding=3, most_units=100)
    assert len(host) == GROUPS and elastic.table.uncached_tokens([2]).tolist() == [0]
    assert elastic.fetch_ahead([1, 2], 0, 100)[0].tolist() == []  # 1 is not to come back
    assert (table.units[out[:3]] == NONE).all() and elastic.totals.fetched_ahead_units == 6
    table.check_integrity()


def test_cached_prefixes_make_way_for_what_is_fetched_ahead() -> None:
    scene, _ = with_host(room=9)
    scene.request(1, 13), scene.request(2, 4)
    scene.elastic.bring_to_ratios([1], [12 / 13], paused=True)
    scene.cache_prefix(blocks=7)
    scene.elastic.room_ahead([1], [2], 100)
    assert len(scene.tree) == 7  # nothing is to come back
    scene.elastic.bring_to_ratios([1], [0.0], paused=True)
    assert scene.elastic.fetch_ahead([1], 1, 100)[0].tolist() == []
    scene.elastic.room_ahead([1], [2], GROUPS)
    assert len(scene.tree) == 5  # a block that the link brings, and one for the other to grow
    scene.elastic.room_ahead([1], [2], 100)
    assert len(scene.tree) == 3
    host, _ = scene.elastic.fetch_ahead([1], 1, 100)
    assert len(host) == 3 * GROUPS and scene.missing(1) == []
    scene.table.check_integrity()


def test_and_for_what_the_step_borrows_before() -> None:
    """The other restores two blocks in each step, in units that it borrows meanwhile."""
    scene, _ = with_host(room=12)
    scene.request(1, 13), scene.request(2, 13)
    scene.elastic.bring_to_ratios([1, 2], [12 / 13, 8 / 13], paused=True)
    scene.cache_prefix(blocks=9)
    scene.elastic.bring_to_ratios([1], [0.0], paused=True)
    assert scene.table.free_units == 0 and scene.missing(2) == [0, 1]
    scene.elastic.room_ahead([1], [2], 100)
    assert scene.table.free_units == (1 + 3) * GROUPS + 2 * scene.elastic.slots


def test_what_the_host_lacks_is_not_fetched_ahead() -> None:
    scene, _ = with_host(room=6)
    blocks = scene.request(1, 13)
    scene.elastic.bring_to_ratios([1], [12 / 13], paused=True)
    scene.table.host.drop(np.array(blocks[:1], np.int32))
    scene.elastic.bring_to_ratios([1], [0.0], paused=True)
    host, _ = scene.elastic.fetch_ahead([1], 0, 100)
    assert len(host) == 2 * GROUPS and scene.missing(1) == [0]


def test_a_missing_block_that_two_share_is_fetched_ahead_once() -> None:
    scene, _ = with_host(room=12)
    table, elastic = scene.table, scene.elastic
    prefix = table.allocate(2)  # the prefix tree's
    table.place(prefix)
    for seq_id in (1, 2):
        scene.request(seq_id, 13, prefix.tolist())
    assert elastic.make_room(12 * GROUPS) is False
    assert elastic.table.uncached_tokens([1, 2]).tolist() == [12, 12]
    host, device = elastic.fetch_ahead([1, 2], decoding=0, most_units=100)
    assert len(host) == 4 * GROUPS  # two shared blocks and one of each
    assert len(set(host.tolist())) == len(host) and len(set(device.tolist())) == len(device)
    assert table.missing_units == 0
    table.check_integrity()


def test_a_prompt_that_no_pass_has_computed_keeps_its_blocks() -> None:
    """A mixed step maps a prompt's blocks, then makes room for decoding, then computes both."""
    scene, copies = with_host(room=7)
    table, elastic = scene.table, scene.elastic
    scene.request(1, 2 * BLOCK)
    prompt = table.allocate(5)
    table.place(prompt)
    table.map(2, prompt, 5 * BLOCK)
    assert elastic.make_room(GROUPS)
    assert scene.missing(1) == [0] and scene.missing(2) == []
    assert elastic.make_room(3 * GROUPS) is False  # more is not there to be had
    table.note_computed([2], [5 * BLOCK])
    assert elastic.make_room(3 * GROUPS)
    assert scene.missing(2) == [0]
    assert len(copies) == 3
    table.check_integrity()
