"""Taking units from the device: which ones, and what the host keeps of them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from ellm_sgl.memory.page_table import PageTable
from ellm_sgl.memory.shape import NONE, IntArray
from ellm_sgl.memory.totals import Totals

OWNER_AND_ONE_SEQUENCE = 2
"""References of a block that no other request uses (`PageTable.references`)."""

Save = Callable[[IntArray, IntArray], None]
"""Copies device units to host units, one to one."""


class Evictor:
    """Evicts blocks of requests, many at once: copying each by itself takes longer than the copy.

    Args:
        table: the page table to work on.
        totals: counts what leaves.
        save: copies units to the host tier before they leave the device; None without one.
    """

    def __init__(self, table: PageTable, totals: Totals, save: Save | None) -> None:
        self._table = table
        self._totals = totals
        self._save = save

    def evictable(self, seq_id: int, shared: bool) -> IntArray:
        """Blocks of a request that hold units and may lose them, oldest first.

        Only those that have been computed: a prompt's are mapped before its step, and a mixed step
        makes room for decoding in between. Unless `shared`, only those no other request uses.
        """
        table = self._table
        full = table.length_of(seq_id) // table.shape.block_tokens
        blocks = table.blocks_of(seq_id)[:full]
        held = table.holds_units(blocks) & table.computed_in_full(blocks)
        if not shared:
            held &= table.references(blocks) <= OWNER_AND_ONE_SEQUENCE
        return blocks[held]

    def blocks(self, blocks: IntArray) -> None:
        """Evict all units of these blocks, each listed once; what the host has room for, of the
        first ones first, it keeps a copy of."""
        table = self._table
        if self._save is not None and len(blocks):
            held = table.units[blocks] != NONE
            unsaved = self._unsaved(blocks, held)
            lacking = unsaved.any(axis=1)
            # Those that the host has leave first: to it, what is on the device too makes way.
            self._totals.evicted_units += table.evict_each(blocks[~lacking])
            blocks = blocks[lacking]
            self._keep(blocks, unsaved[lacking])
        self._totals.evicted_units += table.evict_each(blocks)

    def units(self, count: int, shared: bool, targets: Mapping[int, int]) -> None:
        """Evict `count` units, one block at a time from the request that misses least beyond its
        target, so that what memory demands falls on all alike, and on those first whose target
        is not reached; of the last block only the lowest groups needed."""
        table = self._table
        seq_ids = table.sequence_ids
        wanted = [targets.get(s, 0) for s in seq_ids]
        beyond = (table.uncached_tokens(seq_ids) - np.array(wanted, np.int64)).tolist()
        # Of equal ones the first that came, whatever its number.
        heap = sorted((excess, place, 0) for place, excess in enumerate(beyond))
        queues: dict[int, list[int]] = {}  # of those only from whom memory demands something
        leaving: dict[int, None] = {}  # in order; a shared block is in several queues
        last: int | None = None  # it loses what is wanted beyond them
        while heap and count > 0:
            excess, place, position = heapq.heappop(heap)
            if place not in queues:
                queues[place] = self.evictable(seq_ids[place], shared).tolist()
            if position < len(queues[place]):
                block = queues[place][position]
                if block not in leaving:
                    held = int(np.count_nonzero(table.units[block] != NONE))
                    if held > count:
                        last = block
                        break
                    leaving[block] = None
                    count -= held
                excess += table.shape.block_tokens
                heapq.heappush(heap, (excess, place, position + 1))
        self.blocks(np.fromiter(leaving, np.int32, len(leaving)))
        if last is not None:
            self._lowest(last, count)

    def _lowest(self, block: int, count: int) -> None:
        """So many units of a block: the layers recomputed must be a prefix of the stack."""
        table = self._table
        held = np.flatnonzero(table.units[block] != NONE)
        groups = slice(0, int(held[count - 1]) + 1)
        if self._save is not None:
            alone, leaving = np.array([block], np.int32), table.units[[block]] != NONE
            leaving[:, groups.stop :] = False
            self._keep(alone, self._unsaved(alone, leaving))
        self._totals.evicted_units += table.evict(block, groups)

    def _unsaved(self, blocks: IntArray, leaving: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Of what leaves, bool [blocks, groups], that of which the host has nothing."""
        host = self._table.host
        unsaved: npt.NDArray[np.bool_] = leaving & (host.units[blocks] == NONE)
        unsaved[:, : host.hidden_groups] = False  # captured as they were computed
        return unsaved

    def _keep(self, blocks: IntArray, unsaved: npt.NDArray[np.bool_]) -> None:
        """Copy these units, bool [blocks, groups], to the host, in order, while it has room."""
        table, (rows, groups) = self._table, np.nonzero(unsaved)
        kept = table.keep_copies(blocks[rows], groups.astype(np.int32))
        if len(kept):
            pairs = blocks[rows[: len(kept)]], kept
            assert self._save is not None
            self._save(table.units[pairs], table.host.units[pairs])
            self._totals.saved_units += len(kept)
