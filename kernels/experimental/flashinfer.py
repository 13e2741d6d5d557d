"""Attention over the paged pool through FlashInfer: recompute and decode as separate launches.

FlashInfer knows pages and ragged rows, but no request whose middle is missing, so a range of rows
attends in two parts, which are merged by log-sum-exp:

```
 request   [ resident ][ missing ][ resident ][ new ]        pages, in any order, no mask:
            └ paged ─┘  └ ragged ┘ └ paged ─┘  └ ragged       positions went in with RoPE
                         rows of this step, in order of position, causal at their end
```

A decoded token of a request with nothing missing needs the pages alone. δ has no meaning here.
Written against flashinfer-python 0.6.15.post1, which SGLang 0.5.17 pins.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ellm_sgl.kernels.layout import GroupLayout, RequestLayout, RowRange
from ellm_sgl.kernels.upload import upload

IntArray = npt.NDArray[np.int64]

WORKSPACE_BYTES = 128 << 20
"""What FlashInfer recommends."""
TENSOR_CORE_GROUP = 4
"""Query heads per KV head from which decoding is faster on tensor cores (SGLang's rule)."""


def supports(head_dim: int, row_type: torch.dtype, pool_type: torch.dtype) -> bool:
    """Whether FlashInfer's kernels can do this."""
    return row_type == pool_type and row_type in _TYPES and head_dim in (64, 128, 256)


_TYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Pages:
    """Pages of some ranges of rows, as FlashInfer takes them."""

    indptr: IntArray
    """[ranges + 1]: where each range's pages begin."""
    places: IntArray
    """[pages]: places in `GroupLayout.units`."""
    last_tokens: IntArray
    """[ranges]: tokens in each range's last page."""


@dataclass(frozen=True)
class Division:
    """The rows of a layer group, divided among FlashInfer's kernels."""

    decode_rows: IntArray
    """Rows that need only pages, their own token's included."""
    decode: Pages
    rows: IntArray
    """The other rows, range by range; those with pages come first."""
    row_indptr: IntArray
    """[ranges + 1]."""
    step_rows: IntArray
    """Rows of k and v that each range attends to, in order of position."""
    step_indptr: IntArray
    """[ranges + 1]."""
    resident: Pages
    """Of the leading ranges; the others have none."""

    @property
    def resident_ranges(self) -> int:
        return len(self.resident.last_tokens)

    @property
    def resident_rows(self) -> int:
        """Leading `rows` that attend to pages."""
        return int(self.row_indptr[self.resident_ranges])


def divide(layout: GroupLayout, block_tokens: int, out_rows: int) -> Division:
    """Divide the first `out_rows` rows of a layer group."""
    decode = [r for r in layout.requests if _decodes(r) and r.new.row < out_rows]
    whole = [_pages(r, r.new.end_position, block_tokens) for r in decode]
    ranges = [
        (_pages(request, own.position, block_tokens), own, request)
        for request in layout.requests
        if not _decodes(request)
        for own in (request.new, *request.spans)
        if own.row < out_rows
    ]
    ranges.sort(key=lambda entry: len(entry[0][0]) == 0)
    step = [_step_rows(request, own) for _, own, request in ranges]
    return Division(
        decode_rows=np.array([r.new.row for r in decode], np.int64),
        decode=_collect(whole),
        rows=_end_to_end([_rows_of(own) for _, own, _ in ranges]),
        row_indptr=_indptr([own.size for _, own, _ in ranges]),
        step_rows=_end_to_end(step),
        step_indptr=_indptr(list(map(len, step))),
        resident=_collect([pages for pages, _, _ in ranges if len(pages[0])]),
    )


class FlashInferAttention:
    """`MixedAttention` through FlashInfer; one plan per layer group.

    Args:
        device: of the rows and the pool.
        library: FlashInfer, or what stands for it.
    """

    def __init__(self, device: torch.device, library: Any = None) -> None:
        self._library = library or importlib.import_module("flashinfer")
        self._device = device
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._decode = {
            cores: self._library.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "NHD", use_tensor_cores=cores
            )
            for cores in (False, True)
        }
        self._paged = self._library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        self._ragged = self._library.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._last: tuple[GroupLayout, int, _Planned] | None = None

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        layout: GroupLayout,
        scale: float,
        out_rows: int | None = None,
        delta: float = 0.5,
    ) -> torch.Tensor:
        """See `reference.mixed_attention`: same arguments, same result."""
        write = layout.write_units, layout.write_offsets
        keys[write] = k[layout.write_rows]
        values[write] = v[layout.write_rows]
        rows = layout.rows if out_rows is None else out_rows
        plan = self._plan(layout, rows, q, keys, scale)
        pool = keys, values
        out = q.new_empty((rows, *q.shape[1:]))
        if len(plan.decode_rows):
            decode = self._decode[_tensor_cores(q, keys)]
            out[plan.decode_rows] = decode.run(q[plan.decode_rows], pool)
        if len(plan.rows):
            queries = q[plan.rows]
            own, own_lse = self._ragged.run(
                queries, k[plan.step_rows], v[plan.step_rows], return_lse=True
            )
            if n := plan.resident_rows:
                paged, paged_lse = self._paged.run(queries[:n], pool, return_lse=True)
                merged, _ = self._library.merge_state(own[:n], own_lse[:n], paged, paged_lse)
                own[:n] = merged
            out[plan.rows] = own
        return out

    def _plan(
        self, layout: GroupLayout, rows: int, q: torch.Tensor, keys: torch.Tensor, scale: float
    ) -> _Planned:
        last = self._last
        if last is not None and last[0] is layout and last[1] == rows:
            return last[2]
        if self._copied is not None:
            # Plans go to the device through one buffer: the last one must have left it.
            self._copied.synchronize()
        block_tokens, kv_heads, head_dim = keys.shape[1:]
        division = divide(layout, block_tokens, rows)
        shape = q.shape[1], kv_heads, head_dim
        types = {"q_data_type": q.dtype, "kv_data_type": keys.dtype, "sm_scale": scale}
        if len(division.decode_rows):
            self._decode[_tensor_cores(q, keys)].plan(
                *self._pages(division.decode, layout), *shape, block_tokens, **types
            )
        if len(division.rows):
            starts = self._host(division.row_indptr)
            steps = self._host(division.step_indptr)
            self._ragged.plan(starts, steps, *shape, causal=True, **types)
            if n := division.resident_ranges:
                pages = self._pages(division.resident, layout)
                self._paged.plan(starts[: n + 1], *pages, *shape, block_tokens, **types)
        if self._copied is not None:
            self._copied.record()
        planned = _Planned(
            upload(division.decode_rows, self._device),
            upload(division.rows, self._device),
            upload(division.step_rows, self._device),
            division.resident_rows,
        )
        self._last = layout, rows, planned
        return planned

    def _pages(self, pages: Pages, layout: GroupLayout) -> tuple[torch.Tensor, ...]:
        """indptr and last page lengths stay on the host, where FlashInfer plans."""
        units = layout.units[upload(pages.places, self._device)].to(torch.int32)
        return self._host(pages.indptr), units, self._host(pages.last_tokens)

    def _host(self, array: IntArray) -> torch.Tensor:
        tensor = torch.from_numpy(array.astype(np.int32))
        return tensor.pin_memory() if self._device.type == "cuda" else tensor


