"""What of the prefixes that nobody uses makes way: for what it has, and not for what it has not."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ellm_sgl.engine import Controller, Iteration, ServerLimits, StepLog
from ellm_sgl.latency import RooflineLatencyModel
from ellm_sgl.memory.shape import IntArray
from ellm_sgl.policies import Fcfs
from ellm_sgl.sglang.platform.torchvision_ops import declare
from ellm_sgl.step import Planner
from ellm_sgl.store import BlockStore, StoreFolder
from ellm_sgl.store.records import RECORD_BYTES
from tests.latency.machines import GPU, TINY
from tests.simulation.configuration import Configuration
from tests.store.scene import now

declare()
BLOCK, GROUPS = 4, 3
HOST, DEVICE, BOTH = "host", "device", "both"


class Scene:
    """A pool of 16 blocks, a host tier and a tree."""

    def __init__(self, host_blocks: int = 8, hidden_layers: int = 0) -> None:
        from sglang.srt.runtime_context import get_parallel

        from tests.simulation.plane import Plane

        configuration = Configuration(
            layers=GROUPS,
            block_tokens=BLOCK,
            device_blocks=16,
            host_blocks=host_blocks,
            hidden_layers=hidden_layers,
            context=200,
        )
        with get_parallel().override(tp_rank=0, tp_size=1, attn_tp_size=1):
            self.plane = plane = Plane(configuration)
        self.table, self.tree, self.elastic = plane.table, plane.tree, plane.elastic

    def blocks(self, count: int) -> IntArray:
        """New ones, computed by a request that has left."""
        blocks = self.table.allocate(count)
        assert len(self.table.place(blocks)) == count
        self.table.note_read(blocks)
        return blocks

    def prefix(self, first: int, *where: str, behind: Sequence[int] = ()) -> IntArray:
        """A cached prefix that nobody uses, a block at each of these places, behind the blocks of
        another one. Its tokens: from `first`."""
        blocks = self.blocks(len(where))
        every = [*behind, *blocks.tolist()]
        self.insert(range(first, first + len(every) * BLOCK), every)
        for block, place in zip(blocks.tolist(), where, strict=True):
            if place != DEVICE:
                self.to_host(block)
            if place == HOST:
                self.table.evict(block)
        return blocks

    def to_host(self, block: int) -> None:
        host = self.table.host
        if host.hidden_groups:
            only = np.array([block], np.int32)
            host.begin_hidden(only)
            host.finish_hidden(only)
        groups = np.arange(host.hidden_groups, GROUPS, dtype=np.int32)
        assert len(self.table.keep_copies(block, groups)) == len(groups)

    def insert(self, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        slots = torch.tensor(blocks)[:, None] * BLOCK + torch.arange(BLOCK)
        self.tree.insert(InsertParams(key=key_of(tokens), value=slots.reshape(-1)))

    def cached(self, first: int) -> int:
        """Blocks that the tree has, from the token `first` on."""
        from ellm_sgl.sglang.tree_blocks import peek

        return len(peek(self.tree, key_of(range(first, first + 8 * BLOCK))))

    def reclaim(self, blocks: int) -> None:
        """Until so many more blocks can be placed."""
        self.elastic.reclaim_prefixes(self.table.free_units + blocks * GROUPS)
        self.table.check_integrity()


def key_of(tokens: Sequence[int]) -> Any:
    from ellm_sgl.sglang.versions import adapter

    nobody: Any = SimpleNamespace(extra_key=None, cache_salt=None)
    return adapter().radix_key(array("q", tokens), nobody)


def test_room_on_the_device_costs_no_prefix_that_only_the_host_has() -> None:
    scene = Scene()
    scene.prefix(100, HOST, HOST)
    scene.prefix(200, DEVICE, DEVICE)
    scene.prefix(300, DEVICE)
    scene.reclaim(2)
    assert [scene.cached(first) for first in (100, 200, 300)] == [2, 0, 1]
    scene.reclaim(16)
    assert [scene.cached(first) for first in (100, 200, 300)] == [2, 0, 0]
    assert scene.table.free_units == scene.table.unit_limit


def test_the_tree_is_not_searched_where_all_of_it_is_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene()
    scene.prefix(100, HOST, HOST)
    monkeypatch.setattr(type(scene.tree), "drop_idle", None)
    scene.reclaim(1)
    assert scene.cached(100) == 2


def test_what_only_the_host_has_stays_when_what_is_behind_it_goes() -> None:
    """A request under pressure loses its oldest blocks first, and leaves them so."""
    scene = Scene()
    scene.prefix(100, HOST, HOST, DEVICE, HOST, DEVICE)
    scene.reclaim(1)
    assert scene.cached(100) == 2 and scene.table.used_units == 0
    assert scene.tree.evictable_size() == 2 * BLOCK


def test_what_only_the_host_has_does_not_keep_units_before_it_from_going() -> None:
    scene = Scene()
    stem = scene.prefix(100, DEVICE, DEVICE).tolist()
    scene.prefix(100, HOST, behind=stem)
    scene.prefix(300, DEVICE)
    scene.reclaim(1)
    assert (scene.cached(100), scene.cached(300)) == (0, 1)  # that was used last


def test_of_two_branches_that_goes_which_has_units() -> None:
    scene = Scene()
    stem = scene.prefix(100, DEVICE).tolist()
    on_host, on_device = scene.prefix(100, HOST, behind=stem), scene.blocks(1)
    other = [*range(100, 100 + BLOCK), *range(900, 900 + BLOCK)]
    scene.insert(other, [*stem, *on_device.tolist()])
    scene.reclaim(1)
    assert scene.cached(100) == 2 and not scene.table.references(on_device).any()
    scene.reclaim(1)
    assert scene.cached(100) == 0 and not scene.table.references(on_host).any()
    assert scene.table.free_blocks == scene.table.num_blocks


def test_a_prefix_that_is_used_stays_with_all_before_it() -> None:
    scene = Scene()
    blocks = scene.prefix(100, DEVICE, DEVICE, HOST)
    scene.table.map(7, blocks[:1], BLOCK)
    _, node = scene.tree._match_prefix_helper(scene.tree.root_node, key_of(range(100, 104)))
    scene.tree.inc_lock_ref(node)
    scene.reclaim(16)
    assert scene.cached(100) == 1 and scene.table.used_units == GROUPS


def test_slots_are_freed_wherever_the_kv_is() -> None:
    scene = Scene()
    scene.prefix(100, HOST, HOST)
    scene.prefix(200, DEVICE)
    assert scene.plane.context.reclaim(BLOCK) == 2 * BLOCK
    assert (scene.cached(100), scene.cached(200)) == (0, 1)


def test_copies_that_nobody_uses_make_way_on_a_full_host() -> None:
    scene = Scene(host_blocks=3)
    scene.prefix(100, DEVICE)
    scene.prefix(200, HOST)
    scene.prefix(300, HOST, HOST)
    running = scene.blocks(4)
    scene.table.map(7, running, 4 * BLOCK)
    scene.elastic.bring_to_ratios([7], [0.25])
    assert [scene.cached(first) for first in (100, 200, 300)] == [1, 0, 2]
    assert scene.table.depth(running[:1]).tolist() == [0]
    scene.elastic.bring_to_ratios([7], [1.0])
    assert [scene.cached(first) for first in (100, 200, 300)] == [1, 0, 0]
    assert scene.table.depth(running).tolist() == [0, 0, 0, GROUPS]  # there is no more to give
    scene.table.check_integrity()


def test_copies_of_what_is_on_the_device_make_way_before_those_that_nobody_uses() -> None:
    scene = Scene(host_blocks=2)
    scene.prefix(100, HOST)
    both = scene.prefix(200, BOTH)
    running = scene.blocks(1)
    scene.table.map(7, running, BLOCK)
    scene.elastic.bring_to_ratios([7], [1.0])
    assert scene.cached(100) == scene.cached(200) == 1
    assert (scene.table.host.units[both] == -1).all()
    assert scene.table.depth(running).tolist() == [0]


def test_hidden_states_that_nobody_uses_make_way() -> None:
    scene = Scene(host_blocks=2, hidden_layers=2)
    scene.prefix(100, HOST)
    scene.prefix(200, BOTH)
    new = scene.blocks(2)
    scene.table.host.begin_hidden(new)
    assert (scene.table.host.filling[new] != -1).tolist() == [True, False]
    assert (scene.cached(100), scene.cached(200)) == (0, 1)
    scene.table.check_integrity()


def test_the_store_reads_into_what_idle_prefixes_hold_on_the_device(tmp_path: Path) -> None:
    from ellm_sgl.sglang.kv_store import StoredPrefixes

    scene = Scene()
    plane = scene.plane
    nbytes = plane.pool.unit_bytes * GROUPS
    folder = StoreFolder(tmp_path, 4 * (nbytes + RECORD_BYTES))
    stored = StoredPrefixes(
        lambda: BlockStore(folder, "0" * 32, nbytes, now),
        plane.elastic,
        plane.pool,
        plane.tree,
        lambda numbers: numbers,
    )
    scene.blocks(10)  # somebody's
    scene.prefix(100, HOST, HOST, DEVICE)
    assert stored._room(decoding=2) == 16 - 10 - 2


def locked(scene: Scene, first: int, blocks: int) -> Any:
    """The last node of what a request finds, and uses from now on."""
    key = key_of(range(first, first + blocks * BLOCK))
    _, node = scene.tree._match_prefix_helper(scene.tree.root_node, key)
    scene.tree.inc_lock_ref(node)
    return node


def test_a_prompt_computes_nothing_that_the_host_has_while_others_could_make_way() -> None:
    scene = Scene()
    cached = scene.prefix(100, *[HOST] * 4)
    scene.prefix(300, *[DEVICE] * 15)
    locked(scene, 100, 4)
    new = scene.blocks(1)
    scene.table.map(7, np.concatenate((cached, new)), 5 * BLOCK)
    assert scene.table.free_units == 0
    limits = ServerLimits(TINY, GPU, 8, np.inf, 200)
    controller = Controller(Fcfs(), 0.005, StepLog(RooflineLatencyModel(TINY, GPU)), limits)
    iteration = Iteration(controller, scene.elastic, scene.plane.pool.unit_bytes)
    planner = Planner(
        scene.elastic, lambda s, begin, end: np.arange(begin, end), "cpu", captures=False
    )
    plan = iteration.plan_extend(planner, [7], [BLOCK])
    assert (plan.recomputed_rows, plan.fetched_tokens) == (0, 4 * BLOCK * GROUPS)
    gone = scene.elastic.slots * 4 // GROUPS
    assert scene.cached(100) == 4 and 15 - scene.cached(300) >= gone > 0


def test_of_a_prefix_on_the_host_a_prompt_takes_the_room_that_it_is_fetched_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ellm_sgl.sglang import admission

    scene = Scene()
    stem = scene.prefix(100, DEVICE, DEVICE, BOTH).tolist()
    scene.prefix(100, *[HOST] * 3, behind=stem)
    context = SimpleNamespace(table=scene.table)
    ours = SimpleNamespace(iteration=SimpleNamespace(elastic=scene.elastic))
    monkeypatch.setattr(admission, "context_of", lambda owner: context)
    monkeypatch.setattr(admission, "scheduler_of", lambda owner: ours)
    adder: Any = SimpleNamespace(page_size=BLOCK)
    key = key_of(range(100, 100 + 6 * BLOCK))
    _, last = scene.tree._match_prefix_helper(scene.tree.root_node, key)
    req: Any = SimpleNamespace(last_node=last)
    staged = -(-scene.elastic.slots * 3 // GROUPS)
    assert admission._idle_prefix(adder, req) == (3 + staged) * BLOCK
    locked(scene, 100, 3)
    assert admission._idle_prefix(adder, req) == staged * BLOCK
