"""Matrix products of few rows by the compiled kernels: a model's weights while it decodes."""

from __future__ import annotations

from ctypes import byref

import torch

from ellm_sgl.kernels.cpu.library import TYPES, Product, best_instruction_set, load
from ellm_sgl.kernels.cpu.prefetch import HINTS, READING, Reading

MOST_ROWS = 32
"""`kProductRows`."""
BOUND_BY_READING = 16
"""Rows up to which weights are read as was chosen; with more that costs up to a tenth."""
LEAST_IN_ORDER, MOST_IN_ORDER = 2048, 8192
"""Bytes of a sum's weights for which what was chosen for one row is used: of fewer, calls are most
of the time; with more, x would be read again from beyond the first cache for each output."""
SHORT_SUM, MOST_ROWS_OF_SHORT = 512, 16
"""16-bit sums of fewer elements than this: up to so many rows; of more PyTorch's are faster."""


_Numbers = tuple[int, int, int]
"""A `Reading`, as `Product` has it."""


def _numbers(reading: Reading) -> _Numbers:
    hint, steps = reading.prefetch
    return HINTS.index(hint), steps, reading.in_order


_DEFAULT = _numbers(READING)
_chosen: dict[torch.dtype, tuple[_Numbers, _Numbers]] = {}
"""Of weights of a type: for one row, and for few."""


def read_weights(dtype: torch.dtype, one: Reading, few: Reading) -> None:
    """From now on read weights of this type so where x has one row (see `LEAST_IN_ORDER`), and so
    where it has at most `BOUND_BY_READING`; with more as by default."""
    _chosen[dtype] = _numbers(one), _numbers(few)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    reading: Reading | None = None,
) -> torch.Tensor | None:
    """`torch.nn.functional.linear` of few rows, the sums in fp32; None where the compiled kernels
    cannot do this product, or PyTorch's are faster for it.

    A row's outputs are the same to the bit whatever rows it is computed with, and whatever the
    number of threads.

    Args:
        x: [..., size], one of `TYPES`.
        weight: [outputs, size] of the same type; it is read as it lies.
        bias: [outputs] of that type.
        reading: of the weights; None: as `read_weights` was told. Shows in the time alone.
    """
    library, dtype, rows = load().library, x.dtype, x
    if (
        library is None
        or (kind := TYPES.get(dtype)) is None
        or weight.dtype is not dtype
        or not (x.is_cpu and weight.is_cpu and weight.is_contiguous())
        or len(shape := weight.shape) != 2
        or (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
    ):
        return None
    outputs, size = shape
    short = size < SHORT_SUM and dtype is not torch.float32
    if (
        not x.dim()
        or x.shape[-1] != size
        or not 0 < x.numel() <= size * (MOST_ROWS_OF_SHORT if short else MOST_ROWS)
    ):
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
    if reading is not None:
        how = _numbers(reading)
    elif count > BOUND_BY_READING or dtype not in _chosen:
        how = _DEFAULT
    else:
        one, few = _chosen[dtype]
        in_reach = LEAST_IN_ORDER <= size * weight.itemsize <= MOST_IN_ORDER
        how = one if count == 1 and in_reach else few
    product = Product(
        rows.data_ptr(), weight.data_ptr(), beside, out.data_ptr(), stride, count, size,
        outputs, kind, torch.get_num_threads(), best_instruction_set(), *how,
    )  # fmt: skip
    library.ellm_multiply(byref(product))
    return out if rows is x else out.view(*x.shape[:-1], outputs)
