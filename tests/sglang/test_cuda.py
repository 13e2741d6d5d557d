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


def test_prompts_are_not_captured_and_a_chosen_backend_is_left_to_be_refused() -> None:
    args: Any = SimpleNamespace(attention_backend=None)
    cuda.adapt(args)
    assert (args.attention_backend, args.disable_prefill_cuda_graph) == ("ellm", True)
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
