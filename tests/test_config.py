"""Settings: what they refuse, and their way to worker processes."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from typing import Any

import pytest

from ellm_sgl.config import ENV, ConfigError, EllmConfig
from ellm_sgl.config.sizes import MemoryBudget


@pytest.fixture(autouse=True)
def _no_settings_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV, "")  # so that what a test sets is undone


@pytest.mark.parametrize(
    ("setting", "flag"),
    [
        ({"ratio": -0.1}, "--ellm-ratio -0.1"),
        ({"ratio": 1.0}, "--ellm-ratio 1.0"),
        ({"ratio": 1.5}, "--ellm-ratio 1.5"),
        ({"ratio": math.nan}, "--ellm-ratio nan"),
        ({"layer_group": 0}, "--ellm-layer-group 0"),
        ({"host_keeps": "all", "host_kv_tokens": 99}, "--ellm-host-keeps all"),
        ({"hidden_on": "disk"}, "--ellm-hidden-on disk"),
        ({"hidden_on": "device", "host_kv_tokens": 99}, "--ellm-hidden-on device"),
        (
            {
                "hidden_on": "device",
                "host_keeps": "hidden",
                "host_kv_tokens": 99,
                "host_path": "/tmp/tier",
            },
            "--ellm-host-path /tmp/tier",
        ),
        (
            {
                "hidden_on": "device",
                "host_keeps": "hidden",
                "host_kv_tokens": 99,
                "mode": "recompute",
                "policy": "recompute",
            },
            "--ellm-hidden-on device",
        ),
        ({"block_tokens": 0}, "--ellm-block-tokens 0"),
        ({"device_kv_tokens": 15}, "--ellm-device-kv-tokens 15"),
        ({"device_kv_tokens": -1}, "--ellm-device-kv-tokens -1"),
        ({"device_kv_tokens": 31, "block_tokens": 32}, "--ellm-device-kv-tokens 31"),
        ({"max_device_kv_tokens": 15}, "--ellm-max-device-kv-tokens 15"),
        ({"max_device_kv_tokens": 0}, "--ellm-max-device-kv-tokens 0"),
        ({"max_device_kv_tokens": -16}, "--ellm-max-device-kv-tokens -16"),
        ({"max_device_kv_tokens": 2**31}, "--ellm-max-device-kv-tokens 2147483648"),
        ({"max_device_kv_tokens": math.inf}, "--ellm-max-device-kv-tokens inf"),
        ({"max_device_kv_tokens": math.nan}, "--ellm-max-device-kv-tokens nan"),
        (
            {"device_kv_tokens": 64, "max_device_kv_tokens": 63},
            "--ellm-max-device-kv-tokens 63",
        ),
        (
            {"mode": "recompute", "policy": "recompute", "max_device_kv_tokens": 64},
            "--ellm-max-device-kv-tokens 64",
        ),
        ({"mode": "vllm"}, "--ellm-mode vllm"),
        ({"idle_release_s": 0}, "--ellm-idle-release-s 0"),
        ({"idle_release_s": math.nan}, "--ellm-idle-release-s nan"),
        ({"idle_keep_prefixes": False}, "--ellm-idle-keep-prefixes off"),
        (
            {"idle_release_s": 5, "mode": "recompute", "policy": "recompute"},
            "--ellm-idle-release-s 5",
        ),
        ({"memory_budget": "8GiB"}, "--ellm-memory-budget '8GiB'"),
        ({"min_device_kv_tokens": 64}, "--ellm-min-device-kv-tokens 64"),
        ({"memory_budget": "a:8G", "min_device_kv_tokens": -1}, "--ellm-min-device-kv-tokens -1"),
        (
            {"memory_budget": "a:8G", "min_device_kv_tokens": 65, "device_kv_tokens": 64},
            "--ellm-min-device-kv-tokens 65",
        ),
        (
            {"memory_budget": "a:8G", "mode": "recompute", "policy": "recompute"},
            "--ellm-memory-budget a:8G",
        ),
        ({"mode": "recompute", "policy": "fcfs"}, "--ellm-policy fcfs"),
        ({"mode": "swap", "policy": "swap", "host_kv_tokens": 0}, "--ellm-mode swap"),
        ({"mode": "hcache", "policy": "hcache", "host_kv_tokens": 64}, "--ellm-host-keeps kv"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_flag(setting: Any, flag: str) -> None:
    with pytest.raises(ConfigError, match=f"^{flag}(:| needs) ") as refusal:
        EllmConfig(**setting)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"ratio": 0.999, "layer_group": 1, "block_tokens": 1, "device_kv_tokens": 1},
        {"policy": "someone's own", "device_kv_tokens": None},
        {"device_kv_tokens": 64, "max_device_kv_tokens": 64},
        {"max_device_kv_tokens": 1000},
        {"mode": "swap", "policy": "swap", "host_kv_tokens": 64},
    ],
)
def test_settings_survive_the_way_through_the_environment(setting: Any) -> None:
    config = EllmConfig(**setting)
    config.to_env()
    assert EllmConfig.from_env() == config


def test_settings_reach_child_processes() -> None:
    config = EllmConfig(ratio=0.25, device_kv_tokens=4000)
    config.to_env()
    show = "from ellm_sgl.config import EllmConfig; print(EllmConfig.from_env())"
    child = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == str(config)


def test_ellm_is_off_where_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert EllmConfig.from_env() is None
    monkeypatch.delenv(ENV)
    assert EllmConfig.from_env() is None


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("512", 512), ("512B", 512), ("1.5KiB", 1536), ("8G", 8 << 30), ("8 GiB", 8 << 30),
     ("8GB", 8 * 10**9), ("2TiB", 2 << 40)],
)  # fmt: skip
def test_sizes_are_read_as_they_are_written(text: str, nbytes: int) -> None:
    budget = EllmConfig(memory_budget=f"a.b-c_1:{text}").budget
    assert budget == MemoryBudget("a.b-c_1", nbytes)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("8GiB", "'8GiB' is not NAME:SIZE, the name of letters"),
        ("../a:8GiB", "'../a:8GiB' is not NAME:SIZE"),
        (":8GiB", "is not NAME:SIZE"),
        ("a:-5", "'-5' is no size such as 512MiB"),
        ("a:nan", "'nan' is no size such as"),
        ("a:inf", "'inf' is no size such as"),
        ("a:1e99", "'1e99' is no size such as"),
        ("a:0.1", "'0.1' is no size from 1 byte up"),
        (f"a:{'9' * 400}", "is no size from 1 byte up"),
    ],
)
def test_budgets_that_make_no_sense_are_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=r"--ellm-memory-budget .*: give NAME:SIZE; ") as refusal:
        EllmConfig(memory_budget=text)
    assert reason in str(refusal.value) and len(str(refusal.value)) < 600


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "5",
        "[1]",
        "null",
        '{"no_such_setting": 1}',
        '{"ratio": "half"}',
        '{"block_tokens": {}}',
    ],
)
def test_an_environment_that_holds_something_else_is_refused(text: str) -> None:
    os.environ[ENV] = text
    with pytest.raises(ConfigError, match=f"{ENV} does not hold eLLM settings"):
        EllmConfig.from_env()


def test_bad_settings_in_the_environment_are_refused_by_flag() -> None:
    os.environ[ENV] = json.dumps({"layer_group": 0})
    with pytest.raises(ConfigError, match="--ellm-layer-group 0"):
        EllmConfig.from_env()
