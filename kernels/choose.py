"""Which kernels run: the fastest ones that this machine and these tensors allow."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from ellm_sgl.kernels import torch_paged
from ellm_sgl.kernels.cpu import attention as cpu
from ellm_sgl.kernels.cpu.library import load
from ellm_sgl.kernels.cpu.prefetch import Prefetch
from ellm_sgl.kernels.cpu.tune import Shape, choose_prefetch, choose_weight_prefetch
from ellm_sgl.kernels.layout import MixedAttention

if TYPE_CHECKING:
    from ellm_sgl.kernels.experimental.graph import GraphSteps


CopyUnits = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(target, target units, source, source units): see `torch_paged.copy_units`."""


def choose_copy() -> CopyUnits:
    """What copies units between buffers in host memory."""
    return torch_paged.copy_units if load().problem else cpu.copy_units


class Chosen(NamedTuple):
    """What attends."""

    kernel: MixedAttention
    said: str
    """For the user, about the choice."""
    prefetch: Prefetch | None = None
    """How the C++ kernels ask for KV, where that was measured."""


def choose(
    device: torch.device,
    head_dim: int,
    row_type: torch.dtype,
    pool_type: torch.dtype,
    heads: tuple[int, int] | None = None,
) -> Chosen:
    """The kernel.

    Args:
        device: where rows and pool are.
        head_dim: size of a head, the same for K and V.
        row_type: of q, k and v.
        pool_type: of the pool.
        heads: query heads and KV heads, to measure which prefetch is best on this CPU for decode
            rows and for weights (some tenths of a second); None: the default.
    """
    if device.type != "cpu":
        return _choose_on_device(device, head_dim, row_type, pool_type)
    if (problem := load().problem) or not cpu.supports(head_dim, row_type, pool_type):
        problem = problem or f"none for heads of {head_dim} in {row_type} on {pool_type}"
        return Chosen(torch_paged.mixed_attention, f"PyTorch's kernels (C++ kernels: {problem})")
    name = cpu.instruction_set_for(head_dim)[1]
    if heads is None:
        return Chosen(cpu.mixed_attention, f"C++ kernels ({name})")
    prefetch = choose_prefetch(Shape(*heads, head_dim, row_type, pool_type))
    kernel = functools.partial(cpu.mixed_attention, prefetch=prefetch)
    weights = choose_weight_prefetch(row_type)
    said = f"C++ kernels ({name}, prefetch {prefetch}, of weights {weights})"
    return Chosen(kernel, said, prefetch)


def _choose_on_device(
    device: torch.device, head_dim: int, row_type: torch.dtype, pool_type: torch.dtype
) -> Chosen:
    # Not above: a CPU host may have neither library.
    from ellm_sgl.kernels.experimental.cuda import DividedAttention
    from ellm_sgl.kernels.experimental.flashinfer import attention as flashinfer
    from ellm_sgl.kernels.experimental.triton import attention as triton

    shape = head_dim, row_type, pool_type
    what = f"heads of {head_dim} in {row_type} on {pool_type}"
    if device.type != "cuda" or not triton.supports(*shape):
        said = f"PyTorch's kernels (no Triton kernel for {what})"
        return Chosen(torch_paged.mixed_attention, said)
    fused = triton.FusedAttention(device)
    name = f"fused Triton kernel ({fused.programs} programs)"
    if not flashinfer.supports(*shape):
        return Chosen(fused, f"{name}; FlashInfer has none for {what}")
    divided = DividedAttention(flashinfer.FlashInferAttention(device), fused)
    return Chosen(divided, f"FlashInfer; where rows are recomputed, {name}")


def choose_graph_steps(
    kernel: MixedAttention,
    layer_groups: int,
    most_rows: int,
    most_blocks: int,
    pool: torch.Tensor,
    heads: int,
) -> GraphSteps:
    """Decode steps for CUDA graphs, by what `kernel`, chosen on a device, takes for such steps.

    Args:
        kernel: see `choose`.
        layer_groups, most_rows, most_blocks, pool: see `GraphSteps`.
        heads: query heads.
    """
    from ellm_sgl.kernels.experimental.cuda import DividedAttention
    from ellm_sgl.kernels.experimental.flashinfer.graph import FlashInferGraphSteps
    from ellm_sgl.kernels.experimental.triton.attention import FusedAttention
    from ellm_sgl.kernels.experimental.triton.graph import FusedGraphSteps

    sizes = layer_groups, most_rows, most_blocks, pool, heads
    if isinstance(kernel, DividedAttention):
        return FlashInferGraphSteps(kernel.ragged, *sizes)
    return FusedGraphSteps(FusedAttention(pool.device), *sizes)
