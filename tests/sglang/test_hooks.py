"""SGLang's side of every hook is where we think it is; fails when SGLang moves it."""

from __future__ import annotations

import inspect
import pkgutil
from typing import Any

import pytest

from ellm_sgl.sglang.hooks import HOOKS, Hook, When, moved_hooks
from ellm_sgl.sglang.platform.torchvision_ops import declare
from ellm_sgl.sglang.platform_entry import activate

declare()

PARAMETERS = {
    # What our hooks take for granted of the functions they stand around.
    "add_cli_args": ["parser"],
    "support_triton": ["backend"],
    "get_last_loc": ["req_to_token", "req_pool_indices_tensor", "prefix_lens_tensor"],
    "_validate_one_request": ["self", "obj", "input_ids"],
    "from_cli_args": ["args"],
    "check_server_args": ["self"],
    "handle_generate_request": ["self", "recv_req"],
    "alloc_for_extend": ["batch"],
    "alloc_for_decode": ["batch", "token_per_req"],
    "check_decode_mem": ["self", "selected_indices"],
    "prepare_for_decode": ["self"],
    "add_one_req": ["self", "req"],
    "add_chunked_req": ["self", "req"],
    "_build_token_to_kv_pool": ["self", "sizes"],
    "_build_token_to_kv_pool_allocator": ["self", "sizes", "token_to_kv_pool"],
    "init_new": ["batch", "model_runner"],
    "can_run_graph": ["self", "forward_batch"],
    "enable_fused_set_kv_buffer": ["forward_batch"],
    "pause_generation": ["self", "recv_req"],
    "update_weights_from_disk": ["self", "recv_req"],
    "update_weights_from_tensor": ["self", "recv_req"],
    "update_weights_from_distributed": ["self", "recv_req"],
    "update_weights_from_ipc": ["self", "recv_req"],
    "check_weights": ["self", "recv_req"],
    "release_memory_occupation": ["self"],
    "resume_memory_occupation": ["self"],
    "flush_cache_after_weight_update": ["self", "recv_req"],
    "get_internal_state": ["self", "recv_req"],
    "set_internal_state": ["self", "recv_req"],
}


def test_none_has_moved() -> None:
    assert moved_hooks() == []


def test_a_version_that_was_never_tested_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ellm_sgl.config import EllmConfig
    from ellm_sgl.sglang import server_args

    monkeypatch.setattr(server_args, "version", lambda _: "0.9.1")
    monkeypatch.setattr(EllmConfig, "from_env", lambda: EllmConfig(policy="fcfs"))
    with pytest.raises(SystemExit):
        server_args.check_arguments(pytest.fail, object())
    assert "sglang 0.9.1; install sglang==0.5.17" in capsys.readouterr().err


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.target.rsplit(".", 2)[-1])
def test_hooks_exist_and_give_a_reason(hook: Hook) -> None:
    assert callable(hook.function)
    assert hook.kind in ("BEFORE", "AFTER", "AROUND")
    assert len(hook.reason) > 10


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.target.rsplit(".", 2)[-1])
def test_parameters_we_rely_on(hook: Hook) -> None:
    name = hook.target.rsplit(".", 1)[-1]
    function: Any = inspect.unwrap(pkgutil.resolve_name(hook.target))
    parameters = list(inspect.signature(function).parameters)
    for expected in PARAMETERS.get(name, []):
        assert expected in parameters, f"{hook.target} has no parameter {expected}: {parameters}"


def test_adder_has_the_budgets_we_charge() -> None:
    from sglang.srt.managers.schedule_policy import PrefillAdder

    source = inspect.getsource(PrefillAdder)
    for name in ("rem_total_token_offset", "cur_rem_token_offset", "can_run_list"):
        assert f"self.{name}" in source


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

    for name in ("_match_prefix_helper", "_delete_leaf", "match_prefix", "insert"):
        assert callable(getattr(RadixCache, name))


def test_models_have_the_modules_we_hook() -> None:
    """The decoder stack is `model.model`; each layer has a `post_attention_layernorm`."""
    from sglang.srt.models import llama, mixtral, qwen2, qwen3, qwen3_moe

    for module in (llama, mixtral, qwen2, qwen3, qwen3_moe):
        source = inspect.getsource(module)
        assert "self.post_attention_layernorm" in source
        assert "self.model(" in source or "self.model =" in source


def test_off_registers_only_what_stock_sglang_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    from ellm_sgl.config import ENV
    from ellm_sgl.sglang import plugin

    registered: list[str] = []
    monkeypatch.delenv(ENV, raising=False)
    monkeypatch.setattr(
        HookRegistry, "register", lambda target, *_, **__: registered.append(target)
    )
    plugin.register()
    off = (When.ALWAYS, When.PLATFORM) if activate() else (When.ALWAYS,)
    assert registered == [hook.target for hook in HOOKS if hook.when in off]
