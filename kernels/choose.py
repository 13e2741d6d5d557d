"""Which kernels run: the fastest ones that this machine and these tensors allow."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

import torch

from ellm_sgl.kernels import torch_paged
from ellm_sgl.kernels.cpu import attention as cpu
from ellm_sgl.kernels.cpu.library import load
from ellm_sgl.kernels.layout import GroupLayout

CUDA_VARIABLE = "ELLM_SGL_CUDA_ATTENTION"
"""Environment: "flashinfer" takes FlashInfer's kernels on CUDA. For tests and comparisons."""


class MixedAttention(Protocol):
    """An attention kernel; `reference.mixed_attention` defines what it does.

    `delta` is the share of the processor, 0..1, that begins with recomputation (K1). It shows in
    the time alone; a kernel that does one thing after the other has no use for it.
    """

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        layout: GroupLayout,
        scale: float,
        out_rows: int | None = None,
        delta: float = 0.5,
    ) -> torch.Tensor: ...


CopyUnits = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(target, target units, source, source units): see `torch_paged.copy_units`."""


def choose_copy() -> CopyUnits:
    """What copies units between buffers in host memory."""
    return torch_paged.copy_units if load().problem else cpu.copy_units


def choose(
    device: torch.device, head_dim: int, row_type: torch.dtype, pool_type: torch.dtype
) -> tuple[MixedAttention, str]:
    """The kernel, and what to tell the user about the choice.

    Args:
        device: where rows and pool are.
        head_dim: size of a head, the same for K and V.
        row_type: of q, k and v.
        pool_type: of the pool.
    """
    if device.type != "cpu":
        return _choose_on_device(device, head_dim, row_type, pool_type)
    if (problem := load().problem) or not cpu.supports(head_dim, row_type, pool_type):
        problem = problem or f"none for heads of {head_dim} in {row_type} on {pool_type}"
        return torch_paged.mixed_attention, f"PyTorch's kernels (C++ kernels: {problem})"
    return cpu.mixed_attention, f"C++ kernels ({cpu.instruction_set_for(head_dim)[1]})"


def _choose_on_device(
    device: torch.device, head_dim: int, row_type: torch.dtype, pool_type: torch.dtype
) -> tuple[MixedAttention, str]:
    # Not above: a CPU host may have neither library.
    from ellm_sgl.kernels.experimental import flashinfer
    from ellm_sgl.kernels.experimental.triton import attention as fused

    shape = f"heads of {head_dim} in {row_type} on {pool_type}"
    if os.environ.get(CUDA_VARIABLE) == "flashinfer":
        if not flashinfer.supports(head_dim, row_type, pool_type):
            raise ValueError(f"{CUDA_VARIABLE}=flashinfer: FlashInfer has no kernel for {shape}")
        return flashinfer.FlashInferAttention(device), "FlashInfer"
    if device.type == "cuda" and fused.supports(head_dim, row_type, pool_type):
        kernel = fused.FusedAttention(device)
        return kernel, f"fused Triton kernel ({kernel.programs} programs)"
    return torch_paged.mixed_attention, f"PyTorch's kernels (no Triton kernel for {shape})"
