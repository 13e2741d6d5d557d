"""Attention inputs larger and more varied than those of random steps: long contexts, any sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from ellm_sgl.kernels.layout import GroupLayout, RequestLayout, RowRange, StackedLayout


@dataclass(frozen=True)
class Sizes:
    """One attention call. `requests`: (tokens before the new ones, new tokens) of each."""

    requests: tuple[tuple[int, int], ...]
    block_tokens: int
    kv_heads: int
    group: int
    head_dim: int
    row_type: torch.dtype
    pool_type: torch.dtype
    missing: float
    """Share of the blocks without a unit."""
    seed: int = 0

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


@dataclass(frozen=True)
class Inputs:
    """Arguments of `mixed_attention`; the pool is NaN wherever nothing may be read."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    layout: GroupLayout
    scale: float

    def run(self, kernel: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(output, keys, values) of a kernel on copies of the pool."""
        keys, values = self.keys.clone(), self.values.clone()
        out = kernel(self.q, self.k, self.v, keys, values, self.layout, self.scale, **options)
        return out, keys, values

    def tolerance(self, context: int) -> float:
        """How far from the reference, which rounds only its result.

        Sums are fp32: the roundings of head_dim + context additions grow like a random walk. Of
        16-bit rows the result is rounded, and may fall to either side of a tie; of bf16 weights may
        be rounded before. Each of the two is half an eps at most.
        """
        fp32 = (2 + (self.q.shape[2] + context) ** 0.5) * torch.finfo(torch.float32).eps
        rounding = 0.0 if self.q.dtype == torch.float32 else torch.finfo(self.q.dtype).eps
        largest = float(
            torch.cat([self.v.flatten(), self.values.flatten()]).nan_to_num().abs().max()
        )
        return (fp32 + rounding) * largest


def make(sizes: Sizes) -> Inputs:
    """Random rows, and a pool of shuffled units that holds what is stored before the step."""
    random = np.random.default_rng(sizes.seed)
    torch.manual_seed(sizes.seed)
    size = sizes.block_tokens
    blocks = [-(-(before + new) // size) for before, new in sizes.requests]
    free = iter(random.permutation(sum(blocks)) + 1)
    units: list[int] = []
    readable: list[tuple[int, int]] = []  # (unit, tokens stored in it)
    new_ranges: list[RowRange] = []
    spans: list[list[RowRange]] = []
    writes: list[tuple[int, int, int]] = []
    row, span_row = 0, sum(new for _, new in sizes.requests)
    for (before, new), count in zip(sizes.requests, blocks, strict=True):
        own_spans: list[RowRange] = []
        for block in range(count):
            unit = 0 if random.random() < sizes.missing else int(next(free))
            start, stored = block * size, min(max(before - block * size, 0), size)
            units.append(unit)
            if unit:
                readable.append((unit, stored))
                for position in range(max(start, before), min(start + size, before + new)):
                    writes.append((row + position - before, unit, position - start))
            elif stored:
                own_spans.append(RowRange(span_row, start, stored))
                span_row += stored
        new_ranges.append(RowRange(row, before, new))
        spans.append(own_spans)
        row += new
    requests, first = [], 0
    for new_range, own, count in zip(new_ranges, spans, blocks, strict=True):
        tail = units[first + new_range.position // size : first + count]
        here = slice(first, first + count)
        requests.append(RequestLayout(new_range, tuple(own), here, unstored_new=0 in tail))
        first += count
    written = torch.tensor(writes, dtype=torch.int64).reshape(-1, 3).T.contiguous()
    layout = GroupLayout.of(
        span_row, tuple(requests), torch.tensor(units), written[0], written[1], written[2]
    )
    shape = sum(blocks) + 1, size, sizes.kv_heads, sizes.head_dim
    keys = torch.full(shape, torch.nan, dtype=sizes.pool_type)
    values = keys.clone()
    for unit, tokens in readable:
        for pool in (keys, values):
            pool[unit, :tokens] = torch.randn(tokens, *shape[2:]).to(sizes.pool_type)

    def rows(heads: int) -> torch.Tensor:
        return torch.randn(span_row, heads, sizes.head_dim).to(sizes.row_type)

    q, k, v = rows(sizes.heads), rows(sizes.kv_heads), rows(sizes.kv_heads)
    return Inputs(q, k, v, keys, values, layout, sizes.head_dim**-0.5)


def in_two_groups(sizes: Sizes) -> list[tuple[Inputs, GroupLayout]]:
    """The same requests in two layer groups, whose pools have them in other units."""
    groups = [make(replace(sizes, seed=seed)) for seed in (1, 2)]
    first = groups[0].layout
    units, written = (
        torch.stack([getattr(each.layout, name) for each in groups])
        for name in ("units", "write_units")
    )
    every = slice(0, first.rows)
    step = StackedLayout(first.rows, first.requests, units, every, written, first.write_offsets)
    return list(zip(groups, step.layouts(), strict=True))


F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TYPES = ((F32, F32), (BF16, BF16), (F16, F16), (F32, BF16), (F32, F16), (BF16, F32))
"""(of the rows, of the pool)."""


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    """Few rows, so that the reference is fast; contexts long enough to be split."""
    request = st.tuples(
        st.one_of(st.just(0), st.integers(0, 80), st.integers(0, 1300)),
        st.one_of(st.just(1), st.integers(1, 40)),
    )
    row_type, pool_type = draw(st.sampled_from(TYPES))
    return Sizes(
        requests=tuple(draw(st.lists(request, min_size=1, max_size=4))),
        block_tokens=draw(st.sampled_from((1, 2, 7, 16, 64))),
        kv_heads=draw(st.integers(1, 4)),
        group=draw(st.sampled_from((1, 2, 3, 5, 8))),
        head_dim=draw(st.sampled_from((32, 40, 64, 80, 128, 192, 256))),
        row_type=row_type,
        pool_type=pool_type,
        # Many missing tokens are many rows, and the reference takes each by itself.
        missing=draw(st.sampled_from((0.0, 0.02))),
        seed=draw(st.integers(0, 2**16)),
    )
