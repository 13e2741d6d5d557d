"""Decode steps through FlashInfer at fixed addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ellm_sgl.kernels.experimental.flashinfer.attention import (
    BACKEND,
    FlashInferAttention,
    tensor_cores,
)
from ellm_sgl.kernels.experimental.flashinfer.plan import Pages
from ellm_sgl.kernels.experimental.graph import GraphSteps
from ellm_sgl.kernels.layout import GroupLayout
from ellm_sgl.kernels.upload import upload


class FlashInferGraphSteps(GraphSteps):
    """Graphs with a wrapper each, as FlashInfer wants it: a wrapper's batch never changes its size.

    A wrapper reads its pages in one place, but each layer group has its own: the graph copies them
    there as the group begins. So a step is planned once. Rows beyond those loaded attend to the
    first token of scratch unit 0.

    Args:
        kernel: for eager steps; they and graphs share a workspace, one at a time.
        layer_groups, most_rows, most_blocks, pool: see `GraphSteps`.
        heads: query heads.
    """

    def __init__(
        self,
        kernel: FlashInferAttention,
        layer_groups: int,
        most_rows: int,
        most_blocks: int,
        pool: torch.Tensor,
        heads: int,
    ) -> None:
        super().__init__(layer_groups, most_rows, most_blocks, pool)
        self._kernel = kernel
        self._heads = heads
        self._pool = pool
        self._pages = torch.zeros_like(self._blocks[0])
        self._wrappers: dict[int, Any] = {}

    def capture(self, rows: int) -> None:
        kernel, device = self._kernel, self._pages.device
        indptr, last_tokens = (
            torch.zeros(size, dtype=torch.int32, device=device) for size in (rows + 1, rows)
        )
        self._wrappers[rows] = kernel.library.BatchDecodeWithPagedKVCacheWrapper(
            kernel.workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=tensor_cores(self._heads, self._pool.shape[2]),
            paged_kv_indptr_buffer=indptr,
            paged_kv_indices_buffer=self._pages,
            paged_kv_last_page_len_buffer=last_tokens,
            backend=BACKEND,
        )
        nothing = np.empty(0, np.int64)
        self._blocks.zero_()
        self._plan(Pages.before(nothing, nothing, self._pool.shape[1]), rows)

    def load(self, groups: Sequence[GroupLayout], rows: int) -> None:
        super().load(groups, rows)
        step = groups[0].stacked
        new = np.array([(r.new.end_position, r.blocks.start) for r in step.requests], np.int64)
        pages = Pages.before(new[:, 0], new[:, 1], self._pool.shape[1])
        count = len(pages.places)
        self._blocks[:, :count].copy_(step.units[:, upload(pages.places, self._blocks.device)])
        self._blocks[:, count : count + rows - len(new)].zero_()
        self._plan(pages, rows)

    def _plan(self, pages: Pages, rows: int) -> None:
        """Plan the graph of `rows` rows; those beyond the ranges of `pages` have a page each."""
        beyond = np.ones(rows - len(pages.last_tokens), np.int64)
        indptr = np.append(pages.indptr, pages.indptr[-1] + np.cumsum(beyond))
        block_tokens, kv_heads, head_dim = self._pool.shape[1:]
        kernel = self._kernel
        with kernel.planning():
            self._wrappers[rows].plan(
                kernel.on_host(indptr),
                self._blocks[0, : indptr[-1]],
                kernel.on_host(np.append(pages.last_tokens, beyond)),
                self._heads,
                kv_heads,
                head_dim,
                block_tokens,
                q_data_type=self._pool.dtype,
                kv_data_type=self._pool.dtype,
            )

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
        places = self._units[layer_group, :rows], self._offsets[:rows]
        self._kernel.append(k, v, keys, values, *places)
        if first_layer:
            self._pages.copy_(self._blocks[layer_group])
        # Not `run`: the scale is a layer's, and not known when a graph's wrapper is planned.
        out = self._wrappers[rows].forward(q.contiguous(), (keys, values), sm_scale=scale)
        assert isinstance(out, torch.Tensor)
        return out
