"""The store beside the prefix tree, without a scheduler: what is stored, read and held back."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from ellm_sgl.sglang.platform.torchvision_ops import declare
from ellm_sgl.store import BlockStore, StoreFolder
from ellm_sgl.store import store as store_module
from ellm_sgl.store.records import RECORD_BYTES
from tests.simulation.configuration import Configuration
from tests.store.scene import now

declare()
BLOCK = 4


class Request:
    """As much of SGLang's `Req` as is looked at."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


class Scene:
    """A pool, a tree and a store."""

    def __init__(
        self, path: Path, blocks: int, store_blocks: int, submit: Any = now, at_once: int = 1
    ) -> None:
        from sglang.srt.runtime_context import get_parallel

        from ellm_sgl.sglang.kv_store import StoredPrefixes
        from tests.simulation.plane import Plane

        configuration = Configuration(
            layers=1, block_tokens=BLOCK, device_blocks=blocks, context=400
        )
        with get_parallel().override(tp_rank=0, tp_size=1, attn_tp_size=1):
            self.plane = plane = Plane(configuration)
        self.table, self.tree = plane.table, plane.tree
        self.nbytes = plane.pool.unit_bytes
        folder = StoreFolder(path, store_blocks * (self.nbytes + RECORD_BYTES))
        self.openings = 0

        def opened() -> BlockStore:
            self.openings += 1
            return BlockStore(folder, "0" * 32, self.nbytes, submit, at_once)

        self.stored = StoredPrefixes(
            opened, plane.elastic, plane.pool, plane.tree, lambda numbers: numbers
        )

    def request(self, first: int, blocks: int) -> Any:
        """Of a prompt that fills so many blocks, and a token of output."""
        req: Any = Request(
            origin_input_ids=array("q", range(first, first + blocks * BLOCK)),
            output_ids=array("q", [0]),
            extra_key=None,
            cache_salt=None,
            return_logprob=False,
            logprob_start_len=-1,
            req_pool_idx=first,
            finished=lambda: False,
        )
        req.kv = req
        return req

    def compute(self, req: Any) -> np.ndarray[Any, Any]:
        """Its prompt's KV, in blocks of its own."""
        tokens = len(req.origin_input_ids)
        blocks = self.table.allocate(tokens // BLOCK)
        assert len(self.table.place(blocks)) == len(blocks)
        self.table.note_read(blocks)
        self.table.map(req.req_pool_idx, blocks, tokens)
        return blocks

    def end(self, req: Any) -> None:
        """It leaves, and the tree has what it computed."""
        blocks = self.table.blocks_of(req.req_pool_idx).copy()
        self.stored.end(req)
        self.give(req, blocks)
        self.table.unmap(req.req_pool_idx)

    def give(self, req: Any, blocks: Any) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        from ellm_sgl.sglang.versions import adapter

        key = adapter().radix_key(req.origin_input_ids, req)
        slots = torch.from_numpy(blocks.astype(np.int64))[:, None] * BLOCK + torch.arange(BLOCK)
        self.tree.insert(InsertParams(key=key, value=slots.reshape(-1)))

    def in_tree(self, req: Any) -> int:
        from ellm_sgl.sglang.tree_blocks import peek
        from ellm_sgl.sglang.versions import adapter

        return len(peek(self.tree, adapter().radix_key(req.origin_input_ids, req)))

    def evict(self) -> None:
        self.plane.context.reclaim(10**6)

    def store_all(self, *reqs: Any) -> None:
        """What they have is in the store, and nowhere else."""
        for req in reqs:
            self.compute(req)
            self.end(req)
            vars(req).pop("_ellm_stored")
            self.evict()


class Later:
    """Runs what it is given when told so."""

    def __init__(self) -> None:
        self.jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        self.jobs.append((Future(), function))
        return self.jobs[-1][0]

    def run(self) -> None:
        while self.jobs:
            future, function = self.jobs.popleft()
            future.set_result(function())


def test_what_a_full_store_cannot_take_is_not_copied_again_and_again(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 16, store_blocks=4)
    req = scene.request(100, 8)
    scene.compute(req)
    pool = scene.plane.pool
    with patch.object(pool, "read", wraps=pool.read) as read:
        for _ in range(5):
            scene.stored.keep_computed([req])
    assert [len(call.args[0]) for call in read.call_args_list] == [4]


def test_a_request_that_meets_another_store_is_stored_there(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 16, store_blocks=4)
    scene.store_all(*[scene.request(first, 4) for first in (1000, 2000, 3000)])
    req = scene.request(100, 4)
    scene.compute(req)
    scene.stored.keep(req)
    scene.stored.drop()
    scene.store_all(scene.request(4000, 4))
    assert scene.stored.keep(req) is False
    assert scene.stored.store.leading(req._ellm_stored.chain.keys) == 4
    entry = scene.stored.store.index.get(req._ellm_stored.chain.keys[0])
    assert entry is not None and entry.stamp == req._ellm_stored.stamp


def test_of_requests_that_have_ended_that_stays_which_ended_last(tmp_path: Path) -> None:
    """A conversation that began first may be the one that is still going on."""
    scene = Scene(tmp_path, 16, store_blocks=6)
    long, short, new = (scene.request(first, 3) for first in (100, 300, 500))
    for req in (long, short):
        scene.compute(req)
        scene.stored.keep(req)
    for req in (short, long):
        scene.end(req)
    scene.compute(new)
    scene.end(new)
    store = scene.stored.store
    kept = [store.leading(req._ellm_stored.chain.keys) for req in (long, short, new)]
    assert kept == [3, 0, 3]


def test_what_ends_takes_the_room_of_others_and_not_its_own(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 16, store_blocks=4)
    req, other = scene.request(100, 4), scene.request(300, 2)
    blocks = scene.compute(req)
    scene.table.map(100, blocks[:2], 2 * BLOCK)
    scene.stored.keep(req)
    scene.compute(other)
    scene.stored.keep(other)  # which began later
    scene.table.map(100, blocks, 4 * BLOCK)
    assert scene.stored.keep(req) is False  # all is as recent
    scene.end(req)
    assert scene.stored.store.leading(req._ellm_stored.chain.keys) == 4


def test_a_store_is_opened_once_for_all_updates_before_its_use(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 16, store_blocks=4)
    for _ in range(32):
        scene.stored.drop()
        scene.stored.keep_computed([])
    assert scene.openings == 1 and scene.stored.describe()["blocks"] == 0
    scene.stored.fetch([scene.request(0, 2)], decoding=0)
    assert scene.openings == 2


def test_what_memory_has_no_room_for_is_read_once_it_has(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 8, store_blocks=64)
    req = scene.request(100, 6)
    scene.store_all(req)
    other = scene.request(500, 5)
    blocks = scene.compute(other)
    assert not scene.stored.fetch([req], decoding=1)
    assert scene.in_tree(req) == 2  # one is for who decodes
    scene.table.unmap(other.req_pool_idx)
    scene.table.release(blocks)
    assert not scene.stored.fetch([req], decoding=1)
    assert scene.in_tree(req) == 6 and scene.stored.fetched_tokens == 6 * BLOCK


def test_what_a_growing_pool_will_have_room_for_is_waited_for(tmp_path: Path) -> None:
    """A server that rested, or shares a budget: the prompt would be computed meanwhile."""
    scene = Scene(tmp_path, 8, store_blocks=64)
    req, unknown = scene.request(100, 6), scene.request(500, 6)
    scene.store_all(req)
    groups = scene.table.shape.num_groups
    for blocks, grows, held, there in (
        (1, False, False, 1), (1, True, True, 1), (3, True, True, 3), (3, False, False, 3),
        (8, True, False, 6),
    ):  # fmt: skip
        scene.table.limit_units(blocks * groups)
        found = scene.stored.fetch([req, unknown], 0, partial(bool, grows))
        assert (found == {req, unknown}, scene.in_tree(req)) == (held, there)
        assert held or not found


def test_who_is_retracted_reads_what_it_had(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 8, store_blocks=64)
    req = scene.request(100, 6)
    assert not scene.stored.fetch([req], decoding=0)
    scene.compute(req)
    scene.end(req)
    scene.evict()
    scene.stored.fetch([req], decoding=0)
    assert scene.in_tree(req) == 6


def test_nobody_overtakes_a_request_whose_prefix_is_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ellm_sgl.sglang import kv_store

    monkeypatch.setattr(kv_store, "BESIDE_A_STEP", 1)
    scene = Scene(tmp_path, 64, store_blocks=64)
    reqs = [scene.request(100 * n, 2) for n in range(1, 9)]
    scene.store_all(*reqs)
    for turn in range(16):
        held = scene.stored.fetch(reqs, decoding=1)
        assert held == frozenset(reqs[(turn + 1) // 2 :]), turn
    assert [scene.in_tree(req) for req in reqs] == [2] * 8


def test_of_a_long_queue_so_many_are_looked_up_at_a_time(tmp_path: Path) -> None:
    from ellm_sgl.sglang.kv_store import LOOKED_UP

    scene = Scene(tmp_path, 16, store_blocks=64)
    reqs = [scene.request(100 * n, 2) for n in range(1, LOOKED_UP + 4)]
    assert scene.stored.fetch(reqs, decoding=0) == frozenset(reqs[LOOKED_UP:])


def test_a_long_prefix_is_read_in_turns_where_nobody_decodes_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between these the server answers others."""
    from ellm_sgl.sglang import kv_store

    scene = Scene(tmp_path, 16, store_blocks=64)
    req = scene.request(100, 6)
    scene.store_all(req)
    monkeypatch.setattr(kv_store, "READ_BYTES", 2 * scene.nbytes)
    assert [scene.stored.fetch([req], decoding=0) for _ in range(3)] == [{req}, {req}, set()]
    assert scene.in_tree(req) == 6


def test_what_was_read_and_made_way_is_read_again_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path, 8, store_blocks=64)
    waiting, running = scene.request(100, 4), scene.request(500, 6)
    scene.store_all(waiting)
    assert not scene.stored.fetch([waiting], decoding=1)
    assert scene.in_tree(waiting) == 4
    scene.plane.elastic.reclaim_prefixes(6)
    blocks = scene.compute(running)
    before = scene.stored.fetched_tokens
    for turn in range(3):  # in part would be for nothing: it would go first as the other grows
        with monkeypatch.context() as patch:
            if turn > 0:  # until there is more room nothing is looked for
                patch.setattr(scene.tree, "match_prefix", None)
            assert not scene.stored.fetch([waiting], decoding=1)
        assert scene.stored.fetched_tokens == before and scene.in_tree(waiting) < 4
    scene.table.unmap(running.req_pool_idx)
    scene.table.release(blocks)
    assert not scene.stored.fetch([waiting], decoding=1)
    assert scene.in_tree(waiting) == 4


def test_who_has_been_looked_up_is_not_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ellm_sgl.sglang.kv_store import LOOKED_UP

    scene = Scene(tmp_path, 16, store_blocks=64)
    reqs = [scene.request(100 * n, 2) for n in range(1, LOOKED_UP + 4)]
    behind = frozenset(reqs[LOOKED_UP:])
    assert scene.stored.fetch(reqs, decoding=1) == behind
    monkeypatch.setattr(scene.tree, "match_prefix", None)
    assert scene.stored.fetch(reqs, decoding=1) == behind


def test_a_prefix_that_was_read_makes_way_for_none_behind_it(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 8, store_blocks=64)
    first, second = scene.request(100, 6), scene.request(500, 6)
    scene.store_all(first, second)
    for _ in range(3):
        scene.stored.fetch([first, second], decoding=0)
        assert scene.in_tree(first) == 6 and scene.in_tree(second) == 2


def test_what_is_computed_for_its_log_probabilities_is_not_read(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 8, store_blocks=64)
    req = scene.request(100, 6)
    scene.store_all(req)
    req.return_logprob, req.logprob_start_len = True, 2 * BLOCK + 1
    scene.stored.fetch([req], decoding=0)
    assert scene.in_tree(req) == 2


def test_a_prompt_in_chunks_is_stored_as_fast_as_it_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else is written while a prompt is computed: each chunk leaves no more behind than
    the disk has yet to write."""
    worker, chunk = Later(), 4
    scene = Scene(tmp_path, 16, store_blocks=64, submit=worker.submit, at_once=chunk)
    monkeypatch.setattr(store_module, "QUEUED_BYTES", 2 * scene.nbytes)
    req = scene.request(100, 3 * chunk)
    blocks = scene.compute(req)
    for done in range(chunk, 3 * chunk + 1, chunk):
        scene.table.map(req.req_pool_idx, blocks[:done], done * BLOCK)
        scene.stored.keep(req)
        worker.run()
        assert scene.stored.store.leading(req._ellm_stored.chain.keys) == done


@pytest.mark.parametrize("evicted", [False, True])
def test_what_a_short_answer_leaves_to_store_is_stored_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evicted: bool
) -> None:
    worker = Later()
    scene = Scene(tmp_path, 16, store_blocks=64, submit=worker.submit)
    monkeypatch.setattr(store_module, "QUEUED_BYTES", 3 * scene.nbytes)
    req = scene.request(100, 10)
    scene.compute(req)
    scene.end(req)
    worker.run()
    keys = req._ellm_stored.chain.keys
    for turn in range(1, 5):
        assert scene.stored.store.leading(keys) == min(3 * turn, 3 if evicted else 10)
        if evicted:
            scene.evict()
        scene.stored.keep_computed([])
        worker.run()
    scene.evict()
    assert scene.table.free_blocks == scene.table.num_blocks


@pytest.mark.parametrize("fails", [False, True])
def test_an_update_of_the_weights_lets_the_store_go(tmp_path: Path, fails: bool) -> None:
    """Whether it worked or not: weights may be others by now."""
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    from ellm_sgl.sglang import weights

    scene = Scene(tmp_path, 8, store_blocks=64)
    scene.plane.context.stored = scene.stored
    allocator = SimpleNamespace(ellm=scene.plane.context)
    place = SimpleNamespace(tp_size=1, tp_rank=0, dp_rank=None)
    scheduler = SimpleNamespace(token_to_kv_pool_allocator=allocator, ps=place)
    updater: Any = SimpleNamespace(scheduler=scheduler)
    before = scene.stored.store

    def update(*_: Any) -> Any:
        if fails:
            raise RuntimeError("half of the weights have come")
        return SimpleNamespace(success=True)

    asked = UpdateWeightFromDiskReqInput(model_path="new")
    assert weights.update(update, updater, asked).success == (not fails)
    assert scene.openings == 1 and scene.stored.store is not before