@dataclass(frozen=True)
class _Planned:
    """Index tensors of the plan that FlashInfer's wrappers hold."""

    decode_rows: torch.Tensor
    rows: torch.Tensor
    step_rows: torch.Tensor
    resident_rows: int


def _tensor_cores(q: torch.Tensor, keys: torch.Tensor) -> bool:
    return q.shape[1] // keys.shape[2] >= TENSOR_CORE_GROUP


def _decodes(request: RequestLayout) -> bool:
    """One new token, in a request whose KV will all be in the pool."""
    return request.new.size == 1 and not request.spans and not request.unstored_new


def _pages(request: RequestLayout, end: int, block_tokens: int) -> tuple[IntArray, int]:
    """Places of the blocks that hold tokens before `end` in the pool, and the last one's tokens.

    A block that the step computes holds none of them: it comes with the step's rows.
    """
    places = np.arange(-(-end // block_tokens))
    for span in request.spans:
        first = span.position // block_tokens
        last = -(-span.end_position // block_tokens)
        places = places[(places < first) | (places >= last)]
    if not len(places):
        return places, 0
    tokens = min(block_tokens, end - int(places[-1]) * block_tokens)
    return places + request.blocks.start, tokens


def _step_rows(request: RequestLayout, own: RowRange) -> IntArray:
    """Rows of k and v that the rows of `own` attend to: what was missing before, and their own."""
    before = [span for span in request.spans if span.position < own.position]
    before.sort(key=lambda span: span.position)
    return _end_to_end([_rows_of(rows) for rows in (*before, own)])


def _rows_of(rows: RowRange) -> IntArray:
    return np.arange(rows.row, rows.end_row)


def _collect(pages: Sequence[tuple[IntArray, int]]) -> Pages:
    return Pages(
        _indptr([len(places) for places, _ in pages]),
        _end_to_end([places for places, _ in pages]),
        np.array([tokens for _, tokens in pages], np.int64),
    )


def _indptr(counts: Sequence[int]) -> IntArray:
    return np.cumsum([0, *counts], dtype=np.int64)


def _end_to_end(arrays: Sequence[IntArray]) -> IntArray:
    return np.concatenate(arrays) if arrays else np.empty(0, np.int64)
