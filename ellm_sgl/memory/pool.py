"""Physical memory: one buffer of units of KV, and one of hidden states."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ellm_sgl.host_file import map_file
from ellm_sgl.memory.arena import Arena
from ellm_sgl.memory.shape import IntArray, PoolShape


class KVPool:
    """One buffer `[units + 1, F, 2, block_tokens, kv_heads, head_dim]`; unit 0 is scratch.

    Layer l of group g is the column `[:, l mod F]`; K is index 0 of the third axis, V index 1.
    A last, shorter group leaves its columns beyond the last layer unused: units of every group
    are interchangeable, which is worth more than those columns.

    With `path` the buffer is a new file, mapped into memory, whose name is gone at once
    (`host_file.map_file`, whose errors are this class's). `pinned` is for a pool in host memory
    with which a CUDA device exchanges units. `reserve` makes an arena of so many bytes, whose
    errors are this class's, and the buffer lies over it: then units 1..n alone may have memory
    (`commit`, `decommit`); `committed` of them have it at first, or all.
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
        pinned: bool = False,
        reserve: Callable[[int], Arena] | None = None,
        committed: int | None = None,
    ) -> None:
        self.shape = shape
        self.num_units = num_units
        self.arena: Arena | None = None
        self.lazy_units = num_units if committed is None else committed
        """Units 1..so many take memory of the machine only when they are written to."""
        # Not zeroed: nothing is read before it is written (the kernel tests poison the rest), and
        # on a CPU host memory that no request has used yet is not taken from the others.
        size = (num_units + 1, shape.layer_group, 2, shape.block_tokens, kv_heads, head_dim)
        self.unit_bytes = math.prod(size[1:]) * dtype.itemsize
        if reserve is None:
            self.buffer = _buffer(size, dtype, device, path, pinned)
        else:
            self.arena = reserve(math.prod(size) * dtype.itemsize)
            first = self.bytes_behind(self.lazy_units)
            self.arena.commit(0, first, lazily=True)
            self.buffer = self.arena.tensor().view(dtype).view(size)

    @staticmethod
    def bytes_per_unit(shape: PoolShape, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Size of one unit of such a pool."""
        return shape.layer_group * 2 * shape.block_tokens * kv_heads * head_dim * dtype.itemsize

    def commit(self, low: int, high: int) -> None:
        """Units 1..`high` have memory when this returns, of which 1..`low` had it before. See
        `Arena.commit`, whose errors are this function's."""
        assert self.arena is not None
        if (begin := self.bytes_behind(low)) < (end := self.bytes_behind(high)):
            self.arena.commit(begin, end)

    def decommit(self, low: int, high: int) -> None:
        """Units 1..`low` have memory from now on, of which 1..`high` had it before."""
        assert self.arena is not None
        self.lazy_units = min(self.lazy_units, low)
        if (begin := self.bytes_behind(low)) < (end := self.bytes_behind(high)):
            self.arena.decommit(begin, end)

    def bytes_behind(self, units: int) -> int:
        """Bytes of memory that unit 0 and units 1..`units` take, in whole granules."""
        if self.arena is None:
            return self.buffer.nbytes
        granule = self.arena.granule
        whole = -(-(units + 1) * self.unit_bytes // granule) * granule
        return min(whole, self.arena.nbytes)

    def read(self, units: IntArray) -> npt.NDArray[np.uint8]:
        """A copy of what blocks hold. `units`: [n, groups]. Returns [n, bytes of a block]; not for
        pools on CUDA devices."""
        flat = torch.from_numpy(units.astype(np.int64).reshape(-1))
        data = self.buffer[flat].view(torch.uint8)
        copy: npt.NDArray[np.uint8] = data.reshape(len(units), -1).numpy()
        return copy

    def write(self, units: IntArray, data: npt.NDArray[np.uint8]) -> None:
        """Put back what `read` gave, into these units or others."""
        flat = torch.from_numpy(units.astype(np.int64).reshape(-1))
        kv = torch.from_numpy(data).view(self.buffer.dtype)
        self.buffer[flat] = kv.view(len(flat), *self.buffer.shape[1:])

    def keys(self, layer: int) -> torch.Tensor:
        """K of one layer, a view `[units + 1, block_tokens, kv_heads, head_dim]`."""
        return self.buffer[:, layer % self.shape.layer_group, 0]

    def values(self, layer: int) -> torch.Tensor:
        """V of one layer, a view `[units + 1, block_tokens, kv_heads, head_dim]`."""
        return self.buffer[:, layer % self.shape.layer_group, 1]


class HiddenPool:
    """Hidden states: one buffer `[units, F, block_tokens, hidden]`.

    A slot is the room for one block: a unit for each of the H lowest layer groups. Slot s holds
    group g in unit s H + g; slot 0 is scratch. What is kept of a token is what the K and V
    projections of a layer are given: the layer's input behind its norm, as large as the input
    itself, and exact where the model adds and norms in one go.
    """

    def __init__(
        self,
        shape: PoolShape,
        num_groups: int,
        num_slots: int,
        hidden: int,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
        path: Path | None = None,
    ) -> None:
        self.shape = shape
        self.num_groups = num_groups
        units = self.units_of(num_groups, num_slots)
        size = (units, shape.layer_group, shape.block_tokens, hidden)
        self.buffer = _buffer(size, dtype, device, path)

    @staticmethod
    def units_of(num_groups: int, num_slots: int) -> int:
        """Units of such a pool, those of its slot of scratch included."""
        return (num_slots + 1) * num_groups

    def states(self, layer: int) -> torch.Tensor:
        """Of one layer, a view `[units, block_tokens, hidden]`."""
        return self.buffer[:, layer % self.shape.layer_group]

    def slots(self, layer: int) -> torch.Tensor:
        """Of one layer, a view `[slots + 1, block_tokens, hidden]`."""
        return self.states(layer)[self.shape.group_of(layer) :: self.num_groups]


def _buffer(
    size: tuple[int, ...],
    dtype: torch.dtype,
    device: str | torch.device,
    path: Path | None,
    pinned: bool = False,
) -> torch.Tensor:
    """Uninitialised memory; with `path`, that of a new file, which lasts as long as the tensor."""
    if path is None:
        return torch.empty(size, dtype=dtype, device=device, pin_memory=pinned)
    count = math.prod(size)
    return torch.frombuffer(map_file(path, count * dtype.itemsize), dtype=dtype).view(size)
