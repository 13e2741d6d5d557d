"""Matrix products of few rows by the compiled kernels: a model's weights while it decodes."""

from __future__ import annotations

import ctypes
import os

import torch

from ellm_sgl.kernels.cpu.attention import TYPES
from ellm_sgl.kernels.cpu.library import ISA_VARIABLE, Product, instruction_set, load

MOST_ROWS = 32
"""`kProductRows`."""
SHORT_SUM, MOST_ROWS_OF_SHORT = 512, 16
"""16-bit sums of fewer elements than this: up to so many rows; of more PyTorch's are faster."""


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor | None:
    """`torch.nn.functional.linear` of few rows, the sums in fp32; None where the compiled kernels
    cannot do this product, or PyTorch's are faster for it.

    A row's outputs are the same to the bit whatever rows it is computed with, and whatever the
    number of threads.

    Args:
        x: [..., size], one of `TYPES`.
        weight: [outputs, size] of the same type; it is read as it lies.
        bias: [outputs] of that type.
    """
    library = load().library
    if library is None or not _suits(x, weight, bias):
        return None
    # The best instruction set for heads of 64 is the best there is.
    isa = instruction_set(64, os.environ.get(ISA_VARIABLE))
    assert isa is not None
    outputs, size = weight.shape
    rows = x.reshape(-1, size)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = x.new_empty((*x.shape[:-1], outputs))
    product = Product(
        rows.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(),
        out.data_ptr(), rows.stride(0), len(rows), size, outputs, TYPES[x.dtype],
        torch.get_num_threads(), isa[0],
    )  # fmt: skip
    library.ellm_multiply(ctypes.byref(product))
    return out


def _suits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    dtype, size = x.dtype, x.shape[-1] if x.dim() else 0
    short = size < SHORT_SUM and dtype is not torch.float32
    return (
        size > 0
        and 0 < x.numel() <= size * (MOST_ROWS_OF_SHORT if short else MOST_ROWS)
        and dtype in TYPES
        and weight.dtype is dtype
        and weight.dim() == 2
        and weight.shape[1] == size
        and weight.is_contiguous()
        and (bias is None or (bias.dtype is dtype and bias.shape == weight.shape[:1]))
        and (bias is None or bias.is_contiguous())
        and x.device.type == weight.device.type == "cpu"
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
    )
