"""eLLM's attention as an SGLang backend."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.context import (
    is_in_breakable_cuda_graph,
)
from sglang.srt.runtime_context import get_parallel

from ellm_sgl.config import ConfigError
from ellm_sgl.kernels import torch_paged
from ellm_sgl.kernels.choose import choose, choose_graph_steps
from ellm_sgl.sglang import cuda
from ellm_sgl.sglang.context import context_of
from ellm_sgl.sglang.platform_entry import ATTENTION_BACKEND
from ellm_sgl.step import DeviceStreamer

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    from ellm_sgl.kernels.experimental.graph import GraphSteps
    from ellm_sgl.step import StepPlan
    from ellm_sgl.step.transfer import GraphFetch

logger = logging.getLogger(__name__)


def register_backend() -> None:
    """Stand in for SGLang's `torch_native`, the name under which it avoids Triton kernels; and
    go by a name of our own where it should not."""
    register_attention_backend(ATTENTION_BACKEND)(EllmAttention)
    register_attention_backend(cuda.ATTENTION_BACKEND)(EllmAttention)


def no_padding(original: Callable[..., int | None], *_: Any) -> None:
    """Around `padded_extend_real_tokens`, which takes rows that SGLang's batch does not have for
    padding: those come with data-parallel attention only, which is refused."""


class EllmAttention(AttentionBackend):
    """Attention of the step that the executor runs; all it needs is in the plan."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__()
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        ours = context_of(runner)
        self.executor, self._pool = ours.executor, ours.pool
        pool = self._pool.buffer
        shape = self._pool.shape
        # Looked up once: what each layer's attention is given in every step.
        self._layers = [
            (
                self._pool.keys(layer),
                self._pool.values(layer),
                shape.group_of(layer),
                layer % shape.layer_group == 0,
                shape.ends_group(layer),
            )
            for layer in range(shape.num_layers)
        ]
        self._model_config = runner.model_config
        heads = runner.model_config.num_attention_heads // get_parallel().attn_tp_size
        size = pool.shape[-1]
        chosen = choose(pool.device, size, runner.dtype, pool.dtype, (heads, pool.shape[-2]))
        self._kernel, self.prefetch = chosen.kernel, chosen.prefetch
        """`prefetch`: see `Chosen`."""
        self._graphs: GraphSteps | None = None
        self._fetch: GraphFetch | None = None
        logger.info("eLLM attention: %s", chosen.said)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Nothing to prepare: the plan was made before the forward pass."""

    # -- CUDA graphs of decode steps that recompute nothing -----------------------------------

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        if self._kernel is torch_paged.mixed_attention:
            raise ConfigError(
                "CUDA graphs: the attention of this model and --kv-cache-dtype is PyTorch's, which "
                "cannot be captured; leave out --kv-cache-dtype, or give --disable-cuda-graph"
            )
        pool, heads = self._pool, self._model_config.num_attention_heads
        heads //= get_parallel().attn_tp_size
        groups, streamer = pool.shape.num_groups, self.executor.streamer
        fetching = streamer if isinstance(streamer, DeviceStreamer) else None
        # What the device holds, again as much for prefixes that requests share, and what it lacks.
        units = 2 * pool.num_units + (fetching.host_units if fetching else 0)
        most_blocks = units // groups + max_bs
        self._graphs = choose_graph_steps(
            self._kernel, groups, max_bs, most_blocks, pool.keys(0), heads
        )
        if fetching:
            self._fetch = fetching.in_graphs(groups, most_blocks)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def may_replay(self, plan: StepPlan) -> bool:
        """Whether a captured graph does what `plan` says."""
        if self._graphs is None or plan.recomputed_rows or not self._graphs.fits(plan.groups):
            return False
        return not plan.transfers or (self._fetch is not None and self._fetch.fits(plan.transfers))

    def init_forward_metadata_out_graph(
        self, forward_batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        assert self._graphs is not None
        if in_capture:
            self._graphs.capture(forward_batch.batch_size)
        else:
            assert self.executor.plan is not None
            self._graphs.load(self.executor.plan.groups, forward_batch.batch_size)
            if self._fetch is not None:
                self._fetch.load(self.executor.plan.transfers)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        plan = self.executor.plan
        keys, values, group, begins_group, ends_group = self._layers[layer.layer_id]
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        k = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
        v = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
        if plan is None:
            if is_in_breakable_cuda_graph():
                # What lies around it is captured of a prompt; attention runs in each replay.
                return q.new_zeros(len(q), layer.tp_q_head_num * layer.v_head_dim)
            assert self._graphs is not None, "attention outside of a planned step"
            if self._fetch is not None and begins_group:
                self._fetch.wait(group)
            out = self._graphs.run(q, k, v, keys, values, group, begins_group, layer.scaling)
            if self._fetch is not None and ends_group:
                self._fetch.done(group)
            return out.view(len(out), -1)
        streamer = self.executor.streamer
        if streamer is not None and begins_group:
            streamer.wait(group)
        # What the next layer needs: in a group's last layer some rows have done their part.
        out_rows = plan.rows_in(group + ends_group)
        layout = plan.groups[group]
        if (separate := self.executor.separate) is not None:
            layout, (k, v) = separate.attend(layer.layer_id, layout, (k, v))
            out_rows = len(q)
        out = self._kernel(q, k, v, keys, values, layout, layer.scaling, out_rows, delta=plan.delta)
        if streamer is not None and ends_group:
            streamer.done(group)
        return out.view(out.shape[0], -1)

    forward_extend = forward_decode

    def support_triton(self) -> bool:
        return False
