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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams

from ellm_sgl.memory import ElasticMemory, KVPool, OutOfBlocksError
from ellm_sgl.memory.shape import IntArray
from ellm_sgl.sglang.versions import adapter
from ellm_sgl.store import BlockStore, Chain

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey


FETCHED_BESIDE = 8 << 20
"""Bytes read in a turn while requests decode: some milliseconds, as a step takes."""
FETCHED_AT_ONCE = 64 << 20
"""Bytes read at a time otherwise."""

_STORED = "_ellm_stored"
"""Attribute of a `Req`: its `_Stored`."""


@dataclass
class _Stored:
    """What is known of one request's blocks."""

    chain: Chain
    stamp: int
    kept: int = 0
    """Leading blocks that are in the store."""
    lost: bool = False
    """The block behind them left the device before it was stored."""
    fetched: bool = False
    """All has been read that the store had of it."""


class StoredPrefixes:
    """One per scheduler process.

    Args:
        opened: opens the store of the model's present weights.
        elastic: the page table,
        pool: and the memory behind it, on a CPU host.
        cache: SGLang's prefix tree.
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
        self.store = opened()
        self._opened = opened
        self._elastic = elastic
        self._table = table = elastic.table
        self._pool = pool
        self._cache = cache
        self._least_of_ranks = least_of_ranks
        self._block_tokens = table.shape.block_tokens
        self._groups = table.shape.num_groups
        self.fetched_tokens = 0
        """Of prompts, that were read instead of computed."""

    def reopen(self) -> None:
        """The weights may be others: what is stored and found from now on is theirs. Nobody has
        KV."""
        self.store.close()
        self.store = self._opened()

    def describe(self) -> dict[str, Any]:
        """What `/ellm/state` says of it."""
        store, totals = self.store, self.store.totals
        return {
            "bytes": store.nbytes,
            "blocks": len(store.index),
            "most_blocks": store.index.capacity,
            "stored_blocks_total": totals.stored_blocks,
            "read_blocks_total": totals.read_blocks,
            "damaged_blocks_total": totals.damaged_blocks,
            "fetched_tokens_total": self.fetched_tokens,
            "problem": store.problem,
        }

    # -- store ------------------------------------------------------------------------------

    def keep_running(self, reqs: Sequence[Req]) -> None:
        """Store what these requests have completed since the last step."""
        for req in reqs:
            if req.finished():  # with overlap scheduling they stay in the batch for another step
                continue
            stored = getattr(req, _STORED, None)
            blocks = (len(req.origin_input_ids) + len(req.output_ids)) // self._block_tokens
            if stored is None or (blocks > stored.kept and not stored.lost):
                self.keep(req)

    def keep(self, req: Req) -> None:
        """Store the request's full blocks that are on the device and not in the store, as far as
        the queue to the disk has room."""
        stored, seq_id = self._stored(req), adapter().kv(req).req_pool_idx
        known = len(req.origin_input_ids) + len(req.output_ids)
        full = min(self._table.length_of(seq_id), known) // self._block_tokens
        self._name(req, stored, full)
        keys, store = stored.chain.keys, self.store
        while stored.kept < full and not stored.lost:
            if store.has(keys[stored.kept]):
                stored.kept += 1
                continue
            count = self._put(stored, keys[stored.kept : full], seq_id)
            if count == 0:
                return
            stored.kept += count

    def end(self, req: Req) -> None:
        """The request leaves: what it has completed is stored, and all of it counts as used."""
        stored = self._stored(req)
        stored.kept, stored.lost = 0, False  # others may have taken the room of its first blocks
        self.keep(req)
        self.store.touch(stored.chain.keys, stored.stamp)

    def _put(self, stored: _Stored, keys: list[bytes], seq_id: int) -> int:
        """Store the leading ones of these blocks that can be; returns how many."""
        keys = keys[: self.store.room]
        new = next((i for i, key in enumerate(keys) if self.store.has(key)), len(keys))
        blocks = self._table.blocks_of(seq_id)[stored.kept : stored.kept + new]
        there = ~self._table.misses_units(blocks) & self._table.computed_in_full(blocks)
        count = int(np.argmin(there)) if not there.all() else len(blocks)
        if count == 0:
            stored.lost = new > 0
            return 0
        data = self._pool.read(self._table.units[blocks[:count]])
        return self.store.put(keys[:count], stored.kept, stored.stamp, data)

    # -- fetch ------------------------------------------------------------------------------

    def fetch(self, reqs: Sequence[Req], decoding: int) -> frozenset[Req]:
        """Read what the store has of these requests' prompts into the tree, in their order, as
        far as memory is free.

        Args:
            reqs: about to be admitted.
            decoding: requests that run; beside them so much is read as takes about a step.

        Returns:
            Those of which more is to be read in the next turns.
        """
        left = max(FETCHED_BESIDE // self.store.block_bytes, 1) if decoding else None
        for place, req in enumerate(reqs):
            stored = self._stored(req)
            while not stored.fetched:
                if left is not None and left <= 0:
                    return frozenset(r for r in reqs[place:] if not self._stored(r).fetched)
                at_once = FETCHED_AT_ONCE // self.store.block_bytes
                most = max(at_once if left is None else left, 1)
                count = self._fetch(req, stored, most, decoding)
                if left is not None:
                    left -= count
        return frozenset()

    def _fetch(self, req: Req, stored: _Stored, most: int, decoding: int) -> int:
        """Read up to so many blocks behind those that the tree has. Returns how many were read."""
        tokens = req.origin_input_ids + req.output_ids
        # The last token is computed in any case: its logits are what is asked for.
        full = (len(tokens) - 1) // self._block_tokens
        self._name(req, stored, full)
        key = adapter().radix_key(tokens, req)
        found = self._cache.match_prefix(MatchPrefixParams(key=key))
        slots = adapter().matched(self._cache, found)
        have = len(slots) // self._block_tokens
        there = self.store.leading(stored.chain.keys[have : min(full, have + most)])
        self._cache.inc_lock_ref(found.last_device_node)
        try:
            wanted = self._least_of_ranks([min(there, self._room(decoding))])[0]
            blocks = self._read(stored.chain.keys[have : have + wanted])
            if len(blocks):
                end = (have + len(blocks)) * self._block_tokens
                self._insert(key[:end], slots, blocks)
        finally:
            self._cache.dec_lock_ref(found.last_device_node)
        stored.fetched = len(blocks) < most or have + len(blocks) >= full
        self.fetched_tokens += len(blocks) * self._block_tokens
        self.store.touch(stored.chain.keys[: have + len(blocks)], stored.stamp)
        return len(blocks)

    def _room(self, decoding: int) -> int:
        """Blocks that may be read: into units that are free, or of prefixes that nobody uses, but
        for a block that each running request may need next."""
        idle = self._cache.evictable_size() // self._block_tokens
        free = self._table.free_units // self._groups + idle - decoding
        return max(min(free, self._table.free_blocks), 0)

    def _read(self, keys: Sequence[bytes]) -> IntArray:
        """New blocks with what the store has of these keys, as far as it is intact on all ranks."""
        if not keys:
            return np.empty(0, np.int32)
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
        return placed

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

    def _stored(self, req: Req) -> _Stored:
        found: _Stored | None = getattr(req, _STORED, None)
        if found is None:
            found = _Stored(
                Chain(self._block_tokens, adapter().namespaces(req)), self.store.begin()
            )
            setattr(req, _STORED, found)
        return found

    def _name(self, req: Req, stored: _Stored, blocks: int) -> None:
        """Have the keys of the request's first `blocks` blocks."""
        chain = stored.chain
        if blocks > len(chain.keys):
            tokens: Any = req.origin_input_ids + req.output_ids
            new = tokens[chain.tokens : blocks * self._block_tokens]
            chain.extend(np.asarray(new, np.int64))
