"""Memory comes and goes behind a tensor that stays where it is."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from ellm_sgl.memory import Arena, CpuArena, KVPool, PoolShape
from tests.memory.fake_arena import SPOILED, FakeArena

MIB = 1 << 20
PAGE = 4096
SHAPE = PoolShape(num_layers=4, layer_group=2, block_tokens=16)


def resident(tensor: torch.Tensor) -> int:
    """Bytes of memory behind its addresses: what the process has elsewhere comes and goes, too."""
    return resident_at(tensor.data_ptr(), tensor.nbytes)


def resident_at(begin: int, nbytes: int) -> int:
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match("([0-9a-f]+)-[0-9a-f]+ ", line):
            inside = begin <= int(found[1], 16) < begin + nbytes
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


def in_a_child(code: str) -> subprocess.CompletedProcess[str]:
    begin = "from ellm_sgl.memory import CpuArena\nimport resource, torch\n"
    return subprocess.run(
        [sys.executable, "-c", begin + textwrap.dedent(code)], capture_output=True, text=True
    )


def make_arena(nbytes: int) -> tuple[CpuArena, torch.Tensor]:
    """All of it committed, none of it taken yet."""
    arena = CpuArena(nbytes)
    arena.commit(0, nbytes, lazily=True)
    return arena, torch.frombuffer(arena.memory, dtype=torch.uint8)


def make_pool(units: int = 16) -> KVPool:
    """8 KiB a unit; memory in single pages."""
    return KVPool(
        SHAPE, units, 2, 32, torch.float32, "cpu", reserve=lambda n: CpuArena(n, granule=PAGE)
    )


def test_memory_that_is_given_back_and_had_again() -> None:
    arena, tensor = make_arena(64 * MIB)
    place = tensor.data_ptr()
    assert place % arena.granule == 0 and resident(tensor) == 0
    tensor.fill_(1)
    assert resident(tensor) == 64 * MIB
    arena.decommit(16 * MIB, 64 * MIB)
    assert resident(tensor) == 16 * MIB
    arena.commit(16 * MIB, 40 * MIB)
    assert resident(tensor) == 40 * MIB
    assert tensor.data_ptr() == place and bool((tensor[: 16 * MIB] == 1).all())
    tensor[16 * MIB : 40 * MIB] = 2
    assert resident(tensor) == 40 * MIB


def test_memory_lasts_as_long_as_a_tensor_over_it() -> None:
    tensor = make_arena(32 * MIB)[1].fill_(1)
    begin = tensor.data_ptr()
    assert resident(tensor) == 32 * MIB and int(tensor[-1]) == 1
    del tensor
    assert resident_at(begin, 32 * MIB) == 0


@pytest.mark.slow
@pytest.mark.parametrize("access", ["int(tensor[8 << 20])", "tensor[-1] = 1", "tensor.sum()"])
@pytest.mark.parametrize("committed", [8, 16])
def test_to_touch_what_is_not_committed_ends_the_process(access: str, committed: int) -> None:
    """Nor what never was."""
    done = in_a_child(f"""
        arena = CpuArena(16 << 20)
        arena.commit(0, {committed} << 20, lazily=True)
        tensor = torch.frombuffer(arena.memory, dtype=torch.uint8)
        tensor[:{committed} << 20].zero_()
        if {committed} > 8:
            arena.decommit(8 << 20, 16 << 20)
        print(int(tensor[(8 << 20) - 1]), flush=True)
        {access}
        print("no harm done")
    """)
    assert done.stdout == "0\n" and done.returncode < 0


@pytest.mark.slow
def test_where_the_machine_gives_no_more_nothing_changes() -> None:
    done = in_a_child("""
        arena = CpuArena(512 << 20)
        tensor = torch.frombuffer(arena.memory, dtype=torch.uint8)
        arena.commit(0, 8 << 20)
        data = next(l for l in open("/proc/self/status") if l.startswith("VmData"))
        limit = (int(data.split()[1]) << 10) + (64 << 20)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
        for attempt in range(2):
            try:
                arena.commit(8 << 20, 512 << 20)
            except MemoryError as error:
                print(error)
        arena.commit(8 << 20, 16 << 20)
        tensor[(16 << 20) - 1] = 1
        print("goes on", flush=True)
        tensor[16 << 20] = 1
    """)
    assert done.stdout == "528,482,304 bytes: Cannot allocate memory\n" * 2 + "goes on\n"
    assert done.returncode < 0


@pytest.mark.slow
def test_more_addresses_than_there_are() -> None:
    done = in_a_child("""
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
        CpuArena(16 << 30)
    """)
    said = "MemoryError: 17,181,966,336 bytes of addresses cannot be had (Cannot allocate memory)"
    assert said in done.stderr
    for nbytes in (1 << 50, 1 << 70):
        with pytest.raises(MemoryError, match="cannot be had"):
            CpuArena(nbytes)


@pytest.mark.slow
def test_addresses_are_no_memory() -> None:
    """Not even where the process may not have as much of it."""
    done = in_a_child("""
        resource.setrlimit(resource.RLIMIT_DATA, (2 << 30, 2 << 30))
        arena = CpuArena(1 << 40)
        arena.commit(0, 64 << 20, lazily=True)
        tensor = torch.frombuffer(arena.memory, dtype=torch.uint8)
        tensor[:64 << 20] = 1
        print(tensor.nbytes, flush=True)
        arena.commit(64 << 20, 4 << 30, lazily=True)
    """)
    assert done.stdout == f"{1 << 40}\n"
    assert "MemoryError: 4,227,858,432 bytes: Cannot allocate memory" in done.stderr


@pytest.mark.parametrize("reserve", [CpuArena, FakeArena])
def test_a_pool_over_an_arena_is_like_any_other(reserve: type[Arena]) -> None:
    plain, over = (
        KVPool(SHAPE, 8, 2, 32, torch.bfloat16, "cpu", reserve=r).buffer for r in (None, reserve)
    )
    over.zero_()
    assert (over.shape, over.stride(), over.dtype) == (plain.shape, plain.stride(), plain.dtype)


def test_a_pool_begins_with_as_much_memory_as_it_is_told() -> None:
    pool = KVPool(
        SHAPE, 16, 2, 32, torch.float32, "cpu", reserve=lambda n: CpuArena(n, PAGE), committed=5
    )
    assert resident(pool.buffer) == 0
    pool.buffer[:6] = 1
    assert resident(pool.buffer) == pool.bytes_behind(5) == 6 * pool.unit_bytes
    pool.commit(5, 16)
    assert resident(pool.buffer) == pool.buffer.nbytes and bool((pool.buffer[:6] == 1).all())


def test_a_tail_of_units_is_a_tail_of_bytes() -> None:
    """Units 1..n keep what they hold whatever becomes of those behind them."""
    pool = make_pool(units=16)
    expected = torch.randn(pool.buffer.shape)
    pool.buffer.copy_(expected)
    had = 16
    for have in (11, 3, 0, 5, 16):
        if have < had:
            pool.decommit(have, had)
        else:
            pool.commit(had, have)
            pool.buffer[had + 1 : have + 1] = expected[had + 1 : have + 1]
        had = have
        assert torch.equal(pool.buffer[: have + 1], expected[: have + 1])


def test_what_lies_in_a_granule_together_stays_together() -> None:
    pool = KVPool(SHAPE, 9, 1, 8, torch.float32, "cpu", reserve=lambda n: FakeArena(n, 3000))
    arena = pool.arena
    assert isinstance(arena, FakeArena) and pool.unit_bytes == 2048
    pool.buffer.fill_(1)
    for units, committed in ((9, 20480), (8, 20480), (7, 18000), (1, 6000), (0, 3000)):
        assert pool.bytes_behind(units) == committed
        if committed < arena.committed:
            pool.decommit(units, 9)
            assert arena.committed == committed
            assert np.all(arena.bytes[committed:] == SPOILED)
            pool.commit(units, 9)
