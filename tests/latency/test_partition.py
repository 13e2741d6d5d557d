"""HCache's partition: where its closed form puts it, and its two ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ellm_sgl.latency import ModelShape, hidden_layers
from tests.latency.machines import GPU, LLAMA

MHA = ModelShape(40, 5120, 40, 40, 128, 13824, 32000)
"""Llama 2 13B."""


@pytest.mark.parametrize("kv_heads", [30, 40])
@pytest.mark.parametrize("flops", [1e12, 1e13, 3e13, 1e14])
def test_link_and_processor_balance(kv_heads: int, flops: float) -> None:
    model, hardware = replace(MHA, kv_heads=kv_heads), replace(GPU, flops=flops)
    kv_width = kv_heads * model.head_dim
    project = 4 * model.hidden * kv_width / flops
    hidden = model.hidden * model.kv_bytes / hardware.link_bytes_per_s
    kv = 2 * kv_width * model.kv_bytes / hardware.link_bytes_per_s
    assert project > hidden
    balanced = model.layers * kv / (kv + project - hidden)
    assert abs(hidden_layers(model, hardware) - balanced) < 1


def test_a_fast_processor_takes_all_layers_from_hidden_states() -> None:
    assert hidden_layers(MHA, replace(GPU, flops=1e15)) == MHA.layers


def test_hidden_states_on_the_device_need_no_link() -> None:
    slow = replace(GPU, flops=1e13)
    project = 4 * MHA.hidden * MHA.hidden / slow.flops
    kv = 2 * MHA.hidden * MHA.kv_bytes / slow.link_bytes_per_s
    balanced = MHA.layers * kv / (kv + project)
    assert abs(hidden_layers(MHA, slow, on_device=True) - balanced) < 1
    no_link = replace(GPU, flops=1e15, link_bytes_per_s=1.0)
    assert hidden_layers(LLAMA, no_link, on_device=True) == LLAMA.layers


@pytest.mark.parametrize("flops", [1e12, 1e15])
def test_heads_that_share_their_kv_leave_nothing_to_gain(flops: float) -> None:
    assert hidden_layers(LLAMA, replace(GPU, flops=flops)) == 0
