"""Decode steps at fixed addresses, so that a CUDA graph of them can be replayed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ellm_sgl.kernels.experimental.triton.attention import (
    FusedAttention,
    Prepared,
    block_of,
    packed,
)
from ellm_sgl.kernels.experimental.triton.plan import DECODE_CHUNK, FIELDS, TileSizes, cut
from ellm_sgl.kernels.layout import GroupLayout
from ellm_sgl.kernels.upload import upload


class GraphSteps:
    """Runs what `load` was last given: one new token per request, with nothing missing.

    A graph captured with `run` reads its tiles, blocks and units from here whenever it is
    replayed. Rows beyond those loaded come out as zeros, and write to scratch unit 0.

    Args:
        kernel: for these steps only; its buffers must never grow.
        layer_groups: of the pool.
        most_rows: rows of the largest graph.
        most_blocks: blocks of all requests of a step, shared ones counted for each.
        pool: keys of a layer, for its sizes.
        heads: query heads.
    """

    def __init__(
        self,
        kernel: FusedAttention,
        layer_groups: int,
        most_rows: int,
        most_blocks: int,
        pool: torch.Tensor,
        heads: int,
    ) -> None:
        # Rows of the tensors below begin at multiples of 16 bytes, as separate tensors would: for
        # others Triton would compile the kernel once more.
        most_rows, most_blocks = (-(-n // 4) * 4 for n in (most_rows, most_blocks))
        block_tokens, kv_heads, head_dim = pool.shape[1:]
        device = pool.device
        self._kernel = kernel
        self._sizes = TileSizes.of(heads // kv_heads)
        self._most_blocks = most_blocks
        most_tiles = most_rows + most_blocks * block_tokens // DECODE_CHUNK
        self._partial_rows, self._merged = most_tiles * self._sizes.decode, most_rows
        kernel.make_room(self._partial_rows * kv_heads, most_rows * kv_heads, block_of(head_dim))
        self._tiles = torch.zeros(1 + most_tiles, FIELDS, dtype=torch.int32, device=device)
        self._blocks = torch.zeros(layer_groups, most_blocks, dtype=torch.int32, device=device)
        self._rows = torch.arange(most_rows, device=device)
        self._units = torch.zeros(layer_groups, most_rows, dtype=torch.int64, device=device)
        self._offsets = torch.zeros(most_rows, dtype=torch.int64, device=device)

    def fits(self, groups: Sequence[GroupLayout]) -> bool:
        """Whether these layouts are of such a step, and small enough. SGLang checks the rows."""
        first = groups[0]
        return (
            len(first.units) <= self._most_blocks
            and all(r.new.size == 1 and not r.spans for r in first.requests)
            # Consecutive rows: each one has a unit.
            and all(isinstance(group.write_rows, slice) for group in groups)
        )

    def load(self, groups: Sequence[GroupLayout]) -> None:
        """Let the next replay compute this step. All groups have the same requests."""
        tiles = upload(packed(cut(groups[0].requests, self._sizes)), self._tiles.device)
        self._tiles[: len(tiles)].copy_(tiles)
        self._offsets[: groups[0].rows].copy_(groups[0].write_offsets)
        self._units.zero_()
        for blocks, units, group in zip(self._blocks, self._units, groups, strict=True):
            blocks[: len(group.units)].copy_(group.units)
            units[: group.rows].copy_(group.write_units)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        layer_group: int,
        scale: float,
    ) -> torch.Tensor:
        """Attention of one layer; `reference.mixed_attention` says what the tensors are."""
        rows = len(q)
        work = Prepared(
            self._tiles,
            self._blocks[layer_group],
            self._rows[:rows],
            self._units[layer_group, :rows],
            self._offsets[:rows],
            self._partial_rows,
            self._merged,
        )
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        return self._kernel.run(q, k, v, keys, values, work, scale, out, delta=0.0)
