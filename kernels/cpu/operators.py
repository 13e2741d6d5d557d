"""What lies between a model's matrix products, by the compiled kernels: a row at a time.

They round where PyTorch's operators do, one after the other. A row's results are the same to the
bit whatever rows it is computed with, and whatever the number of threads. `False`, or None, where
the compiled kernels cannot: not built, other types, or gradients are wanted. A step of a small
model is as much Python as arithmetic, so what is checked here is checked once, and cheaply.
"""

from __future__ import annotations

from ctypes import byref

import torch

from ellm_sgl.kernels.cpu.library import TYPES, Gate, Norm, Rotation, best_instruction_set, load


def normalise(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """RMS normalisation (Zhang and Sennrich, arXiv:1910.07467) of x, or of x + residual: the result
    and that sum, which is rounded only where it is returned.

    Args:
        x: [..., size], one of `TYPES`.
        weight: [size] of the same type.
        epsilon: added to the mean square.
        residual: as x.
    """
    library, dtype = load().library, x.dtype
    if (
        library is None
        or (kind := TYPES.get(dtype)) is None
        or weight.dtype is not dtype
        or not (x.is_cpu and weight.is_cpu and weight.is_contiguous())
        or weight.shape != x.shape[-1:]
        or not (numel := x.numel())
        or torch.is_grad_enabled()
    ):
        return None
    if not x.is_contiguous():
        x = x.contiguous()
    size, out = x.shape[-1], torch.empty_like(x)
    total, beside, sums = None, None, None
    if residual is not None:
        if residual.dtype is not dtype or residual.shape != x.shape or not residual.is_cpu:
            return None
        if not residual.is_contiguous():
            residual = residual.contiguous()
        total = torch.empty_like(x)
        beside, sums = residual.data_ptr(), total.data_ptr()
    norm = Norm(
        x.data_ptr(), beside, weight.data_ptr(), out.data_ptr(), sums, numel // size, size,
        epsilon, kind, torch.get_num_threads(), best_instruction_set(),
    )  # fmt: skip
    library.ellm_normalise(byref(norm))
    return out, total


def rotate(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    head_dim: int,
    cosines: torch.Tensor,
) -> bool:
    """Rotary embedding (Su et al., arXiv:2104.09864) of q and k, where they are: element i of a
    head's first `turned` is turned with element i + turned / 2. False, and nothing done, also where
    a position has no cosines.

    Args:
        positions: int64 [rows].
        q: [rows, heads · head_dim], one of `TYPES`.
        k: [rows, KV heads · head_dim] of the same type.
        head_dim: size of a head.
        cosines: [positions, turned] of the same type: cosines, then sines.
    """
    library, dtype = load().library, q.dtype
    if (
        library is None
        or (kind := TYPES.get(dtype)) is None
        or not (k.dtype is cosines.dtype is dtype and positions.dtype is torch.int64)
        or not (q.is_cpu and k.is_cpu and cosines.is_cpu and positions.is_cpu)
        or not (q.dim() == k.dim() == cosines.dim() == 2 and positions.dim() == 1)
        or not (positions.is_contiguous() and cosines.is_contiguous())
        or torch.is_grad_enabled()
    ):
        return False
    (rows, q_width), (q_stride, q_step) = q.shape, q.stride()
    (k_rows, k_width), (k_stride, k_step) = k.shape, k.stride()
    known, turned = cosines.shape
    if (
        not (positions.shape[0] == k_rows == rows)
        or not (q_step == k_step == 1)
        or q_width % head_dim
        or k_width % head_dim
        or turned > head_dim
        or turned % 2
    ):
        return False
    rotation = Rotation(
        q.data_ptr(), k.data_ptr(), cosines.data_ptr(), positions.data_ptr(), q_stride, k_stride,
        rows, known, q_width // head_dim, k_width // head_dim, head_dim, turned, kind,
        torch.get_num_threads(), best_instruction_set(),
    )  # fmt: skip
    return bool(library.ellm_rotate(byref(rotation)))


def gate(x: torch.Tensor) -> torch.Tensor | None:
    """silu(a) · b of the halves a, b of each row (SwiGLU: Shazeer, arXiv:2002.05202).

    Args:
        x: [..., 2 · size], one of `TYPES`.
    """
    library = load().library
    if (
        library is None
        or (kind := TYPES.get(x.dtype)) is None
        or not (x.is_cpu and x.is_contiguous())
        or not (numel := x.numel())
        or (width := x.shape[-1]) % 2
        or torch.is_grad_enabled()
    ):
        return None
    out = x.new_empty((*x.shape[:-1], width // 2))
    values = Gate(
        x.data_ptr(), out.data_ptr(), numel // width, width // 2, kind,
        torch.get_num_threads(), best_instruction_set(),
    )  # fmt: skip
    library.ellm_gate(byref(values))
    return out
