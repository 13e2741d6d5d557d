"""CUDA hosts: refused unless asked for, and then only what a graph can replay is replayed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ellm_sgl.config import ConfigError, EllmConfig
from ellm_sgl.kernels.torch_paged import mixed_attention
from ellm_sgl.sglang import cuda
from ellm_sgl.sglang.platform.torchvision_ops import declare
from ellm_sgl.step import DeviceStreamer

declare()
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402 (after `declare`)
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.context import (  # noqa: E402 (same)
    enable_breakable_cuda_graph,
)

from ellm_sgl.sglang import attention  # noqa: E402 (imports SGLang)


def test_a_device_has_to_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cuda.EXPERIMENTAL, raising=False)
    assert cuda.EXPERIMENTAL in str(cuda.problem(EllmConfig()))


def test_flashinfer_has_to_be_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(cuda.EXPERIMENTAL, "1")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert "pip install 'ellm-sgl[cuda]'" in str(cuda.problem(EllmConfig()))
    (tmp_path / "flashinfer.py").touch()
    assert cuda.problem(EllmConfig()) is None


def test_a_device_cannot_fetch_from_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cuda.EXPERIMENTAL, "1")
    config = EllmConfig(host_kv_tokens=64, host_path="/tmp/units")
    assert "--ellm-host-path" in str(cuda.problem(config))


def test_a_chosen_backend_is_left_to_be_refused() -> None:
    args: Any = SimpleNamespace(attention_backend=None)
    cuda.adapt(args)
    assert args.attention_backend == "ellm"
    assert args.enforce_disable_flashinfer_allreduce_fusion
    args.attention_backend = "fa3"
    cuda.adapt(args)
    assert args.attention_backend == "fa3"


def starting(kernel: Any, streamer: Any = None) -> Any:
    """As much of an `EllmAttention` as is asked before graphs are captured."""
    shape = SimpleNamespace(num_groups=4)
    pool = SimpleNamespace(shape=shape, num_units=40, keys=lambda layer: None)
    return SimpleNamespace(
        _kernel=kernel,
        _pool=pool,
        _model_config=SimpleNamespace(num_attention_heads=8),
        executor=SimpleNamespace(streamer=streamer),
    )


def test_steps_that_miss_what_the_host_has_are_replayed_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However much the host holds: requests may be longer than the device."""

    class Streamer(DeviceStreamer):
        def __init__(self) -> None:
            self._host = torch.zeros(101, 1)

        def in_graphs(self, groups: int, most_units: int) -> Any:
            return groups, most_units

    monkeypatch.setattr(attention, "get_parallel", lambda: SimpleNamespace(attn_tp_size=1))
    monkeypatch.setattr(attention, "choose_graph_steps", lambda kernel, *sizes: sizes)
    for streamer, most in ((None, 20 + 8), (Streamer(), 20 + 25 + 8)):
        begun = starting(object(), streamer)
        attention.EllmAttention.init_cuda_graph_state(begun, 8, 8)
        assert begun._graphs[:3] == (4, 8, most)
    assert begun._fetch == (4, most)


def test_what_pytorch_attends_to_is_not_captured() -> None:
    with pytest.raises(ConfigError, match="--disable-cuda-graph"):
        attention.EllmAttention.init_cuda_graph_state(starting(mixed_attention), 8, 8)


def test_models_never_write_kv_themselves() -> None:
    assert cuda.keep_writes(lambda batch: True, "a batch") is False


@pytest.mark.parametrize(("ours", "theirs"), [(True, True), (True, False), (False, True)])
def test_a_graph_is_replayed_only_if_both_sides_say_so(ours: bool, theirs: bool) -> None:
    executor = SimpleNamespace(plan="a plan")
    backend = SimpleNamespace(executor=executor, may_replay=lambda plan: ours)
    runner = SimpleNamespace(attn_backend=backend)
    assert cuda.may_replay(lambda runner, batch: theirs, runner, "a batch") is (ours and theirs)


def test_attention_is_not_captured_with_a_prompt() -> None:
    """It runs between the pieces, in each replay; while they are captured nothing is planned."""
    ours = SimpleNamespace(executor=SimpleNamespace(plan=None), _layers=[[None] * 5], _graphs=None)
    layer = SimpleNamespace(
        layer_id=0, tp_q_head_num=4, tp_k_head_num=2, tp_v_head_num=2, qk_head_dim=8, v_head_dim=8
    )
    q, kv = torch.ones(3, 32), torch.ones(3, 16)
    prompt: Any = SimpleNamespace(forward_mode=ForwardMode.EXTEND)
    attend: Any = attention.EllmAttention.forward_decode
    with enable_breakable_cuda_graph():
        assert torch.equal(attend(ours, q, kv, kv, layer, prompt), torch.zeros(3, 32))
    with pytest.raises(AssertionError, match="outside of a planned step"):
        attend(ours, q, kv, kv, layer, prompt)


@pytest.mark.parametrize("theirs", [True, False])
@pytest.mark.parametrize(
    ("recomputed", "separate", "ours"), [(0, None, True), (3, None, False), (0, "rows", False)]
)
def test_a_prompt_is_replayed_only_if_nothing_is_recomputed(
    recomputed: int, separate: Any, ours: bool, theirs: bool
) -> None:
    plan = SimpleNamespace(recomputed_rows=recomputed)
    executor = SimpleNamespace(plan=plan, separate=separate)
    model_runner = SimpleNamespace(attn_backend=SimpleNamespace(executor=executor))
    runner = SimpleNamespace(model_runner=model_runner)
    found = cuda.may_replay_prompt(lambda runner, batch: theirs, runner, "a batch")
    assert found is (ours and theirs)


def test_a_step_that_is_measured_replays_what_it_would_when_served() -> None:
    from sglang.srt.model_executor.runner.base_cuda_graph_runner import BaseCudaGraphRunner

    class Graphs(BaseCudaGraphRunner):
        def __init__(self, can: bool) -> None:
            self.can = can

        def can_run_graph(self, forward_batch: Any) -> bool:
            return self.can

        def execute(self, *_: Any, **__: Any) -> Any: ...
        def load_batch(self, *_: Any, **__: Any) -> Any: ...
        def capture(self) -> None: ...
        def capture_prepare(self, *_: Any, **__: Any) -> Any: ...
        def capture_one_shape(self, *_: Any, **__: Any) -> None: ...

    decode, prompt = Graphs(True), Graphs(False)
    runner: Any = SimpleNamespace(decode_cuda_graph_runner=decode, prefill_cuda_graph_runner=prompt)
    steps: Any = {mode: SimpleNamespace(forward_mode=mode) for mode in ForwardMode}
    assert cuda.captured(runner, steps[ForwardMode.DECODE]) is decode
    assert cuda.captured(runner, steps[ForwardMode.EXTEND]) is None
    prompt.can = True
    assert cuda.captured(runner, steps[ForwardMode.EXTEND]) is prompt
    runner.decode_cuda_graph_runner = None
    assert cuda.captured(runner, steps[ForwardMode.DECODE]) is None
