"""Physical KV memory: one buffer of units."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from ellm_sgl.kv.shape import PoolShape


class KVPool:
    """One buffer `[units + 1, F, 2, block_tokens, kv_heads, head_dim]`; unit 0 is scratch.

    Layer l of group g is the column `[:, l mod F]`; K is index 0 of the third axis, V index 1.
    A last, shorter group leaves its columns beyond the last layer unused: units of every group
    are interchangeable, which is worth more than those columns.

    With `path` the buffer is that file, mapped into memory; it is created, or grown, as needed.
    """

    def __init__(
        self,
        shape: PoolShape,
        num_units: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str | torch.device,
        path: Path | None = None,
    ) -> None:
        self.shape = shape
        self.num_units = num_units
        # Not zeroed: nothing is read before it is written (the kernel tests poison the rest), and
        # on a CPU host memory that no request has used yet is not taken from the others.
        size = (num_units + 1, shape.layer_group, 2, shape.block_tokens, kv_heads, head_dim)
        if path is None:
            self.buffer = torch.empty(size, dtype=dtype, device=device)
        else:
            self.buffer = torch.from_file(
                str(path), shared=True, size=math.prod(size), dtype=dtype
            ).view(size)

    @property
    def nbytes(self) -> int:
        return self.buffer.numel() * self.buffer.element_size()

    @property
    def unit_bytes(self) -> int:
        return self.nbytes // (self.num_units + 1)

    def keys(self, layer: int) -> torch.Tensor:
        """K of one layer, a view `[units + 1, block_tokens, kv_heads, head_dim]`."""
        return self.buffer[:, layer % self.shape.layer_group, 0]

    def values(self, layer: int) -> torch.Tensor:
        """V of one layer, a view `[units + 1, block_tokens, kv_heads, head_dim]`."""
        return self.buffer[:, layer % self.shape.layer_group, 1]
