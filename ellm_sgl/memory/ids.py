"""Arrays of ids: a stack of free ones, and the blocks that a request holds."""

from __future__ import annotations

import numpy as np

from ellm_sgl.memory.shape import IntArray


class FreeList:
    """Ids 1..capacity; the last given back is the first taken, so memory stays warm."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._stack = np.arange(capacity, 0, -1, dtype=np.int32)
        self._count = capacity

    def __len__(self) -> int:
        return self._count

    @property
    def ids(self) -> IntArray:
        """The free ids, in no particular order (a view)."""
        return self._stack[: self._count]

    def take(self, count: int) -> IntArray:
        """Take `count` ids; the caller has made sure that there are as many."""
        assert 0 <= count <= self._count
        self._count -= count
        return self._stack[self._count : self._count + count][::-1].copy()

    def give(self, ids: IntArray) -> None:
        """Give ids back. Giving back what was not taken corrupts the list (see
        `PageTable.check_integrity`)."""
        self._stack[self._count : self._count + len(ids)] = ids
        self._count += len(ids)


class Sequence:
    """Blocks and length of one request; the block array grows by doubling."""

    __slots__ = ("_blocks", "count", "length")

    def __init__(self, blocks: IntArray, length: int) -> None:
        self._blocks = blocks.copy()
        self.count = len(blocks)
        self.length = length

    @property
    def blocks(self) -> IntArray:
        return self._blocks[: self.count]

    @property
    def last(self) -> int:
        return int(self._blocks[self.count - 1])

    def append(self, blocks: IntArray) -> None:
        needed = self.count + len(blocks)
        if needed > len(self._blocks):
            grown = np.empty(max(needed, 2 * len(self._blocks)), np.int32)
            grown[: self.count] = self.blocks
            self._blocks = grown
        self._blocks[self.count : needed] = blocks
        self.count = needed
