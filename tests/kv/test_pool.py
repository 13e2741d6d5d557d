"""Physical KV memory: views, columns, writes."""

from __future__ import annotations

import pytest
import torch

from ellm_sgl.kv import KVPool, PoolShape

LAYERS, GROUP, BLOCK_TOKENS, KV_HEADS, HEAD_DIM = 5, 2, 4, 3, 8
UNITS = 6
SHAPE = PoolShape(LAYERS, GROUP, BLOCK_TOKENS)


@pytest.fixture
def pool() -> KVPool:
    return KVPool(SHAPE, UNITS, KV_HEADS, HEAD_DIM, torch.float32, "cpu")


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, KV_HEADS, HEAD_DIM)


def test_the_buffer_has_a_scratch_unit_and_is_zero(pool: KVPool) -> None:
    assert pool.buffer.shape == (UNITS + 1, GROUP, 2, BLOCK_TOKENS, KV_HEADS, HEAD_DIM)
    assert not pool.buffer.any()


def test_nbytes_is_what_the_buffer_takes(pool: KVPool) -> None:
    assert pool.nbytes == (UNITS + 1) * GROUP * 2 * BLOCK_TOKENS * KV_HEADS * HEAD_DIM * 4


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_layer_is_a_view_of_its_column(pool: KVPool, layer: int) -> None:
    pool.keys(layer).fill_(1)
    pool.values(layer).fill_(2)
    column = layer % GROUP
    assert (pool.buffer[:, column, 0] == 1).all() and (pool.buffer[:, column, 1] == 2).all()
    others = [c for c in range(GROUP) if c != column]
    assert not pool.buffer[:, others].any()


def test_layers_of_one_group_do_not_share_memory(pool: KVPool) -> None:
    for group in range(SHAPE.num_groups):
        layers = [layer for layer in range(LAYERS) if SHAPE.group_of(layer) == group]
        views = [view(layer) for layer in layers for view in (pool.keys, pool.values)]
        assert len({view.data_ptr() for view in views}) == 2 * len(layers)


def test_the_last_shorter_group_uses_its_first_columns(pool: KVPool) -> None:
    pool.write(4, torch.tensor([3]), torch.tensor([0]), rows(1), rows(1))
    assert pool.buffer[3, 0].any() and not pool.buffer[3, 1].any()


def test_write_puts_each_row_at_its_unit_and_offset(pool: KVPool) -> None:
    k, v = rows(3), rows(3)
    pool.write(1, torch.tensor([2, 5, 2]), torch.tensor([0, 3, 1]), k, v)
    for i, (unit, offset) in enumerate([(2, 0), (5, 3), (2, 1)]):
        assert torch.equal(pool.keys(1)[unit, offset], k[i])
        assert torch.equal(pool.values(1)[unit, offset], v[i])
    assert pool.buffer.count_nonzero() == 2 * k.numel()


def test_write_converts_to_the_pools_type() -> None:
    pool = KVPool(SHAPE, UNITS, KV_HEADS, HEAD_DIM, torch.bfloat16, "cpu")
    k, v = rows(1), rows(1)
    pool.write(0, torch.tensor([1]), torch.tensor([0]), k, v)
    assert torch.equal(pool.keys(0)[1, 0], k[0].bfloat16())
    assert torch.equal(pool.values(0)[1, 0], v[0].bfloat16())
