"""How many addresses SGLang is told of: enough for whatever memory can hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ellm_sgl.config import EllmConfig
from ellm_sgl.sglang import memory
from ellm_sgl.sglang.platform.torchvision_ops import declare

declare()
CONTEXT, RUNNING, DEVICE, BLOCK = 8192, 64, 50_000, 16


def addresses(monkeypatch: pytest.MonkeyPatch, host_tokens: int) -> int:
    settings = EllmConfig(host_kv_tokens=host_tokens)
    monkeypatch.setattr(memory, "_settings", lambda: settings)
    config: Any = SimpleNamespace(max_total_num_tokens=DEVICE, max_running_requests=RUNNING)
    configurator: Any = SimpleNamespace(
        device="cuda",
        model_config=SimpleNamespace(context_len=CONTEXT),
        server_args=SimpleNamespace(max_prefill_tokens=CONTEXT, max_running_requests=RUNNING),
    )
    memory.widen_logical_capacity(config, configurator)
    found: int = config.max_total_num_tokens
    return found


def test_a_host_tier_has_addresses_for_all_that_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who pause have their KV there, and keep their addresses."""
    assert addresses(monkeypatch, 0) == 4 * DEVICE + 2 * CONTEXT
    host = 1_000_000
    needed = DEVICE // BLOCK * BLOCK + host + CONTEXT + RUNNING * BLOCK
    assert needed <= addresses(monkeypatch, host) < needed + BLOCK
