"""Writes the K and V of a step's rows to their places in the pool, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ellm_sgl.kernels.layout import packed_heads


@triton.jit(do_not_specialize_on_alignment=["units", "offsets"])
def append_rows(
    k, v, keys, values, units, offsets, k_stride, v_stride, unit_stride, token_stride,
    ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row for each program."""
    row = tl.program_id(0).to(tl.int64)
    element = tl.arange(0, BLOCK)
    inside = element < ROW
    place = tl.load(units + row) * unit_stride + tl.load(offsets + row) * token_stride + element
    tl.store(keys + place, tl.load(k + row * k_stride + element, mask=inside), mask=inside)
    tl.store(values + place, tl.load(v + row * v_stride + element, mask=inside), mask=inside)


def append(
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    units: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    """`keys[units, offsets], values[units, offsets] = k, v`.

    Args:
        k, v: `[rows, KV heads, head size]`; rows may lie apart.
        keys, values: `[units + 1, block tokens, KV heads, head size]`, of equal strides; a token's
            heads lie together.
        units, offsets: int64 [rows].

    Raises:
        ValueError: keys and values are laid out otherwise.
    """
    if keys.stride() != values.stride() or keys.stride()[2:] != (keys.shape[3], 1):
        raise ValueError(f"strides of keys and values: {keys.stride()}, {values.stride()}")
    if not len(units):
        return
    k, v = packed_heads(k), packed_heads(v)
    row = keys.shape[2] * keys.shape[3]
    append_rows[(len(units),)](
        k, v, keys, values, units, offsets,
        k.stride(0), v.stride(0), keys.stride(0), keys.stride(1),
        ROW=row, BLOCK=triton.next_power_of_2(row), num_warps=8 if row >= 2048 else 4,
    )  # fmt: skip
