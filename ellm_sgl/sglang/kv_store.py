"""The store on disk, beside SGLang's prefix tree.

```
 request ──▶ tree: blocks on the device ──▶ store: the blocks behind them ──▶ the rest is computed
                                                 │ read into free units
                                                 ▼
                                     blocks of the tree, like any cached prefix
```

Blocks are stored as soon as they are full and computed, between two steps; the copy is the
scheduler's work, the writing another thread's. What is read becomes part of the tree before the
request is admitted, so that nothing else has to know of the store.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams

from ellm_sgl.memory import ElasticMemory, KVPool, OutOfBlocksError
from ellm_sgl.memory.shape import IntArray
from ellm_sgl.sglang.known_tokens import count_of, ids_of
from ellm_sgl.sglang.tree_blocks import key_of, peek
from ellm_sgl.sglang.versions import adapter
from ellm_sgl.store import READ_BYTES, BlockStore, Bytes, Chain, StoreFullError, Totals

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode

BESIDE_A_STEP = 8 << 20
"""Bytes read in a turn while requests decode, or copied for those that have ended: some
milliseconds, as a step takes. Otherwise `READ_BYTES`."""
LOOKED_UP = 32
"""Most waiting requests that are looked up in a turn."""
_MOST_ENDED = 64
"""Requests that have ended whose blocks still wait for the queue to the disk."""

_STORED = "_ellm_stored"
"""Attribute of a `Req`: its `_Stored`."""


@dataclass
class _Stored:
    """What is known of one request's blocks."""

    store: BlockStore
    """Whose the rest is."""
    chain: Chain
    stamp: int
    kept: int = 0
    """Leading blocks that are in the store."""
    lost: bool = False
    """The block behind them is not to be stored: it left the device before, or all that the store
    has is as recent."""
    fetched: bool = False
    """All has been read that the store had of it:"""
    node: TreeNode | None = None
    """the last of the tree's nodes that have it,"""
    there: int = 0
    """and how many blocks these had then."""
    lacking: int = 1
    """So many of them at least have made way for others since, once that node has."""


