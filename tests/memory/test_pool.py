"""Physical KV memory: views and columns."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from ellm_sgl.memory import HiddenPool, KVPool, PoolShape

LAYERS, GROUP, BLOCK_TOKENS, KV_HEADS, HEAD_DIM = 5, 2, 4, 3, 8
UNITS = 6
SHAPE = PoolShape(LAYERS, GROUP, BLOCK_TOKENS)


@pytest.fixture
def pool() -> KVPool:
    pool = KVPool(SHAPE, UNITS, KV_HEADS, HEAD_DIM, torch.float32, "cpu")
    pool.buffer.zero_()
    return pool


def test_the_buffer_has_a_scratch_unit(pool: KVPool) -> None:
    assert pool.buffer.shape == (UNITS + 1, GROUP, 2, BLOCK_TOKENS, KV_HEADS, HEAD_DIM)


def test_nbytes_is_what_the_buffer_takes(pool: KVPool) -> None:
    assert pool.buffer.nbytes == (UNITS + 1) * GROUP * 2 * BLOCK_TOKENS * KV_HEADS * HEAD_DIM * 4
    unit = KVPool.bytes_per_unit(SHAPE, KV_HEADS, HEAD_DIM, torch.float32)
    assert pool.unit_bytes == unit == pool.buffer[0].numel() * 4


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_layer_is_a_view_of_its_column(pool: KVPool, layer: int) -> None:
    pool.keys(layer).fill_(1)
    pool.values(layer).fill_(2)
    column = layer % GROUP
    assert (pool.buffer[:, column, 0] == 1).all() and (pool.buffer[:, column, 1] == 2).all()
    others = [c for c in range(GROUP) if c != column]
    assert not pool.buffer[:, others].any()


def test_a_slot_of_hidden_states_is_a_unit_of_each_hidden_group() -> None:
    pool = HiddenPool(SHAPE, 2, 3, hidden=6, dtype=torch.float32)
    pool.buffer.zero_()
    assert pool.buffer.shape == (4 * 2, GROUP, BLOCK_TOKENS, 6)
    for layer in range(2 * GROUP):
        pool.slots(layer)[3, 1] = layer + 1
        unit = 3 * 2 + SHAPE.group_of(layer)
        assert (pool.states(layer)[unit, 1] == layer + 1).all()
        assert (pool.buffer[unit, layer % GROUP, 1] == layer + 1).all()
    assert len(pool.buffer.unique()) == 2 * GROUP + 1


def test_layers_of_one_group_do_not_share_memory(pool: KVPool) -> None:
    for group in range(SHAPE.num_groups):
        layers = [layer for layer in range(LAYERS) if SHAPE.group_of(layer) == group]
        views = [view(layer) for layer in layers for view in (pool.keys, pool.values)]
        assert len({view.data_ptr() for view in views}) == 2 * len(layers)


def test_the_last_shorter_group_uses_its_first_columns(pool: KVPool) -> None:
    pool.keys(4)[3, 0] = 1
    assert pool.buffer[3, 0].any() and not pool.buffer[3, 1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_pool_in_a_file_is_like_one_in_memory(tmp_path: Path, dtype: torch.dtype) -> None:
    for at in (None, tmp_path / "tier"):
        kv = KVPool(SHAPE, UNITS, KV_HEADS, HEAD_DIM, dtype, "cpu", at).buffer
        hidden = HiddenPool(SHAPE, 2, 3, hidden=6, dtype=dtype, path=at).buffer
        if at is None:
            expected = [(b.shape, b.stride(), b.dtype, b.device) for b in (kv, hidden)]
    assert [(b.shape, b.stride(), b.dtype, b.device) for b in (kv, hidden)] == expected
    assert kv.data_ptr() % 64 == 0 and hidden.data_ptr() % 64 == 0
    values = torch.randn(kv.shape).to(dtype)
    kv.copy_(values)
    hidden.zero_()
    assert torch.equal(kv, values)
    assert os.listdir(tmp_path) == []


def test_pools_of_one_file_name_never_share_memory(tmp_path: Path) -> None:
    pools = [
        KVPool(SHAPE, UNITS, KV_HEADS, HEAD_DIM, torch.float32, "cpu", tmp_path / "tier")
        for _ in range(2)
    ]
    for number, pool in enumerate(pools):
        pool.buffer.fill_(number)
    assert [pool.buffer.unique().tolist() for pool in pools] == [[0.0], [1.0]]


def test_a_file_lasts_as_long_as_a_view_of_the_pool(tmp_path: Path) -> None:
    def mapped() -> bool:
        return f"{tmp_path}/tier (deleted)" in Path("/proc/self/maps").read_text()

    pool = KVPool(SHAPE, UNITS, KV_HEADS, HEAD_DIM, torch.float32, "cpu", tmp_path / "tier")
    keys = pool.keys(1)
    keys.fill_(3)
    del pool
    assert mapped() and (keys == 3).all()
    del keys
    assert not mapped()
