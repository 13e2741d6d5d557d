"""eLLM's attention as an SGLang backend."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from ellm_sgl.kernels.choose import choose
from ellm_sgl.sglang import runtime
from ellm_sgl.sglang.platform import ATTENTION_BACKEND

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)


def register_backend() -> None:
    """Stand in for SGLang's `torch_native`, the name under which it avoids Triton kernels."""
    register_attention_backend(ATTENTION_BACKEND)(EllmAttention)


class EllmAttention(AttentionBackend):
    """Attention of the step that `Runtime.plan` describes; all it needs is in the plan."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__()
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self._runtime = runtime.current()
        pool = self._runtime.pool.buffer
        self._kernel, chosen = choose(pool.device, pool.shape[-1], runner.dtype, pool.dtype)
        logger.info("eLLM attention: %s", chosen)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Nothing to prepare: the plan was made before the forward pass."""

    def forward_decode(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._attend(*args, **kwargs)

    def forward_extend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._attend(*args, **kwargs)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        plan, pool = self._runtime.plan, self._runtime.pool
        assert plan is not None, "attention outside of a planned step"
        shape, index = pool.shape, layer.layer_id
        group = shape.group_of(index)
        streamer = self._runtime.streamer
        if streamer is not None and index % shape.layer_group == 0:
            streamer.wait(group)
        out = self._kernel(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
            v.view(-1, layer.tp_v_head_num, layer.v_head_dim),
            pool.keys(index),
            pool.values(index),
            plan.groups[group],
            layer.scaling,
            # What the next layer needs: in a group's last layer some rows have done their part.
            out_rows=plan.rows_in(group + 1 if shape.ends_group(index) else group),
        )
        if streamer is not None and shape.ends_group(index):
            streamer.done(group)
        return out.view(len(out), -1)

    def support_triton(self) -> bool:
        return False
