"""Memory beside the device pool: what hidden states on the device leave of it."""

from __future__ import annotations

import pytest
import torch

from ellm_sgl.config import ConfigError, EllmConfig
from ellm_sgl.kv import HiddenPool, KVPool, PoolShape
from ellm_sgl.sglang.tiers import units_beside

SHAPE = PoolShape(num_layers=6, layer_group=2, block_tokens=16)
HEADS, HEAD_DIM = 4, 8
UNIT = KVPool.bytes_per_unit(SHAPE, HEADS, HEAD_DIM, torch.float32)


def hidden_pool(groups: int, tokens: int) -> HiddenPool:
    slots = tokens // SHAPE.block_tokens
    return HiddenPool(SHAPE, groups, slots, HEADS * HEAD_DIM, torch.float32)


def settings(where: str, tokens: int) -> EllmConfig:
    return EllmConfig(host_keeps="hidden", host_kv_tokens=tokens, hidden_on=where)


@pytest.mark.parametrize("groups", [1, 3])
def test_hidden_states_on_the_device_take_half_of_their_kv(groups: int) -> None:
    tokens, units = 20 * SHAPE.block_tokens, 300
    pool = hidden_pool(groups, tokens)
    left = units_beside(pool, settings("device", tokens), units, UNIT)
    taken = (20 + 1) * groups / 2  # a slot of scratch; no heads share KV: half of it
    assert taken <= units - left < taken + 1
    assert (units - left) * UNIT >= pool.nbytes


def test_elsewhere_they_take_nothing_of_it() -> None:
    assert units_beside(hidden_pool(3, 64), settings("host", 64), 30, UNIT) == 30
    assert units_beside(None, EllmConfig(), 30, UNIT) == 30


def test_a_device_that_they_fill_is_refused() -> None:
    pool = hidden_pool(3, 128)  # with its slot of scratch 9 x 3 halves of a unit: 14
    assert units_beside(pool, settings("device", 128), 17, UNIT) == 3
    with pytest.raises(ConfigError, match=r"^--ellm-hidden-on device: .* 128 .* 74 tokens .* 85"):
        units_beside(pool, settings("device", 128), 16, UNIT)
