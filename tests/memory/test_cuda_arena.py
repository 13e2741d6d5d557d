"""The arena for CUDA devices, on a driver that has none: order, alignment, and nothing lost."""

from __future__ import annotations

import ctypes
import gc

import pytest
import torch

from ellm_sgl.memory import KVPool, PoolShape
from ellm_sgl.memory.cuda_arena import Access, Allocation, CudaArena, CudaError, Flags
from tests.memory.cuda_driver import BEGIN, StandIn

GRANULE = 64


def made(room: int = 1 << 16, nbytes: int = 10 * GRANULE) -> tuple[CudaArena, StandIn]:
    device = StandIn(room, GRANULE)
    return CudaArena(nbytes, 0, device.driver(), device.tensor_at), device


def mapped(device: StandIn) -> int:
    """Bytes from the first address on, all of which may be used."""
    assert device.errors == []
    count = len(device.maps)
    expected = {BEGIN + i * GRANULE for i in range(count)}
    assert device.maps.keys() == device.accessible == expected
    assert len(device.handles) == count
    return count * GRANULE


def test_structures_have_the_sizes_of_cuda_h() -> None:
    assert [ctypes.sizeof(kind) for kind in (Allocation, Access, Flags)] == [32, 12, 8]


def test_memory_comes_and_goes_and_addresses_stay() -> None:
    arena, device = made()
    assert arena.granule == GRANULE and device.reserved == (BEGIN, 10 * GRANULE)
    assert mapped(device) == 0
    arena.commit(0, 4 * GRANULE)
    tensor = arena.tensor()
    assert mapped(device) == 4 * GRANULE and len(tensor) == arena.nbytes
    tensor[: 4 * GRANULE] = 5
    arena.commit(4 * GRANULE, 10 * GRANULE, lazily=True)
    assert mapped(device) == 10 * GRANULE
    arena.decommit(2 * GRANULE, 10 * GRANULE)
    assert mapped(device) == 2 * GRANULE
    assert (tensor[: 2 * GRANULE] == 5).all() and (tensor[2 * GRANULE :] == 0xFF).all()
    arena.commit(2 * GRANULE, 3 * GRANULE)
    assert mapped(device) == 3 * GRANULE and arena.tensor().data_ptr() == tensor.data_ptr()


def test_the_last_granule_is_a_whole_one() -> None:
    arena, device = made(nbytes=2 * GRANULE + 1)
    assert device.reserved == (BEGIN, 3 * GRANULE)
    arena.commit(0, arena.nbytes)
    assert mapped(device) == 3 * GRANULE and len(arena.tensor()) == 2 * GRANULE + 1
    arena.decommit(GRANULE, arena.nbytes)
    assert mapped(device) == GRANULE


@pytest.mark.parametrize("what", ["create", "map"])
def test_where_the_device_has_no_more_nothing_changes(what: str) -> None:
    arena, device = made(room=5 * GRANULE if what == "create" else 1 << 16)
    if what == "map":
        device.fails_to_map_at = BEGIN + 5 * GRANULE
    arena.commit(0, 3 * GRANULE)
    with pytest.raises(MemoryError, match="the device has no more memory"):
        arena.commit(3 * GRANULE, 9 * GRANULE)
    assert mapped(device) == 3 * GRANULE
    arena.commit(3 * GRANULE, 5 * GRANULE)
    assert mapped(device) == 5 * GRANULE


def test_what_is_queued_has_ended_before_its_memory_goes() -> None:
    arena, device = made()
    arena.commit(0, 2 * GRANULE)
    device.calls.clear()
    arena.decommit(GRANULE, 2 * GRANULE)
    assert device.calls == ["cuCtxSetCurrent", "cuCtxSynchronize", "cuMemUnmap", "cuMemRelease"]


def test_an_arena_that_nobody_has_leaves_nothing() -> None:
    arena, device = made()
    arena.commit(0, 7 * GRANULE)
    del arena
    gc.collect()
    assert mapped(device) == 0 and device.reserved is None


def test_the_driver_s_other_errors_are_told() -> None:
    arena, device = made()
    device.reserved, reserved = None, device.reserved
    with pytest.raises(CudaError, match="cuMemMap: CUDA error 1"):
        arena.commit(0, GRANULE)
    assert not device.handles
    device.reserved = reserved


def test_a_pool_over_it_is_like_any_other() -> None:
    device, shape = StandIn(1 << 16, GRANULE), PoolShape(2, 1, 2)

    def reserve(nbytes: int) -> CudaArena:
        return CudaArena(nbytes, 0, device.driver(), device.tensor_at)

    pool = KVPool(shape, 8, 1, 2, torch.float32, "cpu", None, False, reserve, 4)
    assert mapped(device) == pool.bytes_behind(4) < pool.bytes_behind(8)
    pool.commit(4, 8)
    pool.keys(1)[1:9] = 3.0
    assert 0 <= mapped(device) - pool.bytes_behind(8) < GRANULE
    pool.decommit(3, 8)
    assert mapped(device) == pool.bytes_behind(3) and (pool.keys(1)[1:4] == 3.0).all()
