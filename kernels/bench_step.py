"""A step of attention to time kernels on, and how runs are timed: for the CPU and for CUDA."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ellm_sgl.kernels.layout import GroupLayout, RequestLayout, RowRange
from ellm_sgl.memory.arena import on_huge_pages

BLOCK_TOKENS = 16
LAYERS = 4
"""Layers of a unit: K and V of one layer lie that far apart, as in a real pool."""

Run = Callable[[], Any]


@dataclass(frozen=True)
class StepShape:
    """One step. `missing`: share r of each request's earlier tokens that is computed again."""

    batch: int
    context: int
    missing: float
    heads: int
    kv_heads: int
    head_dim: int = 128


class Step:
    """The tensors of a step, and its rows in three forms.

    `mixed` has blocks missing. `recompute` and `decode` are the same rows with a unit for every
    block: the KV computed again is in the pool, as it is for systems that keep all of it.

    Args:
        shape: of the step.
        new: rows of each request that SGLang asked for, its last tokens.
        dtype: of rows and pool.
        device: of both.
        layers: of a unit.
    """

    def __init__(
        self,
        shape: StepShape,
        new: int,
        dtype: torch.dtype,
        device: torch.device,
        layers: int = LAYERS,
    ) -> None:
        self.shape = shape
        self.new = shape.batch * new
        heads, kv_heads, head_dim = shape.heads, shape.kv_heads, shape.head_dim
        blocks = -(-shape.context // BLOCK_TOKENS)
        self.units = torch.randperm(shape.batch * blocks).view(shape.batch, blocks) + 1
        size = (self.units.numel() + 1, layers, 2, BLOCK_TOKENS, kv_heads, head_dim)
        # Uniform, not normal: the generator takes longer than everything that is measured.
        if device.type == "cpu":
            pool = on_huge_pages(size, dtype)
        else:
            pool = torch.empty(size, dtype=dtype, device=device)
        pool.uniform_(-1, 1)
        self.keys, self.values = pool[:, 0, 0], pool[:, 0, 1]
        self.mixed, self.recompute, self.decode = _layouts(shape, new, self.units, device)
        self.q, self.k, self.v = (
            torch.randn(self.mixed.rows, each, head_dim, device=device).to(dtype)
            for each in (heads, kv_heads, kv_heads)
        )
        self.scale = head_dim**-0.5
        self.kv_bytes = shape.batch * shape.context * 2 * kv_heads * head_dim * dtype.itemsize
        ranges = [r for request in self.mixed.requests for r in (request.new, *request.spans)]
        pairs = sum(r.size * r.position + r.size * (r.size + 1) // 2 for r in ranges)
        self.flops = 4 * heads * head_dim * pairs

    def run(self, kernel: Any, layout: GroupLayout, rows: slice, **options: Any) -> torch.Tensor:
        """`kernel` on these rows of the step."""
        q, k, v = self.q[rows], self.k[rows], self.v[rows]
        out = kernel(q, k, v, self.keys, self.values, layout, self.scale, **options)
        assert isinstance(out, torch.Tensor)
        return out

    def run_apart(self, kernel: Any) -> torch.Tensor:
        """`kernel` on the recomputed rows, then on the new ones; returns the latter's."""
        if self.recompute.rows:
            self.run(kernel, self.recompute, slice(self.new, None))
        return self.run(kernel, self.decode, slice(0, self.new))


def interleave(
    runs: dict[str, Run], rounds: int, seconds: Callable[[Run], float]
) -> dict[str, list[float]]:
    """Seconds of each run in every round, after a round that does not count; every other round in
    reverse order. `seconds`: runs one and times it."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name in list(runs)[:: -1 if number % 2 else 1]:
            taken = seconds(runs[name])
            if number:
                times[name].append(taken)
    return times


def median_ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """Of times of the same rounds."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def _layouts(
    shape: StepShape, new: int, units: torch.Tensor, device: torch.device
) -> tuple[GroupLayout, GroupLayout, GroupLayout]:
    """(mixed, recompute alone, decode alone); see `Step`. `units`: [batch, blocks]."""
    batch, blocks = units.shape
    before = shape.context - new
    missing = int(shape.missing * before) // BLOCK_TOKENS * BLOCK_TOKENS
    own = [slice(i * blocks, (i + 1) * blocks) for i in range(batch)]
    asked = [RowRange(i * new, before, new) for i in range(batch)]
    spans = [RowRange(i * missing, 0, missing) for i in range(batch)]

    def layout(rows: int, requests: list[RequestLayout], positions: torch.Tensor) -> GroupLayout:
        """The first rows are written: those at `positions` of every request."""
        return GroupLayout.of(
            rows=rows,
            requests=tuple(requests),
            units=units.flatten().to(device),
            write_rows=slice(0, batch * len(positions)),
            write_units=units[:, positions // BLOCK_TOKENS].flatten().to(device),
            write_offsets=(positions % BLOCK_TOKENS).repeat(batch).to(device),
        )

    def beside(span: RowRange) -> tuple[RowRange, ...]:
        return (span._replace(row=batch * new + span.row),) if missing else ()

    last, first = torch.arange(before, shape.context), torch.arange(missing)
    mixed = [
        RequestLayout(n, beside(s), o, False) for n, s, o in zip(asked, spans, own, strict=True)
    ]
    apart = [RequestLayout(s, (), o, False) for s, o in zip(spans, own, strict=True)]
    whole = [RequestLayout(n, (), o, False) for n, o in zip(asked, own, strict=True)]
    return (
        layout(batch * (new + missing), mixed, last),
        layout(batch * missing, apart if missing else [], first),
        layout(batch * new, whole, last),
    )
