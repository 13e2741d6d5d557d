"""The arena on a CUDA device: what the driver's stand-in takes for granted."""

from __future__ import annotations

import gc

import pytest
import torch

from ellm_sgl.kernels.choose import choose
from ellm_sgl.memory import KVPool, PoolShape
from ellm_sgl.memory.cuda_arena import CudaArena
from tests.kernels.cpu_steps import BF16, Sizes, make
from tests.kernels.on_device import CUDA, moved

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

MIB = 1 << 20


def arena_of(nbytes: int) -> CudaArena:
    torch.ones(1, device=CUDA)  # a context, which is the process's from now on
    return CudaArena(nbytes, torch.cuda.current_device())


def free() -> int:
    """Bytes that the device has left, PyTorch's cache being empty."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def test_memory_comes_and_goes_and_addresses_stay() -> None:
    arena = arena_of(2048 * MIB)
    assert arena.granule == 2 * MIB
    before = free()
    arena.commit(0, 512 * MIB)
    tensor = arena.tensor()
    first, second = tensor[: 256 * MIB], tensor[256 * MIB : 512 * MIB]
    first.fill_(7)
    second.fill_(9)
    arena.commit(512 * MIB, 2048 * MIB)
    tensor[1024 * MIB : 2048 * MIB].fill_(3)
    assert before - free() >= 2040 * MIB
    arena.decommit(256 * MIB, 2048 * MIB)
    assert before - free() <= 300 * MIB
    assert bool((first == 7).all())
    arena.commit(256 * MIB, 512 * MIB)
    second.fill_(1)
    assert bool((second == 1).all()) and bool((first == 7).all())
    del tensor, first, second, arena
    gc.collect()
    assert before - free() <= 4 * MIB


def test_attention_over_it_is_attention_over_plain_memory() -> None:
    """The kernels read a pool whose memory came in two pieces."""
    sizes = Sizes(((2000, 1), (900, 70), (0, 90)), 16, 2, 4, 128, BF16, BF16, 0.0)
    there = moved(make(sizes))
    units, block, heads, size = there.keys.shape
    shape = PoolShape(1, 1, block)
    bytes_each = KVPool.bytes_per_unit(shape, heads, size, BF16)
    arena = arena_of(-(-units * bytes_each // MIB) * MIB)
    middle = arena.granule
    arena.commit(0, middle)
    arena.commit(middle, arena.nbytes)
    pool = arena.tensor()[: units * bytes_each].view(BF16).view(units, 2, block, heads, size)
    pool[:, 0], pool[:, 1] = there.keys, there.values
    kernel = choose(CUDA, size, BF16, BF16).kernel
    plain, _, _ = there.run(kernel)
    over = kernel(there.q, there.k, there.v, pool[:, 0], pool[:, 1], there.layout, there.scale)
    assert torch.equal(plain, over)
