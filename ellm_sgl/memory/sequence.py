"""What the page table knows of one request."""

from __future__ import annotations

import numpy as np

from ellm_sgl.memory.shape import IntArray


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
