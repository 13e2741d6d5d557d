"""What is different on a CUDA device. Experimental (docs/gpu.md): it has to be asked for."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ellm_sgl.config import EllmConfig
from ellm_sgl.kernels.experimental.flashinfer import attention as flashinfer

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

EXPERIMENTAL = "ELLM_SGL_EXPERIMENTAL_CUDA"
"""Environment: 1 lets eLLM run on a CUDA device."""

ATTENTION_BACKEND = "ellm"
"""Not `torch_native` as on the CPU: for that name SGLang leaves out its Triton kernels and its
CUDA graphs."""


def available() -> bool:
    """Whether this host has a CUDA device."""
    return torch.cuda.is_available()


def problem(config: EllmConfig) -> str | None:
    """Why eLLM does not run on this host's CUDA device, in words that follow a flag's name."""
    if os.environ.get(EXPERIMENTAL) != "1":
        return (
            "eLLM is experimental on CUDA devices (docs/gpu.md); to try it set "
            f"{EXPERIMENTAL}=1, and check the outputs with `ellm-sgl verify`"
        )
    if config.host_path is not None:
        return (
            "--ellm-host-path: a device cannot fetch from a mapped file; leave it out, and the "
            "host tier is in memory"
        )
    if config.kv_store is not None:
        return "--ellm-kv-store: on CPU hosts only so far; leave it out"
    return flashinfer.problem()


def adapt(args: ServerArgs) -> None:
    """Before SGLang resolves its arguments: our attention, and no fused all-reduce.

    That one leaves out the calls of the norms at which rows join and leave; SGLang switches it on
    for Qwen3-MoE on several GPUs.
    """
    if args.attention_backend is None:
        args.attention_backend = ATTENTION_BACKEND
    args.enforce_disable_flashinfer_allreduce_fusion = True


def keep_writes(original: Callable[..., bool], *_: Any, **__: Any) -> bool:
    """Around `enable_fused_set_kv_buffer`: never. Written by slot, KV would land anywhere."""
    return False


def may_replay(original: Callable[..., bool], graph_runner: Any, forward_batch: Any) -> bool:
    """Around `can_run_graph` of decode steps: one that recomputes something runs layer by layer."""
    backend = graph_runner.attn_backend
    plan = backend.executor.plan
    if plan is not None and not backend.may_replay(plan):
        return False
    return original(graph_runner, forward_batch)


def may_replay_prompt(original: Callable[..., bool], graph_runner: Any, forward_batch: Any) -> bool:
    """Around `can_run_graph` of prompts: a chunk beside which something is recomputed runs layer by
    layer, since captured norms let no rows join or leave. Attention is not captured."""
    executor = graph_runner.model_runner.attn_backend.executor
    plan = executor.plan
    if plan is not None and (plan.recomputed_rows or executor.separate is not None):
        return False
    return original(graph_runner, forward_batch)


def captured(runner: ModelRunner, batch: ForwardBatch) -> Any | None:
    """SGLang's runner of the graph that this step replays when it is served; None where it runs
    layer by layer. The executor has its plan."""
    from sglang.srt.model_executor.runner.base_cuda_graph_runner import BaseCudaGraphRunner

    decodes = batch.forward_mode.is_decode()
    graphs = runner.decode_cuda_graph_runner if decodes else runner.prefill_cuda_graph_runner
    if not isinstance(graphs, BaseCudaGraphRunner) or not graphs.can_run_graph(batch):
        return None
    return graphs
