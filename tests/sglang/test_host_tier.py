"""Memory beside the device pool: what hidden states on the device leave of it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from ellm_sgl.config import ConfigError, EllmConfig
from ellm_sgl.memory import HiddenPool, KVPool, PoolShape
from ellm_sgl.sglang.host_tier import check_room, device_units

SHAPE = PoolShape(num_layers=6, layer_group=2, block_tokens=16)
HEADS, HEAD_DIM = 4, 8
HIDDEN = HEADS * HEAD_DIM
UNIT = KVPool.bytes_per_unit(SHAPE, HEADS, HEAD_DIM, torch.float32)


def settings(where: str, tokens: int, device: int | None = None) -> EllmConfig:
    return EllmConfig(
        host_keeps="hidden", host_kv_tokens=tokens, hidden_on=where, device_kv_tokens=device,
        layer_group=2,
    )  # fmt: skip


def units(config: EllmConfig, tokens: int, groups: int) -> int:
    return device_units(config, SHAPE, tokens, groups, 4 * HIDDEN, UNIT)


@pytest.mark.parametrize("groups", [1, 3])
def test_hidden_states_on_the_device_take_half_of_their_kv(groups: int) -> None:
    left = units(settings("device", 20 * 16), 1600, groups)
    taken = (20 + 1) * groups / 2  # a slot of scratch; no heads share KV: half of it
    assert taken <= 300 - left < taken + 1
    pool = HiddenPool(SHAPE, groups, 20, HIDDEN, torch.float32)
    assert (300 - left) * UNIT >= pool.buffer.nbytes > (300 - left - 1) * UNIT


def test_elsewhere_they_take_nothing_of_it() -> None:
    assert units(settings("host", 64), 160, 3) == 30
    assert units(EllmConfig(), 160, 0) == 30


def test_a_device_that_they_fill_is_refused() -> None:
    config = settings("device", 128)  # with its slot of scratch 9 x 3 halves of a unit: 14
    assert units(config, 96, 3) == 4
    with pytest.raises(ConfigError, match=r"^--ellm-hidden-on device: .* 128 .* 74 tokens .* 80;"):
        units(config, 80, 3)


@dataclass(frozen=True)
class Model:
    """As much of SGLang's `ModelConfig` as is asked for."""

    num_hidden_layers: int = 6
    hidden_size: int = HIDDEN
    head_dim: int = HEAD_DIM
    dtype: torch.dtype = torch.float32

    def get_num_kv_heads(self, tp_size: int) -> int:
        return HEADS // tp_size


def test_it_is_refused_before_a_process_starts() -> None:
    check_room(settings("device", 128, device=96), Model(), tp_size=1)
    with pytest.raises(ConfigError, match="take as much memory as 74 tokens"):
        check_room(settings("device", 128, device=80), Model(), tp_size=1)
    with pytest.raises(ConfigError, match="holds 80;"):  # whole blocks only
        check_room(settings("device", 128, device=95), Model(), tp_size=1)
    # Each rank keeps whole hidden states, but only its heads' KV.
    with pytest.raises(ConfigError, match="take as much memory as 144 tokens"):
        check_room(settings("device", 128, device=96), Model(), tp_size=2)
    check_room(settings("host", 128, device=80), Model(), tp_size=1)
    check_room(settings("device", 128), Model(), tp_size=1)  # SGLang will say how much there is
