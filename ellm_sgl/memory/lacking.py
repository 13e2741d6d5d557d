"""How many of its blocks each request lacks on the device, counted as they come and go: a step that
asks does not look at every block of every context."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ellm_sgl.memory.ids import Sequence
from ellm_sgl.memory.shape import IntArray


class LackingBlocks:
    """Keeps `Sequence.lacking` of every request.

    A block that one request maps is that request's affair. Of one that several share only the
    number of these is known: when it comes or goes, all are counted again at the next question.

    Args:
        sequences: by id; the page table's own.
        missing_groups: int32 [blocks + 1], groups of each block without a unit; likewise.
    """

    def __init__(self, sequences: Mapping[int, Sequence], missing_groups: IntArray) -> None:
        self._sequences = sequences
        self._missing_groups = missing_groups
        self._mappers: IntArray = np.zeros(len(missing_groups), np.int32)
        """Requests that map each block,"""
        self._mapper: npt.NDArray[np.int64] = np.zeros(len(missing_groups), np.int64)
        """and the sum of their ids: of one, its id."""
        self._outdated = False

    def mapped(self, seq_id: int, sequence: Sequence, blocks: IntArray) -> None:
        """A request maps these blocks from now on, each once."""
        self._mappers[blocks] += 1
        self._mapper[blocks] += seq_id
        sequence.lacking += int(np.count_nonzero(self._missing_groups[blocks]))

    def unmapped(self, seq_id: int, blocks: IntArray) -> None:
        """A request is gone, which mapped these."""
        self._mappers[blocks] -= 1
        self._mapper[blocks] -= seq_id

    def came(self, blocks: IntArray) -> None:
        """These lacked a unit, and lack none now; each once."""
        self._changed(blocks, -1)

    def went(self, blocks: IntArray) -> None:
        """These lacked none, and lack one now; each once."""
        self._changed(blocks, 1)

    def clear(self) -> None:
        """There are no requests any more."""
        self._mappers[:] = 0
        self._mapper[:] = 0
        self._outdated = False

    def bring_up_to_date(self) -> None:
        """To be called before `Sequence.lacking` is read."""
        if self._outdated:
            for sequence in self._sequences.values():
                lacking = np.count_nonzero(self._missing_groups[sequence.blocks])
                sequence.lacking = int(lacking)
            self._outdated = False

    def may_lack(self, sequence: Sequence) -> bool:
        """Whether a request lacks a block, as far as that is known without counting again."""
        return self._outdated or sequence.lacking > 0

    def contradiction(self) -> str | None:
        """What is wrong with the counts, or None."""
        mappers, mapper = np.zeros_like(self._mappers), np.zeros_like(self._mapper)
        for seq_id, sequence in self._sequences.items():
            mappers[sequence.blocks] += 1
            mapper[sequence.blocks] += seq_id
        if not (np.array_equal(mappers, self._mappers) and np.array_equal(mapper, self._mapper)):
            return "blocks: who maps them is not as counted"
        for seq_id, sequence in self._sequences.items():
            lacking = np.count_nonzero(self._missing_groups[sequence.blocks])
            if lacking != sequence.lacking and not self._outdated:
                return f"sequence {seq_id}: lacks {lacking} blocks, and not {sequence.lacking}"
        return None

    def _changed(self, blocks: IntArray, by: int) -> None:
        mappers = self._mappers[blocks]
        if not mappers.any():  # new blocks, or cached prefixes that nobody uses
            return
        if mappers.max() > 1:
            self._outdated = True
            return
        for seq_id in self._mapper[blocks[mappers == 1]].tolist():
            self._sequences[seq_id].lacking += by
