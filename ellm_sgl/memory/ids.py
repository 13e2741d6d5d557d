"""Arrays of ids: those that are free, and the blocks that a request holds."""

from __future__ import annotations

import numpy as np

from ellm_sgl.memory.shape import IntArray


class FreeList:
    """Ids 1..capacity. The lowest free ones are taken first: with so many in use, none above the
    highest number ever in use at once is given out, and what lies beyond can do without memory."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = np.ones(capacity + 1, np.bool_)
        self._free[0] = False
        self._count = capacity
        self._first = 1
        """No lower id is free."""

    def __len__(self) -> int:
        return self._count

    @property
    def ids(self) -> IntArray:
        """The free ids, ascending."""
        return np.flatnonzero(self._free).astype(np.int32)

    @property
    def highest_taken(self) -> int:
        """The highest id that is not free; 0 if all are."""
        return int(len(self._free) - 1 - np.argmin(self._free[::-1]))

    def take(self, count: int) -> IntArray:
        """Take `count` ids, ascending; the caller has made sure that there are as many."""
        assert 0 <= count <= self._count
        if count == 0:
            return np.empty(0, np.int32)
        # Most often what is free lies together, right behind the last one taken.
        width = 2 * count + 64
        found = np.flatnonzero(self._free[self._first : self._first + width])
        while len(found) < count and width <= self.capacity:
            width *= 4
            found = np.flatnonzero(self._free[self._first : self._first + width])
        ids = (found[:count] + self._first).astype(np.int32)
        self._free[ids] = False
        self._count -= count
        self._first = int(ids[-1]) + 1
        return ids

    def give(self, ids: IntArray) -> None:
        """Give ids back. Giving back what was not taken corrupts the list (see
        `PageTable.check_integrity`)."""
        if len(ids):
            self._free[ids] = True
            self._count += len(ids)
            self._first = min(self._first, int(ids.min()))


class Sequence:
    """Blocks and length of one request; the block array grows by doubling."""

    __slots__ = ("_blocks", "count", "lacking", "length")

    def __init__(self, blocks: IntArray, length: int) -> None:
        self._blocks = blocks.copy()
        self.count = len(blocks)
        self.length = length
        self.lacking = 0
        """Of its blocks, those without a device unit in some group: see `LackingBlocks`."""

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
