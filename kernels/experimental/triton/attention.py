"""Attention over the paged pool by the fused Triton kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton

from ellm_sgl.kernels.experimental.triton.kernel import QUEUES, fused_attention
from ellm_sgl.kernels.experimental.triton.plan import (
    FIELDS,
    STEP,
    Tiles,
    TileSizes,
    cut,
    span_blocks,
)
from ellm_sgl.kernels.layout import GroupLayout, packed_heads
from ellm_sgl.kernels.upload import upload

TYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_HEAD = 256
WARPS = 4
STAGES = 2
PROGRAMS_PER_PROCESSOR = 2
"""One of each side on every processor at δ = 512, so that both of its limits are in use."""


def supports(head_dim: int, row_type: torch.dtype, pool_type: torch.dtype) -> bool:
    """Whether the kernel can do this."""
    return row_type == pool_type and row_type in TYPES and head_dim <= LARGEST_HEAD


def k1_programs(delta: float, programs: int) -> int:
    """Programs that begin with K1: δ to the nearest 32 of 1,024, as a share of the programs."""
    if not 0 <= delta <= 1:
        raise ValueError(f"delta is a share, 0..1, not {delta}")
    return round(round(delta * 32) / 32 * programs)


@dataclass(frozen=True)
class Prepared:
    """The work of one layer group as the kernel reads it, on the device."""

    tiles: torch.Tensor
    """int32 [1 + n, 12]: first the numbers of K1's and of K2's tiles, then the tiles."""
    blocks: torch.Tensor
    """int32 [blocks]: unit of each block, or -1 - first row where the step computes it."""
    write_rows: torch.Tensor
    """int64 [w], like `write_units` and `write_offsets`: see `GroupLayout`."""
    write_units: torch.Tensor
    write_offsets: torch.Tensor
    partial_rows: int
    """Rows of partial results per KV head."""
    merged: int
    """Tiles whose chunks are merged."""


class FusedAttention:
    """`MixedAttention` in one launch for all rows of a layer; see `kernel.py`.

    Keeps buffers of its own between calls: one object per stream.

    Args:
        device: a CUDA device. (Without one, under Triton's interpreter, "cpu".)
        programs: persistent programs; by default as many as the device holds at once.
    """

    def __init__(self, device: torch.device, programs: int | None = None) -> None:
        if programs is None:
            processors = torch.cuda.get_device_properties(device).multi_processor_count
            programs = PROGRAMS_PER_PROCESSOR * processors
        self.programs = programs
        self._device = device
        self._queues = torch.zeros(QUEUES, dtype=torch.int32, device=device)
        self._arrived = torch.zeros(0, dtype=torch.int32, device=device)
        self._sums = torch.empty(0, device=device)
        self._stats = torch.empty(0, device=device)
        self._last: tuple[GroupLayout, int, int, Prepared] | None = None

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
        """See `reference.mixed_attention`: same arguments, same result, to the bit for every
        `delta` (see `k1_programs`).

        Raises:
            ValueError: `supports` says no, or a tensor is not laid out as the reference says.
        """
        rows = layout.rows if out_rows is None else out_rows
        if k.shape[0] < layout.rows or q.shape[0] < rows:
            raise ValueError(f"{q.shape[0]} rows, the layout speaks of {layout.rows}")
        prepared = self.prepare(layout, keys.shape[1], q.shape[1] // keys.shape[2])
        out = q.new_empty((rows, *q.shape[1:]))
        return self.run(q, k, v, keys, values, prepared, scale, out, delta)

    def prepare(self, layout: GroupLayout, block_tokens: int, group: int) -> Prepared:
        """Upload a layout's tiles, for so many query heads per KV head (`group`). Layers of a group
        follow one another, so the last one is kept, and groups with the same rows share tiles."""
        last = self._last
        if last is not None and last[0] is layout and last[1:3] == (block_tokens, group):
            return last[3]
        if last is not None and last[0].requests is layout.requests and last[2] == group:
            tiles, rows, merged = last[3].tiles, last[3].partial_rows, last[3].merged
        else:
            cut_tiles = cut(layout.requests, TileSizes.of(group))
            tiles = upload(packed(cut_tiles), self._device)
            rows, merged = cut_tiles.partial_rows, cut_tiles.merged
        write_rows = layout.write_rows
        if isinstance(write_rows, slice):
            write_rows = torch.arange(write_rows.start, write_rows.stop, device=self._device)
        prepared = Prepared(
            tiles,
            self._blocks(layout, block_tokens),
            write_rows,
            layout.write_units,
            layout.write_offsets,
            rows,
            merged,
        )
        self._last = layout, block_tokens, group, prepared
        return prepared

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        work: Prepared,
        scale: float,
        out: torch.Tensor,
        delta: float,
    ) -> torch.Tensor:
        """One launch; nothing here waits for the device or depends on what is in its memory.
        Returns `out`: [out_rows, heads, head_dim], contiguous."""
        heads, head_dim = q.shape[1:]
        block_tokens, kv_heads = keys.shape[1:3]
        if not supports(head_dim, q.dtype, keys.dtype):
            raise ValueError(f"no kernel for heads of {head_dim} in {q.dtype} on {keys.dtype}")
        if keys.stride() != values.stride() or keys.stride()[2:] != (head_dim, 1):
            raise ValueError(f"strides of keys and values: {keys.stride()}, {values.stride()}")
        self.make_room(work.partial_rows * kv_heads, work.merged * kv_heads, block_of(head_dim))
        q, k, v = packed_heads(q), packed_heads(k), packed_heads(v)
        fused_attention[(self.programs,)](
            q, k, v, keys, values, out, work.write_rows, work.write_units, work.write_offsets,
            work.blocks, work.tiles, self._queues, self._arrived, self._sums, self._stats,
            len(work.write_units), len(out), k1_programs(delta, self.programs),
            scale * math.log2(math.e),
            q.stride(0), k.stride(0), v.stride(0), keys.stride(0), keys.stride(1),
            **constants(kv_heads, heads // kv_heads, head_dim, block_tokens, q.element_size()),
            num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
        return out

    def make_room(self, partial_rows: int, merged: int, block_d: int) -> None:
        """Let buffers hold so many partial results. They must not grow once a graph has captured
        a launch, which keeps their addresses."""
        if merged > len(self._arrived):
            size = triton.next_power_of_2(merged)
            self._arrived = torch.zeros(size, dtype=torch.int32, device=self._device)
        if partial_rows * block_d > len(self._sums):
            rows = triton.next_power_of_2(partial_rows)
            self._sums = torch.empty(rows * block_d, device=self._device)
            self._stats = torch.empty(rows * 2, device=self._device)

    def _blocks(self, layout: GroupLayout, block_tokens: int) -> torch.Tensor:
        blocks = layout.units.to(torch.int32)
        places, rows = span_blocks(layout.requests, block_tokens)
        if len(places):
            values = upload(rows.astype(np.int32), self._device)
            blocks.index_copy_(0, upload(places, self._device), values)
        return blocks


def constants(
    kv_heads: int, group: int, head_dim: int, block_tokens: int, element_size: int
) -> dict[str, int]:
    """What a kernel is compiled for. `element_size`: bytes of an element of rows and pool."""
    sizes = TileSizes.of(group)
    row_bytes = block_of(head_dim) * element_size
    return {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_of(head_dim),
        "BLOCK_TOKENS": block_tokens,
        "ROW_ELEMENTS": kv_heads * head_dim,
        "BLOCK_ELEMENTS": triton.next_power_of_2(kv_heads * head_dim),
        "BLOCK_K1": sizes.recompute,
        "BLOCK_K2": sizes.decode,
        # K or V of a step in 16 KiB: two programs' fit the shared memory, in two stages.
        "BLOCK_N": max(16, min(STEP, (16 << 10) // row_bytes)),
    }


def packed(tiles: Tiles) -> npt.NDArray[np.int32]:
    """`Prepared.tiles` of these tiles."""
    head = np.zeros((1, FIELDS), np.int32)
    head[0, :2] = tiles.recompute, tiles.decode
    return np.concatenate([head, tiles.fields])


def block_of(head_dim: int) -> int:
    """Elements of a head as the kernel's tiles hold it, a power of 2."""
    return max(16, int(triton.next_power_of_2(head_dim)))
