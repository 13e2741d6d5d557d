"""Which kernels run: the fastest ones that this machine and these tensors allow."""

from __future__ import annotations

from typing import Protocol

import torch

from ellm_sgl.kernels import torch_paged
from ellm_sgl.kernels.cpu import attention as cpu
from ellm_sgl.kernels.cpu.library import load
from ellm_sgl.kernels.layout import GroupLayout


class MixedAttention(Protocol):
    """An attention kernel; `reference.mixed_attention` defines what it does."""

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
    ) -> torch.Tensor: ...


class CopyUnits(Protocol):
    """Copies units between two buffers of the same unit shape, one to one."""

    def __call__(
        self,
        target: torch.Tensor,
        target_units: torch.Tensor,
        source: torch.Tensor,
        source_units: torch.Tensor,
    ) -> None: ...


def torch_copy_units(
    target: torch.Tensor,
    target_units: torch.Tensor,
    source: torch.Tensor,
    source_units: torch.Tensor,
) -> None:
    """Copy unit `source_units[i]` of `source` to unit `target_units[i]` of `target`, for all i.

    Args:
        target, source: [units, ...], on any devices.
        target_units, source_units: int64 [n], each on its buffer's device.
    """
    target[target_units] = source[source_units].to(target.device)


def choose_copy(target: torch.device, source: torch.device) -> CopyUnits:
    """What copies units between buffers on these devices."""
    if target.type == source.type == "cpu" and load().problem is None:
        return cpu.copy_units
    return torch_copy_units


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
        return torch_paged.mixed_attention, f"PyTorch's kernels ({device.type})"
    if (problem := load().problem) or not cpu.supports(head_dim, row_type, pool_type):
        problem = problem or f"none for heads of {head_dim} in {row_type} on {pool_type}"
        return torch_paged.mixed_attention, f"PyTorch's kernels (C++ kernels: {problem})"
    return cpu.mixed_attention, f"C++ kernels ({cpu.instruction_set_name(head_dim)})"
