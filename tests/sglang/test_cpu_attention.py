"""The CPU platform's attention backend agrees with `torch_native` on SGLang's own pools."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ellm_sgl.kernels.cpu.library import load
from ellm_sgl.sglang.platform.torchvision_ops import declare

declare()

from sglang.srt.layers.attention.torch_native_backend import (  # noqa: E402  after declare()
    TorchNativeAttnBackend,
)
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402

from ellm_sgl.sglang.platform import attention as cpu_attention  # noqa: E402
from ellm_sgl.sglang.platform import cpu as platform  # noqa: E402
from ellm_sgl.sglang.platform.attention import CpuAttention  # noqa: E402

pytestmark = pytest.mark.skipif(load().library is None, reason=load().problem or "built")

HEADS, KV_HEADS, SIZE, SLOTS = 6, 2, 32, 2048


class Step:
    """One attention call of SGLang's: requests of `(tokens before, new tokens)`."""

    def __init__(self, requests: tuple[tuple[int, int], ...], page: int, dtype: torch.dtype):
        generator = torch.Generator().manual_seed(1)
        table = ReqToTokenPool(len(requests) + 1, 1024, "cpu", enable_memory_saver=False)
        pages = torch.randperm(SLOTS // page - 1, generator=generator) + 1
        slots = (pages[:, None] * page + torch.arange(page)).flatten().tolist()
        places: list[int] = []
        for row, (before, new) in enumerate(requests, 1):
            taken = -(-(before + new) // page) * page
            own, slots = slots[:taken], slots[taken:]
            table.req_to_token[row, :taken] = torch.tensor(own, dtype=torch.int32)
            places += own[before : before + new]
        self.rows = len(places)
        self.dtype, self.page, self.table = dtype, page, table
        prefix_lens, new_lens = torch.tensor(requests, dtype=torch.int32).unbind(1)
        decoding = bool((new_lens == 1).all())
        self.batch: Any = SimpleNamespace(
            forward_mode=ForwardMode.DECODE if decoding else ForwardMode.EXTEND,
            req_pool_indices=torch.arange(1, len(requests) + 1),
            seq_lens=(prefix_lens + new_lens).long(),
            extend_prefix_lens=None if decoding else prefix_lens,
            extend_seq_lens=None if decoding else new_lens,
            out_cache_loc=torch.tensor(places),
            encoder_lens=None,
            spec_info=None,
        )

    def run(self, backend: type[TorchNativeAttnBackend], **layer: Any) -> tuple[torch.Tensor, ...]:
        """(output, K of the pool, V of the pool) of a backend; the same tensors for each."""
        generator = torch.Generator().manual_seed(2)
        pool = MHATokenToKVPool(
            SLOTS, self.page, self.dtype, KV_HEADS, SIZE, 1, "cpu", enable_memory_saver=False
        )
        keys, values = pool.get_kv_buffer(0)
        for buffer in (keys, values):
            buffer[:] = torch.randn(buffer.shape, generator=generator).to(self.dtype)

        def rows(heads: int) -> torch.Tensor:
            return torch.randn(self.rows, heads * SIZE, generator=generator).to(self.dtype)

        q, k, v = rows(HEADS), rows(KV_HEADS), rows(KV_HEADS)
        k, v = (x.view(-1, KV_HEADS, SIZE) for x in (k, v))
        runner: Any = SimpleNamespace(
            device="cpu",
            dtype=self.dtype,
            model_config=SimpleNamespace(num_attention_heads=HEADS),
            token_to_kv_pool=pool,
            req_to_token_pool=self.table,
            page_size=self.page,
        )
        with get_parallel().override(attn_tp_size=1):
            made = backend(runner)
        made.init_forward_metadata(self.batch)
        attention = RadixAttention(HEADS, SIZE, SIZE**-0.5, KV_HEADS, 0, **layer)
        decoding = self.batch.forward_mode.is_decode()
        forward = made.forward_decode if decoding else made.forward_extend
        return forward(q, k, v, attention, self.batch), keys, values


STEPS = {
    "decode": ((0, 1), (17, 1), (600, 1)),
    "prefill": ((0, 70), (0, 1), (0, 33)),
    "chunks and decoding": ((64, 50), (300, 1), (16, 16)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("requests", STEPS.values(), ids=STEPS.keys())
def test_agrees_with_torch_native(
    requests: tuple[tuple[int, int], ...],
    page: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = Step(requests, page, dtype)
    expected, *expected_pool = step.run(TorchNativeAttnBackend)
    monkeypatch.delattr(TorchNativeAttnBackend, "_run_sdpa_forward_decode")
    monkeypatch.delattr(TorchNativeAttnBackend, "_run_sdpa_forward_extend")
    out, *pool = step.run(CpuAttention)
    # fp32: sums in another order. bf16: both round the result, torch_native its weights as well.
    tolerance = 2e-6 if dtype == torch.float32 else 3 * torch.finfo(dtype).eps
    torch.testing.assert_close(out, expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(pool, expected_pool, rtol=0, atol=0)


@pytest.mark.parametrize(
    "layer",
    [
        {"sliding_window_size": 8},
        {"attn_type": AttentionType.ENCODER_ONLY},
        {"logit_cap": 30.0},
    ],
    ids=lambda layer: next(iter(layer)),
)
def test_the_rest_is_torch_natives(layer: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("not for the C++ kernels")

    step = Step(((20, 30),), 1, torch.float32)
    expected = step.run(TorchNativeAttnBackend, **layer)
    monkeypatch.setattr(cpu_attention, "mixed_attention", never)
    for ours, theirs in zip(step.run(CpuAttention, **layer), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_default_where_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from ellm_sgl.config import ENV
    from ellm_sgl.kernels.cpu.library import Loaded

    monkeypatch.delenv(ENV, raising=False)
    cpu_attention.register_backend()
    default = platform.EllmCpuPlatform().get_default_attention_backend
    assert default() == platform.CPU_BACKEND
    monkeypatch.setattr(platform, "load", lambda: Loaded(None, "not built"))
    assert default() == "torch_native"


@pytest.mark.parametrize("given", [None, "intel_amx"])
def test_what_sglang_puts_in_place_of_no_answer_is_replaced(given: str | None) -> None:
    args: Any = SimpleNamespace(
        attention_backend=given, mem_fraction_static=None, grammar_backend=None
    )
    ours = platform.EllmCpuPlatform()
    ours.apply_server_args_defaults(args)
    assert args.attention_backend == ours.get_default_attention_backend()


def test_an_explicit_backend_stays() -> None:
    args: Any = SimpleNamespace(
        attention_backend="torch_native", mem_fraction_static=None, grammar_backend=None
    )
    platform.EllmCpuPlatform().apply_server_args_defaults(args)
    assert args.attention_backend == "torch_native"
