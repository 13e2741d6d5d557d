"""Who attends on a CUDA device: FlashInfer, and the fused kernel where rows are recomputed."""

from __future__ import annotations

import torch

from ellm_sgl.kernels.experimental.flashinfer.attention import FlashInferAttention
from ellm_sgl.kernels.layout import GroupLayout, MixedAttention, RequestLayout


class DividedAttention:
    """`MixedAttention` by two kernels.

    A layer group goes to one of them as a whole: to the fused kernel if any of its rows is
    recomputed, so that recomputing and decoding share the processor. In a step that recomputes,
    groups above all that is missing are FlashInfer's again.

    Args:
        ragged: for layouts without recomputed rows.
        fused: for the others.
    """

    def __init__(self, ragged: FlashInferAttention, fused: MixedAttention) -> None:
        self.ragged = ragged
        self._fused = fused
        self._last: tuple[tuple[RequestLayout, ...], MixedAttention] | None = None

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
        kernel = self._kernel_for(layout.requests)
        return kernel(q, k, v, keys, values, layout, scale, out_rows, delta)

    def _kernel_for(self, requests: tuple[RequestLayout, ...]) -> MixedAttention:
        """Layers that follow one another have the same requests: only the first one looks."""
        if self._last is None or self._last[0] is not requests:
            recomputes = any(request.spans for request in requests)
            self._last = requests, self._fused if recomputes else self.ragged
        return self._last[1]
