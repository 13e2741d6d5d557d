"""SGLang's side of every hook is where we think it is; fails when SGLang moves it."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ellm_sgl.config import ENV, EllmConfig
from ellm_sgl.sglang import hooks, server_args
from ellm_sgl.sglang.hooks import Hook, When, hooks_of
from ellm_sgl.sglang.hooks_page import page
from ellm_sgl.sglang.platform.torchvision_ops import declare
from ellm_sgl.sglang.platform_entry import activate
from ellm_sgl.sglang.versions import VERSIONS, adapter, adapter_of, installed
from ellm_sgl.sglang.versions.signatures import ABSENT, differences, signature_of, targets_of

declare()

HOOKS = hooks_of(installed())


def test_every_function_is_as_recorded() -> None:
    assert differences() == []


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_has_a_record_of_all_that_is_hooked_or_used(version: str) -> None:
    recorded = adapter_of(version).signatures
    assert list(recorded) == targets_of(version)
    assert ABSENT not in recorded.values()
    assert set(adapter_of(version).moved) <= {*(hook.target for hook in hooks.HOOKS), *hooks.USED}


def test_hooks_that_came_later_are_of_versions_that_are_known() -> None:
    assert {hook.since for hook in hooks.HOOKS} | hooks.USED_SINCE.keys() <= set(VERSIONS)
    assert {hook.until for hook in hooks.HOOKS} <= set(VERSIONS)
    old, new = (
        {hook.ours for hook in hooks_of(version)} for version in (VERSIONS[0], VERSIONS[-1])
    )
    assert new - old == {"attention:no_padding"}
    assert old - new == {
        "scheduler:count_waiting_chunk", "decode_memory:place_decoded", "requests:name_no_token"
    }  # fmt: skip


def test_the_page_is_what_the_table_says() -> None:
    path = Path(__file__).parents[2] / "docs" / "sglang-hooks.md"
    assert path.read_text() == page(), "python -m ellm_sgl.sglang.hooks_page > the page"


def of_all_kinds(a, /, b, c=1, *rest, d, e=2, **more):
    pass


def test_what_is_recorded_of_parameters() -> None:
    assert signature_of(f"{__name__}:of_all_kinds") == "(a, /, b, c=, *rest, d, e=, **more)"
    assert signature_of(f"{__name__}:no_such") == ABSENT


class OfAllKinds:
    def method(self, a, b=None):
        pass

    @classmethod
    def of_the_class(cls, a, *, b=None):
        pass

    @staticmethod
    def of_nobody(a, *b):
        pass


def test_hooks_are_seen_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers look when plugins are loaded, and other plugins may have hooks there too."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    names = "method", "of_the_class", "of_nobody"
    targets = [f"{__name__}.OfAllKinds.{name}" for name in names]
    before = [signature_of(target) for target in targets]
    assert before == ["(self, a, b=)", "(a, *, b=)", "(a, *b)"]
    plain = [inspect.getattr_static(OfAllKinds, name) for name in names]
    for target in targets:
        for kind in (HookType.AROUND, HookType.AFTER):
            HookRegistry.register(target, lambda original, *args, **kwargs: None, kind)
    HookRegistry.apply_hooks()
    assert [signature_of(target) for target in targets] == before
    assert all(
        inspect.getattr_static(OfAllKinds, n) is not p for n, p in zip(names, plain, strict=True)
    )


@pytest.fixture
def enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV, json.dumps(dataclasses.asdict(EllmConfig(policy="fcfs"))))


def test_a_function_that_is_not_as_recorded_turns_ellm_off(
    enabled: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def retract_decode(self, how_many=1):
        pass

    monkeypatch.setattr(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.retract_decode", retract_decode
    )
    seen: list[object] = []
    server_args.check_arguments(seen.append, args := object())
    assert seen == [args] and ENV not in os.environ
    assert "retract_decode is (self, how_many=), recorded (self" in capsys.readouterr().err


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.target.rsplit(".", 2)[-1])
def test_hooks_exist_and_give_a_reason(hook: Hook) -> None:
    assert callable(hook.function)
    assert hook.kind in ("BEFORE", "AFTER", "AROUND")
    assert len(hook.reason) > 10


def test_adder_has_the_budgets_we_charge(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is free or can be is theirs, and less by what they are charged."""
    from sglang.srt.managers import schedule_policy
    from sglang.srt.managers.schedule_policy import PrefillAdder
    from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator

    allocator: Any = SimpleNamespace(available_size=lambda: 1000, page_size=16)
    tree: Any = SimpleNamespace(
        evictable_size=lambda: 500,
        supports_mamba=lambda: False,
        is_tree_cache=lambda: True,
        is_chunk_cache=lambda: False,
    )
    make: Any = getattr(BaseTokenToKVPoolAllocator, "create_prefill_budget", None)
    allocator.create_prefill_budget = partial(make, allocator) if make else None
    nobody: Any = SimpleNamespace(reqs=[])
    # 0.5.17 asks a server's arguments, and there is no server.
    for name in ("is_dsa_prefill_cp_in_seq_split", "is_prefill_context_parallel_enabled"):
        monkeypatch.setattr(schedule_policy, name, lambda: False, raising=False)
    adder = PrefillAdder(16, tree, allocator, nobody, 0.5, 4096, None)
    assert "self.can_run_list" in inspect.getsource(PrefillAdder)
    assert (adder.rem_total_tokens, adder.cur_rem_tokens) == (1500, 1500)
    before = adapter().charged(adder)
    adapter().charge(adder, 300, 20)
    assert (adder.rem_total_tokens, adder.cur_rem_tokens) == (1200, 1480)
    assert adapter().charged(adder) == before + 300


