"""A version of SGLang that eLLM does not know: stock serves, with those of our hooks that fit."""

from __future__ import annotations

import dataclasses
import json
import os
from types import SimpleNamespace
from typing import Any

import pytest

from ellm_sgl.config import ENV, EllmConfig
from ellm_sgl.sglang import plugin, server_args, unknown_version
from ellm_sgl.sglang.hooks import When, hooks_of
from ellm_sgl.sglang.platform.torchvision_ops import declare
from ellm_sgl.sglang.unknown_version import TOLD_BY

declare()

UNKNOWN = "0.9.1"
OF_STOCK = [
    hook.target for hook in hooks_of(UNKNOWN) if hook.when in (When.ANY_VERSION, When.PLATFORM)
]
BACKEND = "the attention backend"
OFF = "eLLM is off: SGLang serves as stock."


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Targets of hooks that are registered on a CPU host, and the backend."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from ellm_sgl.sglang.platform import attention

    found: list[str] = []
    monkeypatch.setattr(HookRegistry, "register", lambda target, *_: found.append(target))
    monkeypatch.setattr(attention, "register_backend", lambda: found.append(BACKEND))
    monkeypatch.setattr(plugin, "installed", lambda: UNKNOWN)
    monkeypatch.setattr(server_args, "installed", lambda: UNKNOWN)
    monkeypatch.setattr(plugin, "activate", lambda: "our platform")
    for name in (ENV, TOLD_BY):
        monkeypatch.setenv(name, "")  # so that it is put back as it was
        monkeypatch.delenv(name)
    return found


@pytest.fixture
def enabled(registered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV, json.dumps(dataclasses.asdict(EllmConfig(policy="fcfs"))))


@pytest.mark.usefixtures("enabled")
def test_where_all_fits_one_line_says_that_ellm_is_off(
    registered: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    plugin.register()
    (line,) = capsys.readouterr().err.splitlines()
    assert f"has not been tested with sglang {UNKNOWN}; install sglang 0.5.17" in line
    assert line.endswith(OFF) and "left out" not in line
    assert ENV not in os.environ
    assert registered == [*OF_STOCK, BACKEND]


def test_where_all_fits_and_nobody_asks_for_ellm_nothing_is_said(
    registered: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    plugin.register()
    assert capsys.readouterr().err == "" and TOLD_BY not in os.environ
    assert registered == [*OF_STOCK, BACKEND]


def of_another_kind(self: Any, x: Any, how: int) -> Any:
    return x


LAYERS = "sglang.srt.layers"
NORM = f"{LAYERS}.layernorm.RMSNorm.forward_native"
LOCATIONS = "sglang.srt.mem_cache.allocation.get_last_loc"
FLAGS = "sglang.srt.server_args.ServerArgs.from_cli_args"
DECODE = f"{LAYERS}.attention.torch_native_backend.TorchNativeAttnBackend.forward_decode"


@pytest.mark.parametrize(
    ("target", "now", "told", "left_out"),
    [
        (NORM, of_another_kind, "(self, x, how), recorded (self, x,", {NORM}),
        (LOCATIONS, None, "(absent), recorded (req_to_token,", {LOCATIONS, BACKEND}),
        (FLAGS, None, "(absent), recorded (args)", {FLAGS}),
        (NORM, 5, "(TypeError: 5 is not a callable object), recorded (self, x,", {NORM}),
        (DECODE, of_another_kind, "(self, x, how), recorded (self, q, k, v,", {BACKEND}),
    ],
    ids=["changed", "moved", "flags moved", "no function", "only used"],
)
@pytest.mark.parametrize("wanted", [False, True], ids=["stock", "enabled"])
def test_a_hook_that_does_not_fit_is_left_out(
    registered: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    now: Any,
    told: str,
    left_out: set[str],
    wanted: bool,
) -> None:
    if now is None:
        monkeypatch.delattr(target)
    else:
        monkeypatch.setattr(target, now)
    if wanted:
        monkeypatch.setenv(ENV, json.dumps(dataclasses.asdict(EllmConfig(policy="fcfs"))))
    plugin.register()
    (line,) = capsys.readouterr().err.splitlines()
    assert f"sglang {UNKNOWN}" in line and line.count("recorded") == 1
    assert f"left out: {target} is {told}" in line and line.endswith(OFF)
    assert registered == [one for one in (*OF_STOCK, BACKEND) if one not in left_out]
    assert ENV not in os.environ


def test_a_module_of_ours_that_cannot_be_imported_is_left_out(
    registered: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ellm_sgl.sglang.platform import linear

    monkeypatch.delattr(linear, "lm_head")
    plugin.register()
    (line,) = capsys.readouterr().err.splitlines()
    assert "left out: platform.linear:lm_head (AttributeError: " in line
    assert f"{LAYERS}.logits_processor.LogitsProcessor._compute_lm_head" not in registered
    assert BACKEND in registered


def test_what_is_left_out_is_said_once(
    registered: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a server's first process; flags and worker processes come later."""
    monkeypatch.setattr(NORM, of_another_kind)
    plugin.register()
    assert len(capsys.readouterr().err.splitlines()) == 1
    plugin.register()
    unknown_version.off_by_flags(UNKNOWN)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv(TOLD_BY, "1")
    plugin.register()
    assert capsys.readouterr().err == ""
    unknown_version.off_by_flags(UNKNOWN)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(OFF)


@pytest.mark.usefixtures("registered")
def test_flags_for_a_version_that_was_never_tested(capsys: pytest.CaptureFixture[str]) -> None:
    args = SimpleNamespace(model_path="model", ellm_policy="fcfs", ellm_device_kv_tokens=3072)
    assert server_args.read_flags(lambda cls, args: args.model_path, object, args) == "model"
    assert ENV not in os.environ
    (line,) = capsys.readouterr().err.splitlines()
    assert f"sglang {UNKNOWN}" in line and line.endswith(OFF)
