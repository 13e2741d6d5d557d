"""Elastic memory: make room by evicting blocks, take it back when there is room again.

Eviction is cheap (the KV is dropped; the next step recomputes it beside its decode rows), and so
is restoration (a step that recomputes a block anyway writes it to a free unit). So nothing here
looks ahead: blocks leave when units are needed, oldest first, and return when units are free.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence

import numpy as np

from ellm_sgl.memory.admission import AdmissionRoom, TokenCounts, yields_of
from ellm_sgl.memory.eviction import OWNER_AND_ONE_SEQUENCE, Evictor, Save
from ellm_sgl.memory.exchange import host_room, in_exchange, lost_blocks
from ellm_sgl.memory.page_table import PageTable
from ellm_sgl.memory.prompt_room import NOTHING_UNDER_WAY
from ellm_sgl.memory.shape import NO_BLOCKS, NONE, IntArray
from ellm_sgl.memory.step_room import Activations, StepRoom
from ellm_sgl.memory.totals import Totals
from ellm_sgl.policies import MemoryState

GROWING = 4
"""Of so many requests one grows by a block while what they miss comes back: to leave room for each
would have them restore in every step what there is room for."""

Reclaim = Callable[[int], int]
"""Frees the memory of about so many tokens of cached prefixes that nobody uses; returns tokens."""


class ElasticMemory:
    """Applies target ratios, and evicts further when memory runs out.

    Args:
        table: the page table to work on.
        max_restored_tokens: most tokens that a step can recompute. Targets stay within it whatever
            the host has: whether there is room to fetch is known only when a step is near.
        reclaim: frees cached prefixes; these go before any running request's blocks do.
        save: copies units to the host tier before they leave the device.
        slots: layer groups whose fetched units a step holds at once.
    """

    def __init__(
        self,
        table: PageTable,
        max_restored_tokens: int,
        reclaim: Reclaim,
        save: Save | None = None,
        slots: int = 2,
    ) -> None:
        self.table = table
        self.slots, self._has_host = min(slots, table.shape.num_groups), save is not None
        self.max_restored_tokens = max_restored_tokens
        self.room = StepRoom(Activations(), table.shape.block_tokens)
        self.totals = Totals()
        self._evictor = Evictor(table, self.totals, save)
        self.under_way = NOTHING_UNDER_WAY
        """Room that it has yet to take neither policies nor what comes back shall take first."""
        self._reclaim = reclaim
        self._targets: dict[int, int] = {}
        self._shared: dict[int, int] = {}
        self._shared_at = -1

    # -- observe ----------------------------------------------------------------------------

    def forget(self, seq_id: int) -> None:
        """A request has left; its blocks lose a reference."""
        self.table.unmap(seq_id)
        self._targets.pop(seq_id, None)

    def restorable_tokens(self, decoding: int) -> int:
        """Most tokens that the coming step can recompute beside so many requests that decode."""
        return int(min(self.max_restored_tokens, self.room.restorable(decoding)))

    def fits_one_step(self, seq_ids: Sequence[int], units: int = 0) -> bool:
        """Whether one step that places so many units can recompute what the host lacks, or there is
        no room to fetch. One alone, whom False would end, needs room in the buffers only."""
        if self.table.missing_units == 0:
            return True
        several = len(seq_ids) > 1
        most = self.restorable_tokens(len(seq_ids)) if several else self.max_restored_tokens
        each = self.table.shape.block_tokens
        if each * int(self.table.lacking_blocks(seq_ids).sum()) <= most:  # wherever they are
            return True
        blocks, rows = np.unique(self.table.missing_of_each(seq_ids), return_counts=True)
        lost = self.table.lost(blocks)  # recomputed for each request, but fetched once
        fetched = max(self.table.free_units - units, 0) // self.slots  # first, as they are planned
        recomputed = int(rows[lost].sum()) + int(rows[~lost][fetched:].sum())
        return each * recomputed <= most

    def shared_tokens(self, seq_ids: Sequence[int]) -> TokenCounts:
        """Tokens of each request in blocks that others use too; these stay cached."""
        if self._shared_at != self.table.sharing_version:
            self._shared.clear()
            self._shared_at = self.table.sharing_version
        for seq_id in seq_ids:
            if seq_id not in self._shared:
                references = self.table.references(self.table.blocks_of(seq_id))
                blocks = np.count_nonzero(references > OWNER_AND_ONE_SEQUENCE)
                self._shared[seq_id] = int(blocks) * self.table.shape.block_tokens
        return np.fromiter(map(self._shared.__getitem__, seq_ids), np.int64, len(seq_ids))

    def staging_overhead(self) -> float:
        """M_o: room, in tokens of KV, that a step needs in the pool to restore one token. What is
        computed again lives in buffers beside the pool, which the pool's size allows for. The same
        for all (l1, l2): of a block of which any group is fetched, a step holds a unit per slot."""
        return self.slots / self.table.shape.num_groups if self._has_host else 0.0

    def memory_state(self, running: Collection[int] = (), reclaimable: int = 0) -> MemoryState:
        """Memory as policies see it.

        Args:
            running: requests that decode; what others hold is not the policy's to divide.
            reclaimable: device tokens of cached prefixes that nobody uses.
        """
        table, shape = self.table, self.table.shape
        others = list(set(table.sequence_ids).difference(running))
        held = sum(map(table.length_of, others)) - int(table.uncached_tokens(others).sum())
        coming = self.under_way.coming * shape.block_tokens
        return MemoryState(
            block_tokens=shape.block_tokens,
            device_tokens=max(shape.tokens_in(table.unit_limit) - held - coming, 0),
            device_free_tokens=max(shape.tokens_in(table.free_units) + reclaimable - coming, 0),
            host_tokens=shape.tokens_in(table.host.num_units),
            host_free_tokens=shape.tokens_in(table.host.free_units),
            max_restored_tokens=self.restorable_tokens(len(running)),
            staging_overhead=self.staging_overhead(),
        )

    def admission_room(self, reclaimable: int) -> AdmissionRoom:
        """Room for waiting requests, as it is now.

        Args:
            reclaimable: device tokens of cached prefixes that nobody uses.
        """
        table, shape = self.table, self.table.shape
        excess = int(self._excess_blocks(table.sequence_ids).sum())
        free = shape.tokens_in(table.free_units) + reclaimable - excess * shape.block_tokens
        yields = yields_of(table, self._targets, self.shared_tokens)
        return AdmissionRoom(free, 1.0 - self.staging_overhead(), yields)

    # -- decide and apply -------------------------------------------------------------------

    def make_room(self, units: int) -> bool:
        """Free units until `units` can be placed: cached prefixes first, then the oldest unshared
        blocks of running requests, then shared ones. Returns whether there is room now."""
        self.reclaim_prefixes(units)
        for shared in (False, True):
            short = units - self.table.free_units
            if short <= 0:
                return True
            self._evictor.units(short, shared, self._targets)
        return self.table.free_units >= units

    def reclaim_prefixes(self, units: int) -> None:
        """Free cached prefixes that nobody uses until `units` can be placed, as far as there are
        any."""
        shape = self.table.shape
        while (short := units - self.table.free_units) > 0:
            if self._reclaim(-(-short // shape.num_groups) * shape.block_tokens) == 0:
                return

    def make_room_for_step(
        self, units: int, seq_ids: Sequence[int], exchanges: bool = True
    ) -> bool:
        """`make_room`, and beyond it, as far as possible, for the units that a decode step of
        these requests fetches from the host: a block sent there frees a unit in each of the G
        groups, and takes one in each of the `slots` in flight while it is fetched. And for those
        that it computes again: once they are on the device they can be sent there, too.

        Args:
            exchanges: what is computed again in this step is placed (`restore`), and others may go
                to the host for it.
        """
        if self.table.missing_units == 0 and units <= self.table.free_units:
            return True
        gain = self.table.shape.num_groups - self.slots
        if self._has_host and gain > 0:
            missing, placed = self.table.missing_blocks(seq_ids), units
            fetched = self.fetched_blocks(missing)
            # A prompt that waits for units would get those that are free afterwards.
            if exchanges and fetched < len(missing) and not self.under_way.coming:
                placed += self._exchange(seq_ids, units + self.slots * fetched)
                fetched = self.fetched_blocks(self.table.missing_blocks(seq_ids))
            if (short := placed + self.slots * fetched - self.table.free_units) > 0:
                self.make_room(placed + self.slots * (fetched + -(-short // gain)))
        return self.make_room(units)

    def _exchange(self, seq_ids: Sequence[int], taken: int) -> int:
        """Send to the host what makes room for what these requests have lost, beyond what comes
        back anyway: to units that are free, or of cached prefixes that nobody uses.

        Args:
            taken: units that the step takes.

        Returns:
            Units freed.
        """
        table, groups = self.table, self.table.shape.num_groups
        lost, excess = lost_blocks(table, seq_ids), self._excess_blocks(seq_ids)
        coming = np.minimum(lost, excess)
        self.reclaim_prefixes(taken + int(coming.sum()) * groups)
        spare = max(table.free_units - taken, 0) // groups
        coming = np.diff(np.minimum(np.cumsum(coming), spare), prepend=0)
        # What is sent is fetched by the same step, for which more may have to be sent.
        room = host_room(table) * (groups - self.slots) // groups
        evictable = functools.partial(self._evictor.evictable, shared=False)
        sent = in_exchange(table, seq_ids, lost - coming, room, evictable)
        self._evictor.blocks(sent)
        return len(sent) * groups

    def allocate(self, count: int, evict: bool = True) -> IntArray:
        """So many new blocks, with units as far as room can be made: see `place_new`.

        Raises:
            OutOfBlocksError: the logical space is exhausted; nothing was changed.
        """
        blocks = self.table.allocate(count)
        self.place_new(blocks, evict)
        return blocks

    def place_new(self, blocks: IntArray, evict: bool = True) -> None:
        """Units for new blocks, as far as room can be made. KV of those left without exists only
        while a step computes it: the first ones, since decoding goes on from the last.

        Args:
            evict: also from requests that run; else only cached prefixes that nobody uses go.
        """
        units = len(blocks) * self.table.shape.num_groups
        if evict:
            self.make_room(units)
        else:
            self.reclaim_prefixes(units)
        self.table.place(blocks[::-1])

    def bring_to_ratios(
        self,
        seq_ids: Sequence[int],
        ratios: Sequence[float],
        paused: bool = False,
        kept: IntArray = NO_BLOCKS,
    ) -> None:
        """Bring every request up to its target ratio: evict its oldest unshared blocks.

        Args:
            paused: these requests take no part in the step, which need not restore them.
            kept: blocks that stay.
        """
        if not any(ratios):  # nothing to evict, whatever they miss
            if self._targets:
                for seq_id in seq_ids:
                    self._targets.pop(seq_id, None)
            return
        block_tokens = self.table.shape.block_tokens
        uncached = self.table.uncached_tokens(seq_ids)
        room = self.restorable_tokens(len(seq_ids)) - int(uncached.sum())
        if paused:
            room = sum(map(self.table.length_of, seq_ids))
        leaving: list[IntArray] = []
        for seq_id, ratio, lacking in zip(seq_ids, ratios, uncached.tolist(), strict=True):
            target = int(ratio * self.table.length_of(seq_id)) // block_tokens * block_tokens
            self._targets[seq_id] = target
            count = min(target - lacking, room) // block_tokens
            if count <= 0:
                continue
            blocks = self._evictor.evictable(seq_id, shared=False)
            stay = self.table.misses_units(blocks)
            if len(kept):
                stay |= np.isin(blocks, kept)
            leaving.append(blocks[~stay][:count])
            room -= len(leaving[-1]) * block_tokens
        if leaving:
            self._evictor.blocks(np.concatenate(leaving))

    def comes_back(self, seq_ids: Sequence[int]) -> bool:
        """Whether any of these requests misses more than its target, or what the host does not have
        and could."""
        if self._excess_blocks(seq_ids).any():
            return True
        missing = self.table.missing_blocks(seq_ids)
        return host_room(self.table) > 0 and self.fetched_blocks(missing) < len(missing)

    def restore(self, seq_ids: Sequence[int], missing: IntArray) -> list[int]:
        """Place missing blocks that the coming step recomputes anyway, those that it fetches last,
        newest first, as far as units are free beyond the growth of the step and the next ones
        (`GROWING`). Cached prefixes that nobody uses make way.

        The caller must write the recomputed KV of these blocks in this step.

        Args:
            missing: `PageTable.missing_blocks` of these requests.

        Returns:
            The blocks placed.
        """
        if not len(missing):
            return []
        groups = self.table.shape.num_groups
        excess = self._excess_blocks(seq_ids)
        # Besides growth, room for what this step fetches; less by what is placed for good.
        staged = self.slots * (fetched := self.fetched_blocks(missing))
        staged += self.under_way.coming * groups
        margin = -(-len(seq_ids) // GROWING) * groups
        self.reclaim_prefixes(staged + margin + int(excess.sum()) * groups)
        before = self.table.used_units
        returning = np.array(seq_ids)[excess > 0].tolist()
        restored: list[int] = []
        if self._has_host and fetched < len(missing):
            # Growth may send these to the host; while they are nowhere, each step computes them.
            for seq_id in returning:
                spare = self.table.free_units - staged
                lost, _ = self._coming_back(seq_id)
                restored += self.table.place(lost[: max(spare, 0) // groups]).tolist()
        less = self.slots if self._has_host and groups > self.slots else 0
        for seq_id in returning:
            if (spare := self.table.free_units - staged - margin) < groups - less:
                break
            _, own = self._coming_back(seq_id)
            placed = self.table.place(own[: spare // (groups - less)])
            staged -= less * len(placed)
            restored += placed.tolist()
        self.totals.restored_units += self.table.used_units - before
        return restored

    def _coming_back(self, seq_id: int) -> tuple[IntArray, IntArray]:
        """Blocks that a request misses beyond its target, newest first: those that the host has not
        either (none, where there is no host), and the others. Anew each time: blocks may have
        returned for another request that shares them."""
        lacking = self.table.missing_of_each([seq_id])[::-1]
        most = max(len(lacking) - self._target_blocks(seq_id), 0)
        lost = self.table.lost(lacking) if self._has_host else np.zeros(len(lacking), np.bool_)
        return lacking[lost][:most], lacking[~lost][:most]

    def room_ahead(self, paused: Sequence[int], decoding: Sequence[int], most_units: int) -> None:
        """Let idle cached prefixes make way for what `fetch_ahead` places, and the step before."""
        table, groups = self.table, self.table.shape.num_groups
        returning = np.array(paused)[self._excess_blocks(paused) > 0].tolist()
        units = min(sum(len(self._on_host(each)) for each in returning) * groups, most_units)
        if units:
            borrowed = self.slots * self.fetched_blocks(table.missing_blocks(decoding))
            units += borrowed + int(self._excess_blocks(decoding).sum()) * groups
            self.reclaim_prefixes(units + self._kept_ahead(len(decoding)))

    def fetch_ahead(
        self, seq_ids: Sequence[int], decoding: int, most_units: int
    ) -> tuple[IntArray, IntArray]:
        """Place blocks that requests miss beyond their targets while they sit the step out, oldest
        first, as far as the host has them and units are free beyond a block for each who decodes.

        The caller must fetch the units from the host in this step.

        Args:
            decoding: requests that grow meanwhile.
            most_units: units that there is time to fetch.

        Returns:
            Host units, and the device units that they are to be copied to.
        """
        table, groups = self.table, self.table.shape.num_groups
        room = min(table.free_units - self._kept_ahead(decoding), most_units) // groups
        blocks, columns = [np.empty(0, np.int32)], [np.empty(0, np.int64)]
        for seq_id in np.array(seq_ids)[self._excess_blocks(seq_ids) > 0].tolist():
            if room > 0:  # anew: blocks may have returned for another request that shares them
                placed = self._on_host(seq_id)[:room]
                rows, groups_lacked = np.nonzero(table.units[placed] == NONE)
                table.place(placed)
                blocks.append(placed[rows])
                columns.append(groups_lacked)
                room -= len(placed)
        pairs = np.concatenate(blocks), np.concatenate(columns)
        self.totals.fetched_units += len(pairs[0])
        self.totals.fetched_ahead_units += len(pairs[0])
        return table.host.units[pairs], table.units[pairs]

    # -- internals --------------------------------------------------------------------------

    def _on_host(self, seq_id: int) -> IntArray:
        """Blocks that a request misses beyond its target and the host has, oldest first."""
        lacking = self.table.missing_of_each([seq_id])
        most = max(len(lacking) - self._target_blocks(seq_id), 0)
        return lacking[~self.table.lost(lacking)][:most]

    def _kept_ahead(self, decoding: int) -> int:
        """Units that stay free beside what is fetched ahead."""
        return (decoding + self.under_way.coming) * self.table.shape.num_groups

    def _excess_blocks(self, seq_ids: Sequence[int]) -> TokenCounts:
        """Blocks that each request misses beyond its policy's target."""
        lacking, targets = self.table.lacking_blocks(seq_ids), map(self._target_blocks, seq_ids)
        return np.maximum(lacking - np.fromiter(targets, np.int64, len(seq_ids)), 0)

    def _target_blocks(self, seq_id: int) -> int:
        """Blocks of a request that are to be missing."""
        return self._targets.get(seq_id, 0) // self.table.shape.block_tokens

    def fetched_blocks(self, missing: IntArray) -> int:
        """How many of these missing blocks a step can fetch from the host."""
        return int(np.count_nonzero(~self.table.lost(missing))) if self._has_host else 0
