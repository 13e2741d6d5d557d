"""How many addresses SGLang is told of: enough for whatever memory can hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.runtime_context import get_parallel

from ellm_sgl.config import EllmConfig
from ellm_sgl.sglang import memory
from ellm_sgl.sglang.platform.torchvision_ops import declare

declare()
CONTEXT, RUNNING, DEVICE, BLOCK = 8192, 64, 50_000, 16
ARGUMENTS = SimpleNamespace(max_prefill_tokens=CONTEXT, max_running_requests=RUNNING, dp_size=1)
MODEL = SimpleNamespace(
    context_len=CONTEXT,
    hidden_size=8,
    head_dim=4,
    dtype=torch.bfloat16,
    get_num_kv_heads=lambda ranks: 4,
)


def addresses(monkeypatch: pytest.MonkeyPatch, host_tokens: int) -> int:
    settings = EllmConfig(host_kv_tokens=host_tokens)
    monkeypatch.setattr(memory, "_settings", lambda: settings)
    config: Any = SimpleNamespace(max_total_num_tokens=DEVICE, max_running_requests=RUNNING)
    configurator: Any = SimpleNamespace(
        device="cuda",
        model_config=MODEL,
        layer_info=SimpleNamespace(num_effective_layers=3),
        kv_cache_dtype=torch.bfloat16,
        server_args=ARGUMENTS,
    )
    with get_parallel().override(attn_tp_size=1, tp_size=1):
        memory.widen_logical_capacity(config, configurator)
    found: int = config.max_total_num_tokens
    return found


def test_a_host_tier_has_addresses_for_all_that_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who pause have their KV there, and keep their addresses."""
    assert addresses(monkeypatch, 0) == 4 * DEVICE + 2 * CONTEXT
    host = 1_000_000
    needed = DEVICE // BLOCK * BLOCK + host + CONTEXT + RUNNING * BLOCK
    assert needed <= addresses(monkeypatch, host) < needed + BLOCK


def test_a_host_tier_is_reckoned_with_as_large_as_what_it_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A hidden state is a fourth of a token's KV here, in the model's type."""
    settings = EllmConfig(host_kv_tokens=10 * BLOCK, host_keeps="hidden", layer_group=1)
    monkeypatch.setattr(memory, "_settings", lambda: settings)
    told: list[int] = []

    def tokens_within(_: EllmConfig, chosen: int, token: int, host: int, configurator: Any) -> int:
        told.extend((token, host))
        return chosen

    monkeypatch.setattr(memory, "tokens_within", tokens_within)
    configurator: Any = SimpleNamespace(
        device="cpu",
        model_config=MODEL,
        layer_info=SimpleNamespace(num_effective_layers=3),
        kv_cache_dtype=torch.bfloat16,
        server_args=ARGUMENTS,
    )
    config: Any = SimpleNamespace(max_total_num_tokens=DEVICE, max_running_requests=RUNNING)
    with get_parallel().override(attn_tp_size=1):
        memory.widen_logical_capacity(config, configurator)
    token, scratch = 3 * 2 * 16 * 2, 16 * 2 * 16 * 2 + 3 * 16 * 8 * 2
    assert told == [token, 10 * BLOCK * token // 4 + scratch]
