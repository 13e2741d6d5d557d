"""The CPU platform is offered only where there is nothing else."""

from __future__ import annotations

import platform

import pytest
import torch

from ellm_sgl.sglang import platform_entry
from ellm_sgl.sglang.platform.torchvision_ops import declare

declare()


def test_offered_on_an_x86_host_without_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert platform_entry.activate() == platform_entry.PLATFORM


def test_out_of_the_way_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert platform_entry.activate() is None
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert platform_entry.activate() is None
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert platform_entry.activate() is None


def test_class_loads_and_is_out_of_tree() -> None:
    from sglang.srt.platforms import _load_platform_class

    instance = _load_platform_class(platform_entry.PLATFORM)()
    assert instance.is_out_of_tree()
    assert instance.device_type == "cpu"
    assert not instance.is_pin_memory_available()
