"""The C++ kernels as a backend of stock SGLang: the CPU platform's default, with eLLM off."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.runtime_context import get_parallel

from ellm_sgl.kernels.cpu.attention import mixed_attention, supports
from ellm_sgl.kernels.cpu.library import load
from ellm_sgl.kernels.cpu.prefetch import DEFAULT, Prefetch
from ellm_sgl.kernels.cpu.tune import Shape, choose_prefetch, choose_weight_prefetch
from ellm_sgl.kernels.layout import GroupLayout, RequestLayout, RowRange
from ellm_sgl.sglang.platform.cpu import CPU_BACKEND

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)


def register_backend() -> None:
    """Make the backend known to SGLang, and its name an answer to `--attention-backend`."""
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices

    register_attention_backend(CPU_BACKEND)(CpuAttention)
    if CPU_BACKEND not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([CPU_BACKEND])


def no_triton(original: Callable[..., bool], backend: str) -> bool:
    """Hook around `support_triton`: SGLang would launch Triton kernels for a name it does not
    know."""
    return backend != CPU_BACKEND and original(backend)


def last_locations(original: Callable[..., torch.Tensor], *args: torch.Tensor) -> torch.Tensor:
    """Hook around `get_last_loc`, which has a list of names of its own."""
    from sglang.srt.mem_cache.allocation import get_last_loc_torch
    from sglang.srt.runtime_context import get_exec

    if get_exec().kernel.attention_backend == CPU_BACKEND:
        return get_last_loc_torch(*args)
    return original(*args)


class CpuAttention(TorchNativeAttnBackend):
    """Causal attention over SGLang's own pool in C++; whatever else there is, as `torch_native`.

    The C++ kernels take what they are written for: plain decoding and prefill, K and V heads of
    one size, fp32 or 16-bit KV. Sliding windows, cross attention, logit caps, encoders, layers
    that share another's KV, and steps of speculative decoding are left to the base class.
    """

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self._page = runner.page_size
        self._layout: GroupLayout | None = None
        if problem := load().problem:
            logger.warning("%s runs as torch_native (C++ kernels: %s)", CPU_BACKEND, problem)
        else:
            weights = choose_weight_prefetch(runner.dtype)
            logger.info("%s: prefetch of weights %s", CPU_BACKEND, weights)
        self._prefetch = self._best_prefetch(runner)

    def _best_prefetch(self, runner: ModelRunner) -> Prefetch:
        """Of the layers' heads; the default where the kernels have no part in them."""
        pool = self.token_to_kv_pool
        if type(pool) is not MHATokenToKVPool:
            return DEFAULT
        keys, _ = pool.get_kv_buffer(pool.start_layer)
        if keys.dim() != 3 or not supports(keys.shape[2], runner.dtype, keys.dtype):
            return DEFAULT
        _, kv_heads, size = keys.shape
        heads = runner.model_config.num_attention_heads // get_parallel().attn_tp_size
        chosen = choose_prefetch(Shape(heads, kv_heads, size, runner.dtype, keys.dtype))
        logger.info("%s: prefetch %s", CPU_BACKEND, chosen)
        return chosen

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        self._layout = self._layout_of(forward_batch)

    def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, *args: Any, **kw: Any) -> Any:
        out = self._attend(q, k, v, layer, *args, **kw)
        return super().forward_decode(q, k, v, layer, *args, **kw) if out is None else out

    def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, *args: Any, **kw: Any) -> Any:
        out = self._attend(q, k, v, layer, *args, **kw)
        return super().forward_extend(q, k, v, layer, *args, **kw) if out is None else out

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor | None:
        """The rows' attention; None where it is left to the base class."""
        if self._layout is None or k is None or v is None or not save_kv_cache:
            return None
        pool = self.token_to_kv_pool
        if type(pool) is not MHATokenToKVPool or not _is_plain(layer):
            return None
        keys, values = pool.get_kv_buffer(layer.layer_id)
        size = layer.qk_head_dim
        of_one_type = q.dtype is k.dtype is v.dtype
        if keys.dim() != 3 or not of_one_type or not supports(size, q.dtype, keys.dtype):
            return None
        out = mixed_attention(
            q.view(-1, layer.tp_q_head_num, size),
            k.view(-1, layer.tp_k_head_num, size),
            v.view(-1, layer.tp_v_head_num, size),
            keys.view(-1, self._page, *keys.shape[1:]),
            values.view(-1, self._page, *values.shape[1:]),
            self._layout,
            layer.scaling,
            prefetch=self._prefetch,
        )
        return out.view(out.shape[0], -1)

    def _layout_of(self, batch: ForwardBatch) -> GroupLayout | None:
        """SGLang's step in the kernels' words; None if it is none of theirs."""
        mode = batch.forward_mode
        if batch.spec_info is not None or batch.encoder_lens is not None:
            return None
        ends = batch.seq_lens.tolist()
        if mode.is_decode():
            counts = [1] * len(ends)
        elif mode.is_extend() and batch.extend_seq_lens is not None:
            counts = batch.extend_seq_lens.tolist()
        else:
            return None
        table = self.req_to_token_pool.req_to_token.numpy()
        blocks: list[np.ndarray[Any, Any]] = []
        requests, row, block = [], 0, 0
        for index, end, count in zip(batch.req_pool_indices.tolist(), ends, counts, strict=True):
            blocks.append(table[index, : end : self._page])
            here = slice(block, block + len(blocks[-1]))
            requests.append(RequestLayout(RowRange(row, end - count, count), (), here, False))
            row, block = row + count, here.stop
        places = batch.out_cache_loc
        if not requests or len(places) != row:
            return None
        return GroupLayout.of(
            rows=row,
            requests=tuple(requests),
            units=torch.from_numpy(np.concatenate(blocks).astype(np.int64) // self._page),
            write_rows=slice(0, row),
            write_units=places // self._page,
            write_offsets=places % self._page,
        )


def _is_plain(layer: RadixAttention) -> bool:
    return (
        layer.qk_head_dim == layer.v_head_dim
        and layer.sliding_window_size == -1
        and not layer.is_cross_attention
        and layer.attn_type is AttentionType.DECODER
        and not layer.logit_cap
        and layer.xai_temperature_len <= 0
    )
