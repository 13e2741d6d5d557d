"""Attention over the paged pool through FlashInfer, of rows whose requests miss nothing.

```
 request   [ resident                ][ new ]
            └ pages, without a mask ─┘└ ragged: rows of this step, causal
```

The two parts are merged by log-sum-exp. A decoded token needs the pages alone, its own included;
a prompt from its beginning the ragged part alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ellm_sgl.kernels.experimental.flashinfer.plan import IntArray, Pages, divide
from ellm_sgl.kernels.layout import GroupLayout, RequestLayout, packed_heads
from ellm_sgl.kernels.upload import upload

WORKSPACE_BYTES = 512 << 20
"""The most that SGLang takes for any model: partial results of prompts in a group of many heads."""
TENSOR_CORE_GROUP = 4
"""Query heads per KV head from which decoding is faster on tensor cores (SGLang's rule)."""
BACKEND = "fa2"
"""Of the paged wrappers, as SGLang has it: FlashInfer's others ask for more of the pool."""
MERGED_ELEMENTS = 8192
"""What `merge_state` takes of a row: it gives 8 elements to each of at most 1,024 threads."""

_TYPES = (torch.bfloat16, torch.float16)


def problem() -> str | None:
    """Why FlashInfer cannot be used here, and the remedy."""
    if importlib.util.find_spec("flashinfer") is None:
        return "FlashInfer is not installed, which eLLM needs on CUDA: pip install 'ellm-sgl[cuda]'"
    return None


def supports(head_dim: int, row_type: torch.dtype, pool_type: torch.dtype) -> bool:
    """Whether FlashInfer's kernels can do this."""
    return row_type == pool_type and row_type in _TYPES and head_dim in (64, 128, 256)


def choose_append(device: torch.device) -> Callable[..., None]:
    """On a device one launch; by PyTorch it takes two, and more of the host's time."""
    if device.type != "cuda":
        return append_by_pytorch
    from ellm_sgl.kernels.experimental.triton.append import append

    return append


def append_by_pytorch(
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    units: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    """What `triton.append` does."""
    keys[units, offsets], values[units, offsets] = k, v


class FlashInferAttention:
    """`MixedAttention` of layouts without recomputed rows. Planned once for all layer groups with
    the same requests; from group to group only the pages' numbers change, in place.

    Args:
        device: of the rows and the pool.
        library: FlashInfer, or what stands for it.
    """

    def __init__(self, device: torch.device, library: Any = None) -> None:
        self.library = library or importlib.import_module("flashinfer")
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._device = device
        self._decode = {
            cores: self.library.BatchDecodeWithPagedKVCacheWrapper(
                self.workspace, "NHD", use_tensor_cores=cores, backend=BACKEND
            )
            for cores in (False, True)
        }
        self._paged = self.library.BatchPrefillWithPagedKVCacheWrapper(
            self.workspace, "NHD", backend=BACKEND
        )
        # FlashInfer picks the backend: its kernels for Hopper are the fastest for prompts.
        self._ragged = self.library.BatchPrefillWithRaggedKVCacheWrapper(self.workspace, "NHD")
        self.append = choose_append(device)
        """Brings K and V to the pool: see `triton.append`."""
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._planned: _Planned | None = None
        self._shown: GroupLayout | None = None

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
        """See `reference.mixed_attention`: same arguments, same result. `delta` has no meaning.

        Raises:
            ValueError: a row is recomputed.
        """
        rows = layout.write_rows
        self.append(k[rows], v[rows], keys, values, layout.write_units, layout.write_offsets)
        planned = self._plan(layout, q, keys, scale)
        if self._shown is not layout:
            planned.pages.copy_(layout.units[planned.places])
            self._shown = layout
        parts = []
        pool = keys, values
        if planned.decodes:
            wrapper = self._decode[tensor_cores(q.shape[1], keys.shape[2])]
            rows = planned.decode_rows
            parts.append((rows, wrapper.run(q[rows].contiguous(), pool)))
        if planned.ranges:
            rows = planned.rows
            part = self._attend_ranges(q[rows].contiguous(), k[rows], v[rows], pool, planned)
            parts.append((rows, part))
        out: torch.Tensor
        if len(parts) == 1 and isinstance(parts[0][0], slice):
            _, out = parts[0]
        else:
            out = q.new_empty((layout.rows, *q.shape[1:]))
            for rows, part in parts:
                out[rows] = part
        return out if out_rows is None else out[:out_rows]

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Around FlashInfer's `plan`, whose result goes to the device through one buffer in pinned
        memory: the last result must have left it. That was a step ago, so nobody waits."""
        if self._copied is not None:
            self._copied.synchronize()
        yield
        if self._copied is not None:
            self._copied.record()

    def on_host(self, array: IntArray) -> torch.Tensor:
        """int32, where FlashInfer plans: device tensors it would fetch, and wait."""
        tensor = torch.from_numpy(array.astype(np.int32))
        return tensor.pin_memory() if self._device.type == "cuda" else tensor

    def _attend_ranges(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pool: tuple[torch.Tensor, torch.Tensor],
        planned: _Planned,
    ) -> Any:
        k, v = packed_heads(k), packed_heads(v)
        if not (n := planned.resident_rows):
            return self._ragged.run(q, k, v)
        own, own_lse = self._ragged.run(q, k, v, return_lse=True)
        paged, paged_lse = self._paged.run(q[:n], pool, return_lse=True)
        # Heads are merged one by one, so those that are too many for a row make more rows.
        heads, head_dim = q.shape[1:]
        heads = math.gcd(heads, MERGED_ELEMENTS // head_dim)
        states = own[:n], own_lse[:n], paged, paged_lse
        shapes = ((-1, heads, head_dim), (-1, heads)) * 2
        merged, _ = self.library.merge_state(
            *(x.reshape(shape) for x, shape in zip(states, shapes, strict=True))
        )
        own[:n] = merged.view_as(paged)
        return own

    def _plan(
        self, layout: GroupLayout, q: torch.Tensor, keys: torch.Tensor, scale: float
    ) -> _Planned:
        sizes = *q.shape[1:], *keys.shape[1:3], q.dtype, keys.dtype, scale
        last = self._planned
        if last is not None and last.requests is layout.requests and last.sizes == sizes:
            return last
        heads, head_dim, block_tokens, kv_heads, *types, scale = sizes
        division = divide(layout.requests, block_tokens)
        places = np.concatenate([division.decode.places, division.resident.places])
        pages = torch.empty(len(places), dtype=torch.int32, device=self._device)
        decoded = len(division.decode.places)
        shape = heads, kv_heads, head_dim
        options = {"q_data_type": types[0], "kv_data_type": types[1], "sm_scale": scale}
        with self.planning():
            if len(division.decode_rows):
                self._decode[tensor_cores(heads, kv_heads)].plan(
                    *self._paging(division.decode, pages[:decoded]), *shape, block_tokens, **options
                )
            if len(division.rows):
                starts = self.on_host(division.row_indptr)
                self._ragged.plan(starts, starts, *shape, causal=True, **options)
            if n := division.resident_ranges:
                self._paged.plan(
                    starts[: n + 1],
                    *self._paging(division.resident, pages[decoded:]),
                    *shape,
                    block_tokens,
                    **options,
                )
        self._planned = _Planned(
            requests=layout.requests,
            sizes=sizes,
            decodes=bool(len(division.decode_rows)),
            decode_rows=self._index(division.decode_rows),
            ranges=bool(len(division.rows)),
            rows=self._index(division.rows),
            resident_rows=division.resident_rows,
            places=upload(places, self._device),
            pages=pages,
        )
        self._shown = None
        return self._planned

    def _paging(self, pages: Pages, numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The arguments of `plan` that tell of pages. FlashInfer keeps `numbers`, as they are int32
        on its device: written later, they are read by `run`."""
        return self.on_host(pages.indptr), numbers, self.on_host(pages.last_tokens)

    def _index(self, rows: IntArray) -> slice | torch.Tensor:
        """`rows` for use as an index; consecutive ones need not be gathered."""
        if len(rows) and (np.diff(rows) == 1).all():
            return slice(int(rows[0]), int(rows[-1]) + 1)
        return upload(rows, self._device)


@dataclass(frozen=True)
class _Planned:
    """What FlashInfer's wrappers are planned for."""

    requests: tuple[RequestLayout, ...]
    sizes: tuple[Any, ...]
    decodes: bool
    decode_rows: slice | torch.Tensor
    ranges: bool
    rows: slice | torch.Tensor
    resident_rows: int
    places: torch.Tensor
    """int64 [pages of the decoded rows, then of the ranges]: places in `GroupLayout.units`."""
    pages: torch.Tensor
    """int32: the pages at those places, which the wrappers read."""


def tensor_cores(heads: int, kv_heads: int) -> bool:
    """Whether a token is decoded faster on tensor cores."""
    return heads // kv_heads >= TENSOR_CORE_GROUP
