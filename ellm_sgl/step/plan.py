"""The step plan: which rows a step computes, and where their KV comes from and goes to.

```
 request   [0 ........ a)[a ....... b)[b ........ p)[p .. s)
            resident      missing      resident      new: SGLang's rows
                          └ recomputed rows: computed again in the same pass, kept only for the step
```

Any set of blocks may be missing, each down to its own depth (the groups that lack a unit decide
how many layers its rows must go through), so the general case is a list of ranges by depth.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ellm_sgl.kernels.layout import GroupLayout, RequestLayout, RowRange, StackedLayout
from ellm_sgl.kernels.upload import upload
from ellm_sgl.memory import NONE, PageTable
from ellm_sgl.memory.shape import IntArray
from ellm_sgl.step.restoration import GroupTransfer, Restoration

TokenIds = Callable[[int, int, int], npt.NDArray[np.int64]]
"""(seq_id, start, end) → token ids of positions [start, end), all known."""


class NewTokens(NamedTuple):
    """The tokens of one request that SGLang wants computed: positions [start, end)."""

    seq_id: int
    start: int
    end: int


NO_UNITS: IntArray = np.empty(0, np.int32)


class Capture(NamedTuple):
    """Which rows of a step have their hidden states kept, and where; the same in all layers."""

    rows: torch.Tensor
    """int64 [n]: rows of the step."""
    slots: torch.Tensor
    """int64 [n]: slots of the `HiddenPool`."""
    offsets: torch.Tensor
    """int64 [n]: place in the block, 0..block_tokens-1."""


class StepPlan(NamedTuple):
    """All that one forward pass needs and holds. A snapshot: later changes of the page table do not
    reach it. `Executor.execute` runs it, and gives back what it has borrowed."""

    new_rows: int
    recomputed_token_ids: torch.Tensor
    """int64 [recomputed rows]: tokens to append to the step's input."""
    recomputed_positions: torch.Tensor
    """int64 [recomputed rows]."""
    groups: tuple[GroupLayout, ...]
    """One per layer group; `groups[g].rows` falls with g as rows have served their purpose."""
    transfers: tuple[GroupTransfer, ...] = ()
    """What each layer group needs from the host; empty if nothing is fetched."""
    restored: tuple[tuple[int, int], ...] = ()
    """(tokens, first position) of each run of consecutive tokens that this step restores."""
    fetched_tokens: int = 0
    """Tokens times layer groups whose KV is fetched."""
    borrowed: IntArray = NO_UNITS
    """int32 [n]: device units that the step passes fetched units through, and gives back."""
    fetched_ahead: GroupTransfer | None = None
    """What comes from the host beside this step, for a later one."""
    capture: Capture | None = None
    """Rows whose hidden states are kept; None where only KV is."""
    delta: float = 0.5
    """δ as a share of the processor, 0..1: what begins with the recomputed rows."""

    @property
    def recomputed_rows(self) -> int:
        return len(self.recomputed_token_ids)

    def rows_in(self, group: int) -> int:
        """Rows alive in the layers of `group`; past the last group, only the new rows."""
        groups = self.groups
        return groups[group].stacked.rows if group < len(groups) else self.new_rows


class _Span(NamedTuple):
    """Consecutive missing blocks of one request with the same depth."""

    request: int
    start: int
    end: int
    depth: int


class _Blocks(NamedTuple):
    """The blocks of all requests of a step, end to end."""

    ids: IntArray
    first: list[int]
    """[requests + 1]: where each request's blocks begin among all."""


def plan_step(
    table: PageTable,
    requests: Sequence[NewTokens],
    restoration: Restoration | None,
    token_ids: TokenIds,
    device: str | torch.device = "cpu",
) -> StepPlan:
    """Plan one forward pass over `requests`.

    Args:
        table: the page table, with every block that this step should fill already placed.
        requests: in the order of SGLang's rows.
        restoration: how what they miss is restored; None: they miss nothing.
        token_ids: gives the tokens of positions that are computed again.
        device: where the tensors go.
    """
    of_each = [table.blocks_of(r.seq_id) for r in requests]
    blocks = _Blocks(np.concatenate(of_each), [0, *itertools.accumulate(map(len, of_each))])
    if restoration is None:
        rows = _Rows.of(table, requests, blocks, (), None)
        nothing = _tensor(_NOTHING, device)
        return StepPlan(rows.new, nothing, nothing, rows.in_groups(device))
    block_tokens = table.shape.block_tokens
    spans = _missing_spans(requests, blocks, restoration.depths_of(blocks.ids), block_tokens)
    restored, fetched_units = spans, 0
    if restoration.transfers:
        fetched_units = restoration.fetched_units
        covered = restoration.covers(blocks.ids)
        restored = _missing_spans(requests, blocks, covered, block_tokens)
    # Deepest first: in every group the rows still alive are a prefix of all rows.
    spans = sorted(spans, key=lambda span: -span.depth)
    ids = [token_ids(requests[s.request].seq_id, s.start, s.end) for s in spans]
    rows = _Rows.of(table, requests, blocks, spans, restoration)
    return StepPlan(
        new_rows=rows.new,
        recomputed_token_ids=_tensor(np.concatenate(ids) if ids else _NOTHING, device),
        recomputed_positions=_tensor(rows.position[rows.new :], device),
        groups=rows.in_groups(device),
        transfers=restoration.transfers,
        borrowed=restoration.borrowed,
        restored=tuple((s.end - s.start, s.start) for s in restored),
        fetched_tokens=fetched_units * block_tokens,
    )


_NOTHING = np.empty(0, np.int64)


