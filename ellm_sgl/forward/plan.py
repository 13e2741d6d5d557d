"""The step plan: which rows a step computes, and where their KV comes from and goes to.

```
 request   [0 ........ a)[a ....... b)[b ........ p)[p .. s)
            resident      missing      resident      new: SGLang's rows
                          └ span rows: computed again in the same pass, kept only for the step
```

Any set of blocks may be missing, each down to its own depth (the groups that lack a unit decide
how many layers its rows must go through), so the general case is a list of ranges by depth.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ellm_sgl.kernels.layout import GroupLayout, RequestLayout, RowRange
from ellm_sgl.kv import NONE, PageTable
from ellm_sgl.kv.page_table import IntArray

TokenIds = Callable[[int, int, int], npt.NDArray[np.int64]]
"""(seq_id, start, end) → token ids of positions [start, end), all known."""


@dataclass(frozen=True)
class NewTokens:
    """The tokens of one request that SGLang wants computed: positions [start, end)."""

    seq_id: int
    start: int
    end: int


@dataclass(frozen=True)
class StepPlan:
    """One forward pass. A snapshot: later changes of the page table do not reach it."""

    new_rows: int
    span_token_ids: torch.Tensor
    """int64 [span rows]: tokens to append to the step's input."""
    span_positions: torch.Tensor
    """int64 [span rows]."""
    groups: tuple[GroupLayout, ...]
    """One per layer group; `groups[g].rows` falls with g as rows have served their purpose."""

    @property
    def span_rows(self) -> int:
        return len(self.span_token_ids)

    def rows_in(self, group: int) -> int:
        """Rows alive in the layers of `group`; past the last group, only the new rows."""
        return self.groups[group].rows if group < len(self.groups) else self.new_rows


@dataclass(frozen=True)
class _Span:
    """Consecutive missing blocks of one request with the same depth."""

    request: int
    start: int
    end: int
    depth: int


def plan_step(
    table: PageTable,
    requests: Sequence[NewTokens],
    depths: Sequence[IntArray],
    token_ids: TokenIds,
    device: str | torch.device = "cpu",
) -> StepPlan:
    """Plan one forward pass over `requests`.

    Args:
        table: the page table, with every block that this step should fill already placed.
        requests: in the order of SGLang's rows.
        depths: `table.depth(blocks)` of each request, taken before blocks were placed: what
            the pool cannot deliver at the start of the step.
        token_ids: gives the tokens of positions that are computed again.
        device: where the tensors go.
    """
    spans = [
        span
        for i, (request, depth) in enumerate(zip(requests, depths, strict=True))
        for span in _missing_spans(i, request.start, depth, table.shape.block_tokens)
    ]
    # Deepest first: in every group the rows still alive are a prefix of all rows.
    spans.sort(key=lambda span: -span.depth)
    new_rows = sum(r.end - r.start for r in requests)
    ids = [token_ids(requests[s.request].seq_id, s.start, s.end) for s in spans]
    positions = [np.arange(s.start, s.end, dtype=np.int64) for s in spans]
    return StepPlan(
        new_rows=new_rows,
        span_token_ids=_concatenate(ids, device),
        span_positions=_concatenate(positions, device),
        groups=tuple(
            _group_layout(table, requests, spans, new_rows, group, device)
            for group in range(table.shape.num_groups)
        ),
    )


def _missing_spans(request: int, end: int, depth: IntArray, block_tokens: int) -> list[_Span]:
    """Runs of equal, non-zero depth among the blocks before position `end`."""
    if not depth.any():
        return []
    before = -(-end // block_tokens)
    edges = np.flatnonzero(np.diff(depth[:before], prepend=0, append=0))
    return [
        _Span(request, int(a) * block_tokens, min(int(b) * block_tokens, end), int(depth[a]))
        for a, b in itertools.pairwise(edges)
        if depth[a]
    ]


def _group_layout(
    table: PageTable,
    requests: Sequence[NewTokens],
    spans: Sequence[_Span],
    new_rows: int,
    group: int,
    device: str | torch.device,
) -> GroupLayout:
    block_tokens = table.shape.block_tokens
    alive: list[list[RowRange]] = [[] for _ in requests]
    row = new_rows
    for span in spans:
        if span.depth <= group:
            break
        alive[span.request].append(RowRange(row, span.start, span.end - span.start))
        row += span.end - span.start

    layouts: list[RequestLayout] = []
    units: list[IntArray] = []
    writes: list[tuple[npt.NDArray[np.int64], IntArray, npt.NDArray[np.int64]]] = []
    first_row = first_block = 0
    for request, ranges in zip(requests, alive, strict=True):
        own = table.units[table.blocks_of(request.seq_id), group]
        new = RowRange(first_row, request.start, request.end - request.start)
        for rows in (new, *ranges):
            writes.append(_stored_rows(rows, own, block_tokens))
        layouts.append(
            RequestLayout(
                new=new,
                spans=tuple(ranges),
                blocks=slice(first_block, first_block + len(own)),
                unstored_new=bool((own[request.start // block_tokens :] == NONE).any()),
            )
        )
        units.append(own)
        first_row += new.count
        first_block += len(own)

    write_rows = np.concatenate([w[0] for w in writes])
    return GroupLayout(
        rows=row,
        requests=tuple(layouts),
        # A missing block reads scratch unit 0; its tokens come from the step's own rows.
        units=_tensor(np.maximum(np.concatenate(units), 0), device),
        write_rows=(
            slice(0, new_rows)
            if len(write_rows) == new_rows and not spans
            else _tensor(write_rows, device)
        ),
        write_units=_tensor(np.concatenate([w[1] for w in writes]), device),
        write_offsets=_tensor(np.concatenate([w[2] for w in writes]), device),
    )


def _stored_rows(
    rows: RowRange, units: IntArray, block_tokens: int
) -> tuple[npt.NDArray[np.int64], IntArray, npt.NDArray[np.int64]]:
    """(rows, units, offsets) of those rows whose block has a unit to be written to."""
    positions = np.arange(rows.position, rows.end_position, dtype=np.int64)
    row_units = units[positions // block_tokens]
    stored = row_units != NONE
    if stored.all():
        return positions + (rows.row - rows.position), row_units, positions % block_tokens
    positions = positions[stored]
    return positions + (rows.row - rows.position), row_units[stored], positions % block_tokens


def _concatenate(
    arrays: Sequence[npt.NDArray[np.int64]], device: str | torch.device
) -> torch.Tensor:
    return _tensor(np.concatenate(arrays) if arrays else np.empty(0, np.int64), device)


def _tensor(
    array: npt.NDArray[np.int32] | npt.NDArray[np.int64], device: str | torch.device
) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int64, copy=False)).to(device, non_blocking=True)
