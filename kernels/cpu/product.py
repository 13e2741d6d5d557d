"""Matrix products of few rows by the compiled kernels: a model's weights while it decodes."""

from __future__ import annotations

from ctypes import byref

import torch

from ellm_sgl.kernels.cpu.library import (
    INSTRUCTION_SETS,
    TYPES,
    Product,
    best_instruction_set,
    load,
)
from ellm_sgl.kernels.cpu.prefetch import DEFAULT, Prefetch

MOST_ROWS = {torch.float32: 512, torch.bfloat16: 32, torch.float16: 32}
"""Up to so many: of more PyTorch's are faster."""
BOUND_BY_READING = 16
"""Rows up to which the prefetch that was chosen is used; with more it costs up to a tenth."""
SHORT_SUM, MOST_ROWS_OF_SHORT = 512, 16
"""16-bit sums of fewer elements than this: up to so many rows; of more PyTorch's are faster."""
LONG_SUM, MOST_ROWS_OF_LONG = 513, 64
"""fp32 sums of so many elements or more: up to so many rows; of more oneDNN is faster, by more than
what Python between a layer's operators takes."""
MOST_ROWS_OF_UNIT, MOST_ROWS_OF_SHORT_BY_UNIT = 64, 32
"""The same in bf16 on processors with a matrix unit (AMX), to which 16 rows are little more than
one: of sums of any size; of fewer than `SHORT_SUM` elements."""

_UNIT = INSTRUCTION_SETS.index("amx")
_DEFAULT = DEFAULT.numbers
_PLAIN = torch.Tensor.__torch_dispatch__
"""Of tensors that lie in memory as they say. Others' numbers may be elsewhere, and quantised: what
torchao makes of a layer's weights says that it is contiguous and has the activations' type."""
_chosen: dict[torch.dtype, tuple[int, int]] = {}
"""How weights of a type are asked for: numbers, which are at hand in every call."""


def prefetch_weights(dtype: torch.dtype, prefetch: Prefetch) -> None:
    """From now on ask for weights of this type so: a step is those of four outputs. Products of
    more than `BOUND_BY_READING` rows go on as by default."""
    _chosen[dtype] = prefetch.numbers


def weight_prefetch(dtype: torch.dtype, rows: int) -> tuple[int, int]:
    """How weights of this type are asked for by products of so many rows: `Prefetch.numbers`."""
    return _chosen.get(dtype, _DEFAULT) if rows <= BOUND_BY_READING else _DEFAULT


def by_unit(dtype: torch.dtype) -> bool:
    """Whether a matrix unit does products of this type, which asks for no weights ahead."""
    return dtype is torch.bfloat16 and best_instruction_set() >= _UNIT


def most_rows(size: int, dtype: torch.dtype) -> int:
    """Rows of sums of `size` elements up to which `linear` does the product."""
    if dtype is torch.float32:
        return MOST_ROWS_OF_LONG if size >= LONG_SUM else MOST_ROWS[dtype]
    if by_unit(dtype):
        return MOST_ROWS_OF_SHORT_BY_UNIT if size < SHORT_SUM else MOST_ROWS_OF_UNIT
    return MOST_ROWS_OF_SHORT if size < SHORT_SUM else MOST_ROWS[dtype]


def is_plain(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether both lie in the host's memory as they say, are of one type, and need no gradients."""
    return not (
        weight.dtype is not x.dtype
        or type(weight).__torch_dispatch__ is not _PLAIN
        or not (x.is_cpu and weight.is_cpu and weight.is_contiguous())
        or (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
    )


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    prefetch: Prefetch | None = None,
) -> torch.Tensor | None:
    """`torch.nn.functional.linear` of few rows, the sums in fp32; None where the compiled kernels
    cannot do this product, or PyTorch's are faster for it.

    A row's outputs are the same to the bit whatever rows it is computed with, and whatever the
    number of threads.

    Args:
        x: [..., size], one of `TYPES`.
        weight: [outputs, size] of the same type; it is read as it lies.
        bias: [outputs] of that type.
        prefetch: of the weights; None: as `prefetch_weights` was told. Shows in the time alone.
    """
    library, dtype, rows = load().library, x.dtype, x
    if (
        library is None
        or (kind := TYPES.get(dtype)) is None
        or not is_plain(x, weight)
        or len(shape := weight.shape) != 2
    ):
        return None
    outputs, size = shape
    if not x.dim() or x.shape[-1] != size or not 0 < x.numel() <= size * most_rows(size, dtype):
        return None
    beside = None
    if bias is not None:
        if bias.dtype is not dtype or bias.shape != shape[:1] or not bias.is_contiguous():
            return None
        beside = bias.data_ptr()
    if x.dim() != 2:
        rows = x.reshape(-1, size)
    stride, step = rows.stride()
    if step != 1:
        rows, stride = rows.contiguous(), size
    count = rows.shape[0]  # len() of a tensor is Python, and takes a microsecond
    out = x.new_empty((count, outputs))
    ahead = weight_prefetch(dtype, count) if prefetch is None else prefetch.numbers
    product = Product(
        rows.data_ptr(), weight.data_ptr(), beside, out.data_ptr(), stride, count, size,
        outputs, kind, torch.get_num_threads(), best_instruction_set(), *ahead,
    )  # fmt: skip
    library.ellm_multiply(byref(product))
    return out if rows is x else out.view(*x.shape[:-1], outputs)
