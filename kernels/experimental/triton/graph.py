"""Decode steps through the fused kernel at fixed addresses."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ellm_sgl.kernels.experimental.graph import GraphSteps
from ellm_sgl.kernels.experimental.triton.attention import (
    FusedAttention,
    Prepared,
    block_of,
    packed,
)
from ellm_sgl.kernels.experimental.triton.plan import DECODE_CHUNK, FIELDS, TileSizes, cut
from ellm_sgl.kernels.layout import GroupLayout
from ellm_sgl.kernels.upload import upload


class FusedGraphSteps(GraphSteps):
    """Graphs that read their tiles on the device: a row without a tile comes out as zeros.

    Args:
        kernel: for these steps only; its buffers must never grow.
        layer_groups, most_rows, most_blocks, pool: see `GraphSteps`.
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
        super().__init__(layer_groups, most_rows, most_blocks, pool)
        block_tokens, kv_heads, head_dim = pool.shape[1:]
        device = pool.device
        self._kernel = kernel
        self._sizes = TileSizes.of(heads // kv_heads)
        self._merged = self._most_rows
        most_tiles = self._most_rows + self._most_blocks * block_tokens // DECODE_CHUNK
        self._partial_rows = most_tiles * self._sizes.decode
        kernel.make_room(self._partial_rows * kv_heads, self._merged * kv_heads, block_of(head_dim))
        self._tiles = torch.zeros(1 + most_tiles, FIELDS, dtype=torch.int32, device=device)
        self._rows = torch.arange(self._most_rows, device=device)

    def capture(self, rows: int) -> None:
        """Nothing: all graphs read the same tiles."""

    def load(self, groups: Sequence[GroupLayout], rows: int) -> None:
        super().load(groups, rows)
        step = groups[0].stacked
        tiles = upload(packed(cut(step.requests, self._sizes)), self._tiles.device)
        self._tiles[: len(tiles)].copy_(tiles)
        self._blocks[:, : step.units.shape[1]].copy_(step.units)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        layer_group: int,
        first_layer: bool,
        scale: float,
    ) -> torch.Tensor:
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