def test_requests_of_our_own_come_where_sglangs_do_and_need_no_answer() -> None:
    """See `sizing.py`."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.ipc_channels import SchedulerIpcChannels
    from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import (
        NewTokenRatioTracker,
    )
    from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver

    assert "zmq.PULL" in inspect.getsource(SchedulerIpcChannels.create)
    assert "sock_recv(self.recv_from_tokenizer" in inspect.getsource(SchedulerRequestReceiver)
    assert "if output is not None:" in inspect.getsource(Scheduler.process_input_requests)
    assert "self.ipc_channels.recv_from_tokenizer" in inspect.getsource(Scheduler.init_idle_sleeper)
    assert "current" in NewTokenRatioTracker.__annotations__


def test_a_pause_sends_requests_back_to_the_queue_and_can_be_seen() -> None:
    """See `occupation.py`."""
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput
    from sglang.srt.managers.scheduler import Scheduler

    assert "self._engine_paused = True" in inspect.getsource(Scheduler.pause_generation)
    assert "self._engine_paused = False" in inspect.getsource(Scheduler.continue_generation)
    assert PauseGenerationReqInput(mode="retract").mode == "retract"
    assert not ContinueGenerationReqInput(torch_empty_cache=False).torch_empty_cache


def test_radix_cache_has_the_internals_we_use() -> None:
    from sglang.srt.mem_cache.radix_cache import RadixCache

    for name in ("_match_prefix_helper", "_delete_leaf", "_split_node", "match_prefix", "insert"):
        assert callable(getattr(RadixCache, name))
    # `drop_idle` goes through them as it does.
    evict = inspect.getsource(RadixCache.evict)
    assert "self.evictable_leaves" in evict and "self.eviction_strategy.get_priority(" in evict


def test_models_have_the_modules_we_hook() -> None:
    """The decoder stack is `model.model`; each layer has a `post_attention_layernorm`."""
    from sglang.srt.models import llama, mixtral, qwen2, qwen3, qwen3_moe

    for module in (llama, mixtral, qwen2, qwen3, qwen3_moe):
        source = inspect.getsource(module)
        assert "self.post_attention_layernorm" in source
        assert "self.model(" in source or "self.model =" in source


def test_off_registers_only_what_stock_sglang_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    from ellm_sgl.sglang import plugin

    registered: list[str] = []
    monkeypatch.delenv(ENV, raising=False)
    monkeypatch.setattr(
        HookRegistry, "register", lambda target, *_, **__: registered.append(target)
    )
    plugin.register()
    of_target = {hook.target: hook.ours for hook in HOOKS}
    ours = [of_target[target] for target in registered]
    assert [name for name in ours if not name.startswith("platform.")] == [
        "server_args:add_flags",
        "server_args:read_flags",
        "server_args:check_arguments",
        "server_args:check_adapted",
        "http:serve_routes",
        "http:open_page",
        "requests:check_form",
        "requests:check_request",
        "occupation_asked:release",
        "occupation_asked:resume",
        "occupation_asked:pause",
        "occupation_asked:go_on",
        "watchdog:watch_replicas",
    ]
    assert (len(ours) > 13) == bool(activate())


def test_off_is_off_whatever_the_process_that_started_this_one_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ENV, '{"policy": "fcfs"}')
    given = SimpleNamespace(ellm_policy="off")
    assert server_args.read_flags(lambda _, args: args, object, given) is given
    assert EllmConfig.from_env() is None


def test_hooks_of_different_times_stand_in_different_places() -> None:
    """SGLang applies all hooks on a function at once, so later ones would be left out."""
    places = [{hook.target for hook in HOOKS if hook.when is when} for when in When]
    assert sum(map(len, places)) == len(set().union(*places))
