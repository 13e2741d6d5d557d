"""Running requests and a prefix tree over a small page table, for tests of `ElasticMemory`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ellm_sgl.memory import NONE, ElasticMemory, PageTable, PoolShape

BLOCK = 4
"""Tokens per block."""
GROUPS = 2
"""Units per complete block."""
SHAPE = PoolShape(num_layers=4, layer_group=2, block_tokens=BLOCK)


class Scene:
    """`room` blocks fit on the device, of which `start` have memory at first (None: all); the
    logical space is far larger.

    `ratios`: the target of every request, or of those named (0 of the others).
    """

    def __init__(
        self,
        room: int,
        ratios: float | dict[int, float] = 0.0,
        max_restored: int = 1000,
        start: int | None = None,
    ) -> None:
        committed = None if start is None else start * GROUPS
        self.table = PageTable(SHAPE, 100, room * GROUPS, committed=committed)
        self.elastic = ElasticMemory(self.table, max_restored, self.reclaim)
        self.ratios = ratios
        self.tree: list[int] = []
        """Blocks of cached prefixes that nobody uses."""
        self.reclaim_asked: list[int] = []

    def reclaim(self, tokens: int) -> int:
        """As SGLang's tree does: at least so many tokens, as far as there are."""
        self.reclaim_asked.append(tokens)
        count = -(-tokens // BLOCK)
        freed, self.tree = self.tree[:count], self.tree[count:]
        self.table.release(freed)
        return len(freed) * BLOCK

    def cache_prefix(self, blocks: int) -> None:
        """A finished request left so many blocks in the tree."""
        new = self.table.allocate(blocks)
        self.table.place(new)
        self.tree += new.tolist()

    def request(self, seq_id: int, tokens: int, prefix: Sequence[int] = ()) -> list[int]:
        """A running request with all the units it can get; it begins with `prefix`'s blocks."""
        own = self.table.allocate(SHAPE.blocks_for(tokens) - len(prefix))
        self.table.place(own)
        blocks = [*prefix, *own.tolist()]
        self.table.map(seq_id, blocks, tokens)
        self.table.note_computed([seq_id], [tokens])
        return blocks

    def bring_to_ratios(self, seq_ids: Sequence[int]) -> None:
        own = self.ratios
        ratios = [own.get(s, 0.0) if isinstance(own, dict) else own for s in seq_ids]
        self.elastic.bring_to_ratios(seq_ids, ratios)

    def restore(self, seq_ids: Sequence[int]) -> list[int]:
        return self.elastic.restore(seq_ids, self.table.missing_blocks(seq_ids))

    def evict(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.table.evict(block)

    def missing(self, seq_id: int) -> list[int]:
        """Indices of a request's blocks that lack a unit."""
        units = self.table.units[self.table.blocks_of(seq_id)]
        indices: list[int] = np.flatnonzero((units == NONE).any(axis=1)).tolist()
        return indices

    def uncached(self) -> list[int]:
        """Uncached tokens of each request."""
        return self.table.uncached_tokens(self.table.sequence_ids).tolist()