def _missing_spans(
    requests: Sequence[NewTokens], blocks: _Blocks, depth: IntArray, block_tokens: int
) -> list[_Span]:
    """Runs of equal, non-zero `depth` among each request's blocks before its new tokens."""
    if not depth.any():
        return []
    owner = np.repeat(np.arange(len(requests)), np.diff(blocks.first))
    start = (np.arange(len(depth)) - np.array(blocks.first)[owner]) * block_tokens
    limit = np.array([r.start for r in requests])[owner]
    depth = np.where(start < limit, depth, 0)
    begins = np.ones(len(depth), np.bool_)
    begins[1:] = (depth[1:] != depth[:-1]) | (owner[1:] != owner[:-1])
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(depth)) - 1
    first, last = first[depth[first] > 0], last[depth[first] > 0]
    end = np.minimum(start[last] + block_tokens, limit[first])
    columns = (owner[first], start[first], end, depth[first])
    return [_Span(*span) for span in zip(*(c.tolist() for c in columns), strict=True)]


@dataclass
class _Rows:
    """All rows of a step, the new ones first, and the blocks of all requests, end to end."""

    requests: Sequence[NewTokens]
    spans: Sequence[_Span]
    new: int
    """New rows."""
    first_block: list[int]
    """As `_Blocks.first`."""
    units: IntArray
    """[blocks, groups]: the unit that a row of the block is written to, or `NONE`."""
    sources: IntArray
    """[blocks, groups]: the unit that the block is read from, 0 where it is in no unit."""
    block: npt.NDArray[np.int64]
    """[rows]: each row's block, by its place among all blocks."""
    position: npt.NDArray[np.int64]
    """[rows]: each row's token position."""
    block_tokens: int
    _known: dict[int, tuple[RequestLayout, ...]] = field(default_factory=dict)
    """Layouts of the requests by spans alive, of groups where every new row has a unit."""

    @staticmethod
    def of(
        table: PageTable,
        requests: Sequence[NewTokens],
        blocks: _Blocks,
        spans: Sequence[_Span],
        restoration: Restoration | None,
    ) -> _Rows:
        units = sources = table.units[blocks.ids]
        if restoration is not None and restoration.transfers:
            sources = np.where(units == NONE, restoration.staged_units(blocks.ids), units)
        ranges = [(i, r.start, r.end) for i, r in enumerate(requests)]
        ranges += [(s.request, s.start, s.end) for s in spans]
        owner, start, end = np.array(ranges, np.int64).T
        count = end - start
        ends = np.cumsum(count)
        position = np.arange(ends[-1]) + np.repeat(start - (ends - count), count)
        block_tokens = table.shape.block_tokens
        return _Rows(
            requests=requests,
            spans=spans,
            new=int(ends[len(requests) - 1]),
            first_block=blocks.first,
            units=units,
            # A missing block reads scratch unit 0; its tokens come from the step's own rows.
            sources=np.maximum(sources, 0),
            block=np.repeat(np.array(blocks.first)[owner], count) + position // block_tokens,
            position=position,
            block_tokens=block_tokens,
        )

    def in_groups(self, device: str | torch.device) -> tuple[GroupLayout, ...]:
        """The layouts of all groups; in most steps they differ in nothing but units."""
        units = self.units[self.block]
        if self.spans or (units == NONE).any():
            return tuple(self._in_group(g, device) for g in range(units.shape[1]))
        layouts = self._layouts((), np.ones(self.new, np.bool_))
        sources, targets = (
            _tensor(np.ascontiguousarray(u.T), device) for u in (self.sources, units)
        )
        offsets = _tensor(self.position % self.block_tokens, device)
        every = slice(0, self.new)
        return StackedLayout(self.new, layouts, sources, every, targets, offsets).layouts()

    def _in_group(self, group: int, device: str | torch.device) -> GroupLayout:
        alive = [span for span in self.spans if span.depth > group]
        rows = self.new + sum(s.end - s.start for s in alive)
        units = self.units[self.block[:rows], group]
        stored = units != NONE
        everything = bool(stored.all())
        written = np.arange(rows) if everything else np.flatnonzero(stored)
        return GroupLayout.of(
            rows=rows,
            requests=self._layouts(alive, stored),
            units=_tensor(self.sources[:, group], device),
            write_rows=slice(0, rows) if everything else _tensor(written, device),
            write_units=_tensor(units[written], device),
            write_offsets=_tensor(self.position[written] % self.block_tokens, device),
        )

    def _layouts(
        self, alive: Sequence[_Span], stored: npt.NDArray[np.bool_]
    ) -> tuple[RequestLayout, ...]:
        complete = bool(stored[: self.new].all())
        if complete and len(alive) in self._known:
            return self._known[len(alive)]
        ranges: list[list[RowRange]] = [[] for _ in self.requests]
        row = self.new
        for span in alive:
            ranges[span.request].append(RowRange(row, span.start, span.end - span.start))
            row += span.end - span.start
        layouts = []
        row = 0
        for i, request in enumerate(self.requests):
            count = request.end - request.start
            unstored = not (complete or stored[row : row + count].all())
            blocks = slice(self.first_block[i], self.first_block[i + 1])
            new = RowRange(row, request.start, count)
            layouts.append(RequestLayout(new, tuple(ranges[i]), blocks, unstored))
            row += count
        if complete:
            self._known[len(alive)] = tuple(layouts)
        return tuple(layouts)


def _tensor(
    array: npt.NDArray[np.int32] | npt.NDArray[np.int64], device: str | torch.device
) -> torch.Tensor:
    return upload(array.astype(np.int64, copy=False), device)