class StoredPrefixes:
    """One per scheduler process.

    Args:
        opened: opens the store of the model's present weights.
        elastic: the page table,
        pool: and the memory behind it, on a CPU host.
        cache: the prefix tree.
        least_of_ranks: the least of each number over all ranks: what one cannot read, none has.
    """

    def __init__(
        self,
        opened: Callable[[], BlockStore],
        elastic: ElasticMemory,
        pool: KVPool,
        cache: RadixCache,
        least_of_ranks: Callable[[list[int]], list[int]],
    ) -> None:
        self._store: BlockStore | None = opened()
        self._opened = opened
        self._elastic = elastic
        self._table = table = elastic.table
        self._pool = pool
        self._cache = cache
        self._least_of_ranks = least_of_ranks
        self._block_tokens = table.shape.block_tokens
        self._groups = table.shape.num_groups
        self._ended: deque[tuple[_Stored, RadixKey]] = deque(maxlen=_MOST_ENDED)
        self.fetched_tokens = 0
        """Of prompts, that were read instead of computed."""

    @property
    def store(self) -> BlockStore:
        """Of the present weights."""
        if self._store is None:
            self._store = self._opened()
        return self._store

    def queued_bytes(self) -> int:
        """Of memory, that wait to be written."""
        store = self._store  # asked for on other threads, too
        return 0 if store is None else store.queued_bytes

    def drop(self) -> None:
        """The weights may be others, and be so again before anybody has KV: the store is theirs
        that are there when it is asked for next. Nobody has KV."""
        if self._store is not None:
            self._store.close()
        self._store = None
        self._ended.clear()

    def describe(self) -> dict[str, Any]:
        """What `/ellm/state` says of it; nothing is there between new weights and their use."""
        store = self._store
        totals = Totals() if store is None else store.totals
        return {
            "bytes": 0 if store is None else store.nbytes,
            "blocks": 0 if store is None else len(store.index),
            "most_blocks": 0 if store is None else store.index.capacity,
            "stored_blocks_total": totals.stored_blocks,
            "read_blocks_total": totals.read_blocks,
            "damaged_blocks_total": totals.damaged_blocks,
            "fetched_tokens_total": self.fetched_tokens,
            "problem": None if store is None else store.problem,
        }

    # -- store ------------------------------------------------------------------------------

    def keep_computed(self, reqs: Sequence[Req]) -> None:
        """Store what these requests, which decode, have completed since the last step, and what is
        left of those that have ended."""
        for req in reqs:
            if req.finished():  # with overlap scheduling they stay in the batch for another step
                continue
            stored = self._stored(req)
            blocks = count_of(req) // self._block_tokens
            if blocks > stored.kept and not stored.lost:
                self.keep(req)
        most = self._blocks_in(BESIDE_A_STEP if reqs else READ_BYTES)
        while self._ended and self.store.room:
            stored, key = self._ended[0]
            blocks_there = peek(self._cache, key)[: len(stored.chain.keys)]
            if self._keep(stored, blocks_there, most):
                return
            self._ended.popleft()

    def keep(self, req: Req) -> bool:
        """Store the request's full blocks that are on the device and not in the store, as far as
        the queue to the disk has room. Returns whether some are left to be stored."""
        stored = self._stored(req)
        return self._keep(stored, self._full_blocks(req, stored), self.store.room)

    def end(self, req: Req) -> None:
        """The request leaves: what it has completed is stored, and all of it counts as used now,
        before what it has yet to store takes room. What the queue has no room for is stored while
        the tree has it."""
        stored = self._stored(req)
        # Others may have taken the room of its first blocks; and it may come again.
        stored.kept, stored.lost, stored.fetched = 0, False, False
        stored.stamp = self.store.begin()
        blocks = self._full_blocks(req, stored)
        self.store.touch(stored.chain.keys, stored.stamp)
        if self._keep(stored, blocks, self.store.room) and self.store.problem is None:
            self._ended.append((replace(stored), key_of(req)))

    def _keep(self, stored: _Stored, blocks: IntArray, most: int) -> bool:
        """Store up to so many of a request's leading blocks. Returns whether some are left to be
        stored."""
        keys = stored.chain.keys
        while stored.kept < len(blocks) and not stored.lost:
            if self.store.has(keys[stored.kept]):
                stored.kept += 1
                continue
            end = min(stored.kept + min(most, self.store.room), len(blocks))
            count = self._put(stored, blocks[stored.kept : end])
            if count == 0:
                break
            stored.kept += count
            most -= count
        return stored.kept < len(blocks) and not stored.lost

    def _put(self, stored: _Stored, blocks: IntArray) -> int:
        """Store the leading ones of these blocks that can be; returns how many."""
        keys = stored.chain.keys[stored.kept : stored.kept + len(blocks)]
        new = next((i for i, key in enumerate(keys) if self.store.has(key)), len(keys))
        blocks = blocks[:new]
        there = ~self._table.misses_units(blocks) & self._table.computed_in_full(blocks)
        count = int(np.argmin(there)) if not there.all() else new
        if count == 0:
            stored.lost = new > 0
            return 0
        units = self._table.units[blocks]

        def read(taken: int) -> Bytes:
            return self._pool.read(units[:taken])

        try:
            return self.store.put(keys[:count], stored.kept, stored.stamp, read)
        except StoreFullError:
            stored.lost = True
            return 0

    # -- fetch ------------------------------------------------------------------------------

    def fetch(
        self, reqs: Sequence[Req], decoding: int, grows: Callable[[], bool] = bool
    ) -> frozenset[Req]:
        """Read what the store has of these requests' prompts into the tree, in their order, as
        far as memory is free; what the tree has of those before stays.

        Args:
            reqs: that may be admitted.
            decoding: requests that run; beside them so much is read as takes about a step.
            grows: whether the pool is about to; asked where memory is short, on all ranks.

        Returns:
            Those of which more is to be read in the next turns, or may be.
        """
        if not reqs or ((room := self._room(decoding)) == 0 and not grows()):
            return frozenset()
        first = self._stored(reqs[0])
        if first.fetched and self._has_made_way(reqs[0], first, room, decoding):
            first.fetched = False
        left = self._blocks_in(BESIDE_A_STEP if decoding else READ_BYTES)
        looked_up = [(req, self._stored(req)) for req in reqs[:LOOKED_UP]]
        unread = [place for place, (_, stored) in enumerate(looked_up) if not stored.fetched]
        with ExitStack() as locks:
            for place, (req, stored) in enumerate(looked_up[: max(unread, default=-1) + 1]):
                key, slots, _ = self._locked(req, locks)
                while not stored.fetched:
                    if left <= 0:
                        return self._unfetched(reqs[place:])
                    count = self._fetch(req, stored, key, slots, left, decoding)
                    if count == 0 and not stored.fetched:  # memory is short: in another turn
                        return self._unfetched(reqs[place:]) if grows() else frozenset()
                    left -= count
                    _, slots, stored.node = self._locked(req, locks)
                    stored.there, stored.lacking = len(slots) // self._block_tokens, 1
        return self._unfetched(reqs[LOOKED_UP:])

    def _unfetched(self, reqs: Sequence[Req]) -> frozenset[Req]:
        return frozenset(req for req in reqs if not self._stored(req).fetched)

    def _locked(self, req: Req, locks: ExitStack) -> tuple[RadixKey, torch.Tensor, TreeNode]:
        """The key of all that the request has, the slots that the tree has of it, and the last node
        that has some of these; they stay there as long as `locks` are held."""
        key = key_of(req)
        found = self._cache.match_prefix(MatchPrefixParams(key=key))
        node = found.last_device_node
        self._cache.inc_lock_ref(node)
        locks.callback(self._cache.dec_lock_ref, node)
        return key, adapter().matched(self._cache, found), node

    def _has_made_way(self, req: Req, stored: _Stored, room: int, decoding: int) -> bool:
        """Whether some of what was read of a request's prompt has made way for others since, and
        there is room for it again: else it would go once more as soon as these grow."""
        if room < stored.lacking or stored.node is None or is_in(self._cache, stored.node):
            return False
        with ExitStack() as locks:
            _, slots, _ = self._locked(req, locks)
            lacking = max(stored.there - len(slots) // self._block_tokens, 1)
            free = self._room(decoding)
            # `room` counts what is still there of the prefix, which cannot make way for the rest.
            stored.lacking = lacking + room - free
            return lacking <= free

    def _fetch(
        self,
        req: Req,
        stored: _Stored,
        key: RadixKey,
        slots: torch.Tensor,
        most: int,
        decoding: int,
    ) -> int:
        """Read up to so many blocks behind those that the tree has. Returns how many were read."""
        have = len(slots) // self._block_tokens
        # One more than that tells whether there are more.
        end = min(_most_prefix(req) // self._block_tokens, have + most + 1)
        self._name(req, stored, end)
        keys = stored.chain.keys[have:end]
        there, room = self._least_of_ranks([self.store.leading(keys), self._room(decoding)])
        wanted = min(there, room, most)
        intact, blocks = self._read(keys[:wanted])
        if len(blocks):
            self._insert(key[: (have + len(blocks)) * self._block_tokens], slots, blocks)
        # All; or the next block is damaged.
        stored.fetched = len(blocks) == there or intact < wanted
        self.fetched_tokens += len(blocks) * self._block_tokens
        self.store.touch(stored.chain.keys[: have + len(blocks)], stored.stamp)
        return len(blocks)

    def _room(self, decoding: int) -> int:
        """Blocks that may be read: into units that are free, or of prefixes that nobody uses, but
        for a block that each running request may need next."""
        units = self._table.free_units + self._table.idle_units(self._cache.evictable_size())
        return max(min(units // self._groups - decoding, self._table.free_blocks), 0)

    def _read(self, keys: Sequence[bytes]) -> tuple[int, IntArray]:
        """How many of these the store has intact on all ranks; and new blocks with them, as far as
        there is memory."""
        if not keys:
            return 0, np.empty(0, np.int32)
        data = np.empty((len(keys), self.store.block_bytes), np.uint8)
        intact = self._least_of_ranks([self.store.read(keys, data)])[0]
        self._elastic.reclaim_prefixes(intact * self._groups)
        try:
            blocks = self._table.allocate(intact)
        except OutOfBlocksError:
            blocks = np.empty(0, np.int32)
        placed = self._table.place(blocks)
        self._table.release(blocks[len(placed) :])
        if len(placed):
            self._pool.write(self._table.units[placed], data[: len(placed)])
            self._table.note_read(placed)
        return intact, placed

    def _insert(self, key: RadixKey, slots: torch.Tensor, blocks: IntArray) -> None:
        """Give the tree these blocks, behind those in `slots`, that it has of `key`."""
        first = torch.from_numpy(blocks.astype(np.int64) * self._block_tokens)
        new = (first[:, None] + torch.arange(self._block_tokens)).reshape(-1)
        values = torch.cat([slots, new])
        inserted = self._cache.insert(InsertParams(key=key, value=values)).prefix_len
        # It may hold some already that lacked units, and now has these blocks' (`insert`).
        twice = values[len(slots) : inserted]
        if len(twice):
            self._cache.token_to_kv_pool_allocator.free_segment(twice, start_pos=0)

    # -- requests ---------------------------------------------------------------------------

    def _blocks_in(self, nbytes: int) -> int:
        """At least one."""
        return max(nbytes // (self._pool.unit_bytes * self._groups), 1)

    def _stored(self, req: Req) -> _Stored:
        found: _Stored | None = getattr(req, _STORED, None)
        if found is None or found.store is not self.store:
            chain = Chain(self._block_tokens, adapter().namespaces(req))
            found = _Stored(self.store, chain, self.store.begin())
            setattr(req, _STORED, found)
        return found

    def _full_blocks(self, req: Req, stored: _Stored) -> IntArray:
        """Those of a request that runs, and whose tokens are known: they have keys now."""
        seq_id = adapter().kv(req).req_pool_idx
        full = min(self._table.length_of(seq_id), count_of(req)) // self._block_tokens
        self._name(req, stored, full)
        return self._table.blocks_of(seq_id)[:full]

    def _name(self, req: Req, stored: _Stored, blocks: int) -> None:
        """Have the keys of the request's first `blocks` blocks."""
        chain = stored.chain
        if blocks > len(chain.keys):
            chain.extend(ids_of(req, chain.tokens, blocks * self._block_tokens))


def _most_prefix(req: Req) -> int:
    """Tokens that need not be computed. The last one's logits are asked for in any case, and others
    may be (SGLang's `Req._compute_max_prefix_len`)."""
    known, start = count_of(req) - 1, req.logprob_start_len
    return min(known, start) if req.return_logprob and start >= 0 else known


def is_in(tree: RadixCache, node: TreeNode) -> bool:
    """Whether a node that was in the tree still is: leaves go first, so all before it are, too."""
    parent = node.parent
    if parent is None:
        return node is tree.root_node
    return parent.children.get(node.key.child_key(tree.page_size)) is node
