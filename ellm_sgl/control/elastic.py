"""Elastic memory: make room by evicting blocks, take it back when there is room again.

Eviction is cheap (the KV is dropped; the next step recomputes it beside its decode rows), and so
is restoration (a step that recomputes a block anyway writes it to a free unit). So nothing here
looks ahead: blocks leave when units are needed, oldest first, and return when units are free.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ellm_sgl.kv import NONE, PageTable
from ellm_sgl.kv.page_table import IntArray
from ellm_sgl.policies import Policy, RequestView, SystemState

OWNER_AND_ONE_SEQUENCE = 2
"""References of a block that no other request uses (`PageTable.references`)."""

Reclaim = Callable[[int], int]
"""Frees about so many tokens of cached prefixes that nobody uses; returns tokens freed."""


@dataclass
class Totals:
    """Counters since start, in the units of their names."""

    evicted_units: int = 0
    restored_units: int = 0
    recomputed_tokens: int = 0
    retractions: int = 0


class ElasticMemory:
    """Applies a policy's target ratios, and evicts further when memory runs out.

    Args:
        table: the page table to work on.
        policy: gives each running request its target ratio.
        transient_tokens: rows that a step may recompute; bounds what may be missing at once.
        reclaim: frees cached prefixes; these go before any running request's blocks do.
    """

    def __init__(
        self, table: PageTable, policy: Policy, transient_tokens: int, reclaim: Reclaim
    ) -> None:
        self.table = table
        self.policy = policy
        self.transient_tokens = transient_tokens
        self.totals = Totals()
        self._reclaim = reclaim
        self._targets: dict[int, int] = {}

    # -- observe ----------------------------------------------------------------------------

    def forget(self, seq_id: int) -> None:
        """A request has left; its blocks lose a reference."""
        self.table.unmap(seq_id)
        self._targets.pop(seq_id, None)

    def fits_transient(self, seq_ids: Iterable[int]) -> bool:
        """Whether one step can recompute all that these requests miss."""
        if self.table.none_units == 0:
            return True
        return sum(map(self.table.uncached_tokens, seq_ids)) <= self.transient_tokens

    def admission_tokens(self, reclaimable: int) -> tuple[int, int]:
        """Token budgets for admitting waiting requests.

        Args:
            reclaimable: tokens of cached prefixes that nobody uses.

        Returns:
            (now, eventually): tokens that fit fully cached now, and tokens whose requests fit
            once they are brought to their targets. Both fall by what is evicted beyond the
            targets: while requests miss more than the policy wants, none should join.
        """
        owed = sum(map(self._owed_blocks, self.table.sequence_ids))
        now = self._free_tokens() + reclaimable - owed * self.table.shape.block_tokens
        ratio = self.policy.joining_ratio(self._state(self.table.sequence_ids))
        return now, int(now / (1 - ratio))

    # -- decide and apply -------------------------------------------------------------------

    def make_room(self, units: int) -> bool:
        """Free units until `units` can be placed: cached prefixes first, then the oldest
        unshared blocks of running requests, then shared ones.

        Returns:
            Whether there is room now.
        """
        self._reclaim_until(units)
        for shared in (False, True):
            short = units - self.table.free_units
            if short <= 0:
                return True
            self._evict_units(short, shared)
        return self.table.free_units >= units

    def place(self, blocks: IntArray) -> int:
        """Give units to new blocks, making room first. The last blocks come first: they are
        the ones that decoding goes on from.

        Returns:
            Blocks left without units: their KV exists only while a step computes it.
        """
        self.make_room(len(blocks) * self.table.shape.num_groups)
        return len(blocks) - len(self.table.place(blocks[::-1]))

    def apply_targets(self, seq_ids: Sequence[int]) -> None:
        """Bring every request up to its policy's target: evict its oldest unshared blocks."""
        block_tokens = self.table.shape.block_tokens
        room = self.transient_tokens - sum(map(self.table.uncached_tokens, seq_ids))
        for seq_id, ratio in zip(seq_ids, self.policy.ratio(self._state(seq_ids)), strict=True):
            target = int(ratio * self.table.length_of(seq_id)) // block_tokens * block_tokens
            self._targets[seq_id] = target
            missing = target - self.table.uncached_tokens(seq_id)
            count = min(missing, room) // block_tokens
            if count <= 0:
                continue
            blocks = self._evictable(seq_id, shared=False)
            for block in blocks[self.table.depth(blocks) == 0][:count]:
                self.totals.evicted_units += self.table.evict(int(block))
                room -= block_tokens

    def restore(self, seq_ids: Sequence[int]) -> list[int]:
        """Place missing blocks that the coming step recomputes anyway, newest first, as far as
        units are free beyond one block per request (the step's own growth). Cached prefixes
        that nobody uses make way.

        The caller must write the recomputed KV of these blocks in this step.

        Returns:
            The blocks placed.
        """
        if self.table.none_units == 0:
            return []
        wanted = sum(map(self._owed_blocks, seq_ids)) * self.table.shape.num_groups
        growth = len(seq_ids) * self.table.shape.num_groups
        self._reclaim_until(growth + wanted)
        restored: list[int] = []
        before = self.table.used_units
        for seq_id in seq_ids:
            spare = (self.table.free_units - growth) // self.table.shape.num_groups
            count = min(spare, self._owed_blocks(seq_id))
            if count > 0:
                blocks = self.table.blocks_of(seq_id)
                missing = blocks[(self.table.units[blocks] == NONE).any(axis=1)]
                restored += self.table.place(missing[::-1][:count]).tolist()
        self.totals.restored_units += self.table.used_units - before
        return restored

    # -- internals --------------------------------------------------------------------------

    def _owed_blocks(self, seq_id: int) -> int:
        """Blocks that a request misses beyond its policy's target."""
        excess = self.table.uncached_tokens(seq_id) - self._targets.get(seq_id, 0)
        return self.table.shape.blocks_for(max(excess, 0))

    def _free_tokens(self) -> int:
        shape = self.table.shape
        return self.table.free_units // shape.num_groups * shape.block_tokens

    def _reclaim_until(self, units: int) -> None:
        shape = self.table.shape
        while (short := units - self.table.free_units) > 0:
            if self._reclaim(-(-short // shape.num_groups) * shape.block_tokens) == 0:
                return

    def _evict_units(self, count: int, shared: bool) -> None:
        """Evict `count` units, one block at a time from the request that misses least, so that
        no request falls behind the others; of the last block only the lowest groups needed."""
        queues = {
            s: blocks
            for s in self.table.sequence_ids
            if (blocks := self._evictable(s, shared).tolist())
        }
        heap = [(self.table.uncached_tokens(s), s, 0) for s in queues]
        heapq.heapify(heap)
        while heap and count > 0:
            missing, seq_id, position = heapq.heappop(heap)
            freed = self._evict_lowest(queues[seq_id][position], count)
            count -= freed
            self.totals.evicted_units += freed
            if position + 1 < len(queues[seq_id]):
                missing += self.table.shape.block_tokens
                heapq.heappush(heap, (missing, seq_id, position + 1))

    def _evict_lowest(self, block: int, count: int) -> int:
        """Evict up to `count` units of a block from the lowest group up: the layers that are
        recomputed must be a prefix of the stack (DESIGN §2.3)."""
        held = np.flatnonzero(self.table.units[block] != NONE)
        groups = slice(0, int(held[min(count, len(held)) - 1]) + 1) if len(held) else slice(0)
        return self.table.evict(block, groups)

    def _evictable(self, seq_id: int, shared: bool) -> IntArray:
        """Blocks of a request that hold units and may lose them, oldest first: full blocks,
        and unless `shared` only those no other request uses."""
        full = self.table.length_of(seq_id) // self.table.shape.block_tokens
        blocks = self.table.blocks_of(seq_id)[:full]
        held: npt.NDArray[np.bool_] = (self.table.units[blocks] != NONE).any(axis=1)
        if not shared:
            held &= self.table.references(blocks) <= OWNER_AND_ONE_SEQUENCE
        return blocks[held]

    def _state(self, seq_ids: Sequence[int]) -> SystemState:
        return SystemState(
            requests=tuple(self._view(s) for s in seq_ids),
            device_tokens_total=_tokens(self.table, self.table.unit_limit),
            device_tokens_free=self._free_tokens(),
            block_tokens=self.table.shape.block_tokens,
        )

    def _view(self, seq_id: int) -> RequestView:
        blocks = self.table.blocks_of(seq_id)
        shared = np.count_nonzero(self.table.references(blocks) > OWNER_AND_ONE_SEQUENCE)
        return RequestView(
            seq_id=seq_id,
            tokens=self.table.length_of(seq_id),
            shared_tokens=int(shared) * self.table.shape.block_tokens,
            uncached_tokens=self.table.uncached_tokens(seq_id),
        )


def _tokens(table: PageTable, units: int) -> int:
    return units // table.shape.num_groups * table.shape.block_tokens
