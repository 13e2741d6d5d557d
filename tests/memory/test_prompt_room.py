"""What prompts may take of the device while others decode."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from ellm_sgl.memory import PromptRoom, UnderWay
from tests.engine.scene import BLOCK, GROUPS, Scene

ROOM = st.integers(0, 40)


def test_where_nobody_decodes_nothing_is_kept_from_prompts() -> None:
    room = PromptRoom.of(Scene(room=2).table, decoding=0, reclaimable=0)
    assert room.has(10**6, 0.0)
    room.take(10**6, 0.0)
    assert room.further(0, 10**6, 0) == 10**6


def test_prompts_begin_in_what_is_free_and_in_cached_prefixes() -> None:
    scene = Scene(room=6)
    scene.request(0, tokens=3 * BLOCK)
    scene.cache_prefix(blocks=2)
    room = PromptRoom.of(scene.table, decoding=1, reclaimable=2 * BLOCK)
    assert room.has(3 * BLOCK, 0.0) and not room.has(3 * BLOCK + 1, 0.0)
    assert not room.has(3 * BLOCK, 0.0, prefix=BLOCK)  # what it finds there is no room
    room.take(2 * BLOCK, 0.0)
    assert room.has(BLOCK, 0.0) and not room.has(2 * BLOCK, 0.0)


def test_of_a_prompt_admitted_at_a_ratio_so_much_needs_no_room() -> None:
    room = PromptRoom(blocks=5, growth=0, block_tokens=BLOCK)
    assert room.has(10 * BLOCK, 0.5) and not room.has(12 * BLOCK, 0.5)


def test_a_chunk_gets_smaller_down_to_a_block_and_then_waits() -> None:
    def further(blocks: float, begin: int = 0) -> int:
        return PromptRoom(blocks, growth=1, block_tokens=BLOCK).further(begin, 8 * BLOCK, own=0)

    assert [further(b) for b in (20, 9, 8, 2, 1, 0)] == [32, 32, 28, 4, 0, 0]
    assert further(2, begin=3) == 1 + BLOCK  # a place in the block that it has, and another block
    assert further(math.inf) == 8 * BLOCK


def test_prompts_take_no_more_slots_than_there_are() -> None:
    """Where much is missing, there may be memory for more blocks than requests can have."""
    room = PromptRoom(40, growth=0, block_tokens=BLOCK, slots=6)
    assert room.has(6 * BLOCK, 0.5) and not room.has(7 * BLOCK, 0.5)
    assert not room.has(6 * BLOCK, 0.5, prefix=1)
    room.take(3 * BLOCK, 0.5, prefix=1)
    assert room.further(3, 8 * BLOCK, own=4) == 1 + 2 * BLOCK
    assert room.further(0, 8 * BLOCK, own=4) == 0
    alone = PromptRoom(math.inf, growth=0, block_tokens=BLOCK, slots=0)
    assert alone.further(0, 8 * BLOCK, own=0) == 0


@given(ROOM, st.integers(0, 9), st.integers(0, 9), st.integers(1, 200), st.integers(0, 50))
def test_a_chunk_takes_no_more_than_there_is(
    blocks: int, growth: int, own: int, tokens: int, begin: int
) -> None:
    room = PromptRoom(blocks, growth, BLOCK)
    further = room.further(begin, tokens, own)
    assert 0 <= further <= tokens
    begun = -(-(begin + further) // BLOCK) - -(-begin // BLOCK)
    assert begun <= max(blocks - growth, 0) + own
    if further:  # and what it leaves is what another prompt finds
        assert not room.has((blocks - max(begun - own, 0) + 1) * BLOCK, 0.0)


def test_what_a_prompt_under_way_lacks_is_nobody_elses() -> None:
    scene = Scene(room=20)
    blocks = scene.request(0, tokens=4 * BLOCK)
    scene.evict(blocks[:1])
    under_way = UnderWay.of(scene.table, 0, tokens=10 * BLOCK, ratio=0.3)
    assert under_way == UnderWay(own=2, coming=4, missing=1, left=6 * BLOCK)
    before = scene.elastic.memory_state()
    scene.elastic.under_way = under_way
    after = scene.elastic.memory_state()
    assert before.device_tokens - after.device_tokens == 4 * BLOCK
    assert before.device_free_tokens - after.device_free_tokens == 4 * BLOCK


def test_nothing_comes_back_where_a_prompt_under_way_is_to_go() -> None:
    scene = Scene(room=6)
    blocks = scene.request(0, tokens=4 * BLOCK)
    scene.evict(blocks[:2])  # 4 blocks free, of which one is for growth
    scene.elastic.under_way = UnderWay(0, 3, 0)
    assert scene.restore([0]) == []
    scene.elastic.under_way = UnderWay(0, 2, 0)
    assert len(scene.restore([0])) == 1


def test_blocks_of_prompts_evict_nobody_and_the_first_do_without() -> None:
    scene = Scene(room=6)
    scene.request(0, tokens=4 * BLOCK)
    scene.cache_prefix(blocks=1)
    new = scene.elastic.allocate(4, evict=False)
    assert scene.uncached() == [0] and scene.tree == []
    assert scene.table.misses_units(new).tolist() == [True, True, False, False]
    assert scene.table.free_units < GROUPS
