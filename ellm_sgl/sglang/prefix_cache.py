"""SGLang's prefix caches over a pool in which a cached block may have lost its units.

To others the tree holds only what is resident: a match ends at the first block that lacks a unit,
and when a request leaves, what lies beyond its first such block is dropped, unless others use it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
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

from ellm_sgl.sglang.context import context_of, row_of
from ellm_sgl.sglang.scheduler import note_end
from ellm_sgl.sglang.server_args import PREFIX_CACHE
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
        for dead in _children_first(below):
            self.token_to_kv_pool_allocator.free_segment(dead.value, start_pos=0)
            self._delete_leaf(dead)


def _children_first(root: TreeNode) -> list[TreeNode]:
    """The nodes of a subtree, every child before its parent."""
    order = [root]
    for node in order:
        order += node.children.values()
    return order[::-1]
