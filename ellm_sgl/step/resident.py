"""Plans of decode steps in which nothing is missing: what most steps are.

```
 units    [ request 0's blocks | spare ][ request 1's blocks | spare ] ...
```

Each is made from the one before: only blocks that have begun since are looked up, into places that
no earlier plan speaks of. So a plan takes as long whatever the length of the contexts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ellm_sgl.kernels.layout import RequestLayout, RowRange, StackedLayout
from ellm_sgl.kernels.upload import upload
from ellm_sgl.memory import NONE, PageTable
from ellm_sgl.memory.page_table import RESERVED
from ellm_sgl.step.plan import StepPlan

_NOTHING = np.empty(0, np.int64)
_LEAST_SPARE, _SPARE_SHARE = 4, 16
"""Blocks that a request may begin before all are looked up again: a sixteenth of those it has, so
that looking up a block takes no longer, over all steps, than one more of them does."""


class ResidentDecodes:
    """Plans one decode step after another.

    Args:
        device: where the plans' tensors go. Only on the CPU are there spare places; to others all
            units are sent in every step.
    """

    def __init__(self, device: str | torch.device) -> None:
        self._device = device
        self._spares = torch.device(device).type == "cpu"
        self._seq_ids: list[int] = []
        self._version = -1
        self._units: npt.NDArray[np.int64] = np.empty((0, 0), np.int64)
        """[groups, places]"""
        self._first: list[int] = []
        """[requests + 1]: where each request's places begin."""
        self._known: list[int] = []
        """Blocks of each request that have been looked up."""

    def plan(
        self, table: PageTable, seq_ids: Sequence[int], lengths: Sequence[int]
    ) -> StepPlan | None:
        """The plan of a step in which each of these requests decodes its last token.

        Args:
            table: the page table, in which none of their blocks lacks a unit.
            seq_ids: in the order of SGLang's rows.
            lengths: tokens of each, the new one counted.

        Returns:
            None where a block does lack a unit: the plan is for `plan_step` to make.
        """
        if not self._go_on(table, seq_ids) and not self._look_up(table, seq_ids):
            return None
        block_tokens = table.shape.block_tokens
        layouts = tuple(
            RequestLayout(RowRange(row, length - 1, 1), (), slice(begin, begin + count), False)
            for row, (length, begin, count) in enumerate(
                zip(lengths, self._first[:-1], self._known, strict=True)
            )
        )
        targets = self._units[:, [request.blocks.stop - 1 for request in layouts]]
        offsets = np.array([(length - 1) % block_tokens for length in lengths])
        groups = StackedLayout(
            rows=len(layouts),
            requests=layouts,
            units=upload(self._units, self._device),
            write_rows=slice(0, len(layouts)),
            write_units=upload(targets, self._device),
            write_offsets=upload(offsets, self._device),
        )
        nothing = upload(_NOTHING, self._device)
        return StepPlan(len(layouts), nothing, nothing, groups.layouts())

    def _go_on(self, table: PageTable, seq_ids: Sequence[int]) -> bool:
        """Look up the blocks that have begun since the last step. False: all have to be."""
        if table.layout_version != self._version or self._seq_ids != seq_ids:
            return False
        for i, seq_id in enumerate(seq_ids):
            blocks, known, begin = table.blocks_of(seq_id), self._known[i], self._first[i]
            if (count := len(blocks)) == known:
                continue
            if begin + count > self._first[i + 1]:
                return False
            units = table.units[blocks[known:]]
            if (units == NONE).any():
                self._version = -1
                return False
            self._units[:, begin + known : begin + count] = units.T
            self._known[i] = count
        return True

    def _look_up(self, table: PageTable, seq_ids: Sequence[int]) -> bool:
        """All blocks of all requests, into new places. False: one has no unit."""
        of_each = [table.blocks_of(seq_id) for seq_id in seq_ids]
        counts = [len(blocks) for blocks in of_each]
        spare = [max(n // _SPARE_SHARE, _LEAST_SPARE) if self._spares else 0 for n in counts]
        first = [0, *itertools.accumulate(n + more for n, more in zip(counts, spare, strict=True))]
        units = np.full((table.shape.num_groups, first[-1]), RESERVED, np.int64)
        for blocks, begin in zip(of_each, first[:-1], strict=True):
            units[:, begin : begin + len(blocks)] = table.units[blocks].T
        if (units == NONE).any():
            self._version = -1
            return False
        self._seq_ids, self._version = list(seq_ids), table.layout_version
        self._units, self._first, self._known = units, first, counts
        return True
