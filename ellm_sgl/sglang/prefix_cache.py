"""SGLang's prefix caches over a pool in which a cached block may have lost its units.

To others the tree holds only what is resident: a match ends at the first block that lacks a unit,
and when a request leaves, what lies beyond its first such block is dropped, unless others use it.

Of prefixes that nobody uses, blocks may be on the host alone. SGLang drops whole leaves for slots;
where memory is short, only what has some of it goes (`drop_idle`).
"""

from __future__ import annotations

import dataclasses
import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, InsertResult, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.registry import (
    TreeCacheBuildContext,
    register_radix_cache_backend,
    registered_radix_cache_backends,
)

from ellm_sgl.memory.host_tier import Has
from ellm_sgl.sglang.context import context_of, row_of
from ellm_sgl.sglang.scheduler import note_end
from ellm_sgl.sglang.server_args import PREFIX_CACHE
from ellm_sgl.sglang.tree_blocks import blocks_of
from ellm_sgl.sglang.versions import adapter

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, MatchResult
    from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode


def register_prefix_cache() -> None:
    """Register the factory under the name that `server_args` selects."""
    if PREFIX_CACHE not in registered_radix_cache_backends():
        register_radix_cache_backend(PREFIX_CACHE, _build)


def _build(context: TreeCacheBuildContext) -> BasePrefixCache:
    kind: type[BasePrefixCache] = EllmRadixCache
    if context.disable_radix_cache and adapter().has_chunk_cache:
        from ellm_sgl.sglang.chunk_cache import EllmChunkCache

        kind = EllmChunkCache
    cache = kind(context.params)
    context_of(cache).prefix_cache = cache
    return cache


_Calls: Any = adapter().tree_calls


class EllmRadixCache(_Calls, RadixCache):
    """The radix tree; see the module's docstring."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self._table = context_of(self).table
        self._match_all = False

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """The longest cached prefix whose KV is all there."""
        result = super().match_prefix(params)
        if self._match_all:
            return result
        slots = adapter().matched(self, result)
        resident = self._resident_tokens(slots)
        if resident == len(slots):
            return result
        # Match again up to there: this splits the node at the boundary.
        return super().match_prefix(dataclasses.replace(params, key=params.key[:resident]))

    def insert(self, params: InsertParams) -> InsertResult:
        """Insert, and give the tree back any KV that the request has and the tree had lost."""
        cached = self._match_whole(params.key)
        lost = self._table.depth(cached[:: self.page_size].cpu().numpy() // self.page_size) > 0
        for i in np.flatnonzero(lost):
            at = int(i) * self.page_size
            old, new = (int(t[at]) // self.page_size for t in (cached, params.value))
            if old != new:
                self._table.adopt(old, new)
        return super().insert(params)

    def drop_idle(self, has: Has, enough: Callable[[], bool]) -> None:
        """Drop prefixes that nobody uses, in the order in which SGLang does, until `enough`: of
        each node what begins with the first block that `has` something, and all behind it."""
        began, dropped = time.perf_counter(), 0
        priority = self.eviction_strategy.get_priority
        heap = [(priority(leaf), leaf) for leaf in self.evictable_leaves]
        heapq.heapify(heap)
        staying: Counter[TreeNode] = Counter()
        """Of each node, children that have been looked at and stay."""
        while heap and not enough():
            _, node = heapq.heappop(heap)
            parent, found = node.parent, np.flatnonzero(has(blocks_of(node, self.page_size)))
            if len(found):
                dropped += self._drop_tail(node, int(found[0]) * self.page_size)
            if len(found) == 0 or found[0] > 0:
                staying[parent] += 1
            # What stays must not keep from going what is before it.
            if parent.lock_ref == 0 and len(parent.children) == staying[parent]:
                heapq.heappush(heap, (priority(parent), parent))
        self.update_eviction_metrics(dropped, began)

    # -- `TreeCalls` --------------------------------------------------------------------------

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Matches have a request's own blocks, whether resident or not."""
        self._match_all = True
        try:
            yield
        finally:
            self._match_all = False

    def stays(self, req: Req) -> None:
        """The tree has taken over a prefilled request's blocks, or given it those it had."""
        length = self._table.length_of(row_of(req))
        ours = context_of(self)
        ours.map_request(req, self.req_to_token_pool.req_to_token, length)
        if ours.stored is not None:
            ours.stored.keep(req)

    def leaves(self, req: Req) -> None:
        """A request that gives its blocks back is a sequence no more."""
        if (stored := context_of(self).stored) is not None:
            stored.end(req)
        context_of(self).forget_request(req)
        note_end(self, req)

    def has_left(self, req: Req, tokens: int) -> None:
        """Keep its blocks as far as they are all there."""
        ids = (req.origin_input_ids + req.output_ids)[:tokens]
        key = adapter().radix_key(ids, req).page_aligned(self.page_size)
        cached = self._match_whole(key)
        resident = self._resident_tokens(cached)
        if resident < len(cached):
            self._drop_beyond(key, resident)

    # -- what is there ------------------------------------------------------------------------

    def _match_whole(self, key: RadixKey) -> torch.Tensor:
        """Slots of what the tree has of `key`, whether resident or not."""
        return adapter().matched(self, super().match_prefix(MatchPrefixParams(key=key)))

    def _resident_tokens(self, slots: torch.Tensor) -> int:
        """Leading tokens, whole blocks, whose units are all there. `slots`: in token order."""
        blocks = slots[:: self.page_size].cpu().numpy() // self.page_size
        incomplete = np.flatnonzero(self._table.depth(blocks))
        return int(incomplete[0]) * self.page_size if len(incomplete) else len(slots)

    def _drop_beyond(self, key: RadixKey, tokens: int) -> None:
        """Delete what the tree holds of `key` beyond `tokens`, unless a request still uses it."""
        node = self.root_node
        if tokens:
            matched, node = self._match_prefix_helper(node, key[:tokens])
            if sum(map(len, matched)) != tokens:
                return
        below = node.children.get(key[tokens:].child_key(self.page_size))
        if below is None or below.lock_ref > 0:
            return
        self._delete(below)

    def _drop_tail(self, node: TreeNode, tokens: int) -> int:
        """Of a node that nobody uses, delete all but its first `tokens`, and what is behind it.
        Returns tokens deleted."""
        if tokens:
            self._split_node(node.key, node, tokens)
        return self._delete(node)

    def _delete(self, root: TreeNode) -> int:
        """A subtree that nobody uses. Returns its tokens."""
        nodes = _children_first(root)
        for dead in nodes:
            self.token_to_kv_pool_allocator.free_segment(dead.value, start_pos=0)
            self._delete_leaf(dead)
        return sum(len(dead.value) for dead in nodes)


def _children_first(root: TreeNode) -> list[TreeNode]:
    """The nodes of a subtree, every child before its parent."""
    order = [root]
    for node in order:
        order += node.children.values()
    return order[::-1]
