"""Attention over the paged pool by the compiled kernels."""

from __future__ import annotations

import ctypes
import os
from ctypes import c_int64
from typing import NamedTuple

import torch

from ellm_sgl.kernels.cpu.library import (
    ISA_VARIABLE,
    TYPES,
    Call,
    PlanArguments,
    instruction_set,
    load,
    loaded,
)
from ellm_sgl.kernels.cpu.prefetch import DEFAULT, Prefetch
from ellm_sgl.kernels.cpu.transfer import check_buffers, check_units
from ellm_sgl.kernels.layout import GroupLayout, RequestLayout, StackedLayout, packed_heads


def supports(head_dim: int, row_type: torch.dtype, pool_type: torch.dtype) -> bool:
    """Whether the compiled kernels are there, and can do this."""
    if load().library is None or not {row_type, pool_type} <= TYPES.keys():
        return False
    return instruction_set(head_dim, os.environ.get(ISA_VARIABLE)) is not None


def instruction_set_for(head_dim: int) -> tuple[int, str]:
    """(index, name) of the instruction set that attention uses for heads of this size.

    Raises:
        ValueError: there is none.
    """
    if (found := instruction_set(head_dim, os.environ.get(ISA_VARIABLE))) is None:
        raise ValueError(f"no kernel for heads of {head_dim}")
    return found


def mixed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layout: GroupLayout,
    scale: float,
    out_rows: int | None = None,
    delta: float = 0.5,
    prefetch: Prefetch = DEFAULT,
) -> torch.Tensor:
    """See `reference.mixed_attention`: same arguments, same result, in one call for all rows.

    Single rows (decoding) and longer ranges of rows (prompts and spans) are work items of two
    queues; a thread that finds its queue empty takes from the other. For given tensors, a row's
    result is the same to the bit whatever the number of threads and wherever KV comes from.

    Args:
        delta: share of the threads, 0..1, that begin with the ranges of rows.
        prefetch: how single rows ask for KV ahead of reading it. Shows in the time alone.

    Raises:
        ValueError: `supports` says no, or a tensor is not laid out as the reference says.
    """
    groups = layout.stacked
    plan = prepared(groups, keys.shape[1], q.shape[2])
    rows = groups.rows if out_rows is None else out_rows
    heads, head_dim = q.shape[1:]
    out = q.new_empty((rows, heads, head_dim))
    q, k, v = packed_heads(q), packed_heads(k), packed_heads(v)
    if k.shape[0] < groups.rows or q.shape[0] < rows or keys.shape[0] <= plan.largest_unit:
        raise ValueError(f"fewer rows or units than the layout speaks of: {q.shape}, {keys.shape}")
    if not q.dtype is k.dtype is v.dtype:
        raise ValueError(f"rows of {q.dtype}, {k.dtype} and {v.dtype}")
    if keys.stride() != values.stride() or keys.stride()[2:] != (head_dim, 1):
        raise ValueError(f"strides of keys and values: {keys.stride()}, {values.stride()}")
    try:
        row_type, pool_type = TYPES[q.dtype], TYPES[keys.dtype]
    except KeyError as error:
        raise ValueError(f"no kernel for {error}") from None
    call = Call(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), keys.data_ptr(), values.data_ptr(),
        out.data_ptr(), q.stride(0), k.stride(0), v.stride(0), keys.stride(0), keys.stride(1),
        rows, heads, k.shape[1], head_dim, keys.shape[1], row_type, pool_type,
        torch.get_num_threads(), plan.isa, *prefetch.numbers, scale, delta,
    )  # fmt: skip
    plan.library.ellm_attend(plan.handle, layout.group, ctypes.byref(call), groups.rows)
    return out


def copy_units(
    target: torch.Tensor,
    target_units: torch.Tensor,
    source: torch.Tensor,
    source_units: torch.Tensor,
    threads: int = 1,
) -> None:
    """Copy unit `source_units[i]` of `source` to unit `target_units[i]` of `target`, for all i.

    The interpreter is free meanwhile: meant for a thread that moves KV between pool and host.

    Args:
        target, source: [units, ...], contiguous, same dtype and unit size.
        target_units, source_units: int64 [n]; no unit appears twice in `target_units`.

    Raises:
        ValueError: other shapes or types, or a unit out of range.
    """
    check_buffers(target, source)
    if len(target_units) != len(source_units):
        raise ValueError(f"{len(source_units)} units to {len(target_units)} places")
    if len(target_units) == 0:
        return
    lists = []
    for units, buffer in ((target_units, target), (source_units, source)):
        units = units.to(torch.int64).contiguous()
        check_units(units, buffer)
        lists.append(units)
    loaded().ellm_copy_units(
        target.data_ptr(), lists[0].data_ptr(), source.data_ptr(), lists[1].data_ptr(),
        len(lists[0]), source[0].numel() * source.element_size(), threads,
    )  # fmt: skip


class Plan:
    """Layouts of groups that are alike, in the form the kernels read."""

    def __init__(self, groups: StackedLayout, block_tokens: int, head_dim: int) -> None:
        columns = _columns(groups.requests)
        units, write_units = groups.units.contiguous(), groups.write_units.contiguous()
        write_offsets = groups.write_offsets.contiguous()
        rows, first_row = None, 0
        if isinstance(groups.write_rows, slice):
            first_row = groups.write_rows.start
        else:
            rows = groups.write_rows.contiguous()
        num_groups, num_units = units.shape
        arguments = PlanArguments(
            ctypes.addressof(columns.requests), ctypes.addressof(columns.spans), units.data_ptr(),
            None if rows is None else rows.data_ptr(), write_units.data_ptr(),
            write_offsets.data_ptr(), len(groups.requests), columns.num_spans, num_units,
            write_units.shape[1], first_row, block_tokens, num_groups,
        )  # fmt: skip
        self.library = loaded()
        self.handle = self.library.ellm_make_plans(ctypes.byref(arguments))
        self.largest_unit: int = arguments.largest_unit
        """Of all groups'."""
        self.isa, _ = instruction_set_for(head_dim)

    def __del__(self) -> None:  # weakref.finalize takes as long as all the rest
        self.library.ellm_free_plans(self.handle)


class _Columns(NamedTuple):
    """`requests` and `spans` of `PlanArguments`."""

    of: tuple[RequestLayout, ...]
    requests: ctypes.Array[c_int64]
    spans: ctypes.Array[c_int64]
    num_spans: int


def _columns(requests: tuple[RequestLayout, ...]) -> _Columns:
    """Groups that are not alike often have the same requests: the last ones' columns are kept."""
    global _last_columns
    if (last := _last_columns) is not None and last.of is requests:
        return last
    ranges = [n for r in requests for n in (*r.new, r.blocks.start, r.blocks.stop)]
    spans = [(i, *span) for i, request in enumerate(requests) for span in request.spans]
    columns = _Columns(requests, _array(ranges), _array([n for s in spans for n in s]), len(spans))
    _last_columns = columns
    return columns


def _array(numbers: list[int]) -> ctypes.Array[c_int64]:
    return (c_int64 * len(numbers))(*numbers)


_last_columns: _Columns | None = None
_last: tuple[StackedLayout, int, int, Plan] | None = None


def prepared(groups: StackedLayout, block_tokens: int, head_dim: int) -> Plan:
    """The plan of these groups. Their layers follow one another, so the last one is kept."""
    global _last
    if (last := _last) is not None and last[0] is groups and last[1:3] == (block_tokens, head_dim):
        return last[3]
    plan = Plan(groups, block_tokens, head_dim)
    _last = groups, block_tokens, head_dim, plan
    return plan
