"""Chooses how KV and weights are prefetched: measures it on this machine as a server starts."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ellm_sgl.kernels.cpu.attention import mixed_attention
from ellm_sgl.kernels.cpu.prefetch import (
    CANDIDATES,
    DEFAULT,
    OF_WEIGHTS,
    Prefetch,
    from_environment,
)
from ellm_sgl.kernels.cpu.product import by_unit, linear, prefetch_weights
from ellm_sgl.kernels.layout import GroupLayout, RequestLayout, RowRange
from ellm_sgl.memory.arena import on_huge_pages

BLOCK_TOKENS = 16
SLICE_BYTES = 8 << 20
"""KV or weights that one call reads."""
SLICES = 13
"""Read in turn, so that each is out of the caches when its turn comes again. A prime, so that all
candidates get all slices."""
ROUNDS, ROUNDS_OF_TWO = 7, 15
WORTH = 0.95
"""A candidate must take less than this share of the default's time."""
SUM = 2048
"""Elements of a row of weights,"""
ROWS = (1, 8)
"""and rows of x that they are multiplied with, in turn: one choice is for all."""

Seconds = Callable[[Prefetch], float]
"""Time of the work that is measured, with this prefetch."""


@dataclass(frozen=True)
class Shape:
    """What attention is given: heads, and types of rows and pool."""

    heads: int
    kv_heads: int
    head_dim: int
    row_type: torch.dtype
    pool_type: torch.dtype


@functools.cache
def choose_prefetch(shape: Shape) -> Prefetch:
    """Of decode rows: what the environment says, else the fastest candidate here.

    Takes some tens of milliseconds. Results do not depend on it, to the bit.

    Raises:
        ValueError: the environment says something else than a choice.
    """
    return from_environment() or _fastest(_decode_rows(shape), CANDIDATES)


@functools.cache
def choose_weight_prefetch(dtype: torch.dtype) -> Prefetch:
    """Of weights of this type, in products of few rows, which ask for them so from now on: see
    `choose_prefetch`; a tenth of a second."""
    given = from_environment()
    chosen = given or (DEFAULT if by_unit(dtype) else _fastest(_products(dtype), OF_WEIGHTS))
    prefetch_weights(dtype, chosen)
    return chosen


def _fastest(seconds: Seconds, candidates: Sequence[Prefetch]) -> Prefetch:
    """Of the candidates, the first of which is the default. Another must win twice: among all, and
    then against the default alone. On a machine too busy to tell it stays the default."""
    seconds(DEFAULT)  # the first call starts threads
    best, ratio = min(_ratios(seconds, candidates, ROUNDS).items(), key=lambda item: item[1])
    if ratio >= WORTH or _ratios(seconds, (DEFAULT, best), ROUNDS_OF_TWO)[best] >= WORTH:
        return DEFAULT
    return best


def _ratios(seconds: Seconds, candidates: Sequence[Prefetch], rounds: int) -> dict[Prefetch, float]:
    """Of each candidate's time to the first one's: medians of the rounds."""
    times: dict[Prefetch, list[float]] = {candidate: [] for candidate in candidates}
    for number in range(rounds):
        for candidate in candidates[:: -1 if number % 2 else 1]:
            times[candidate].append(seconds(candidate))
    first = times[candidates[0]]
    return {
        candidate: statistics.median(x / y for x, y in zip(own, first, strict=True))
        for candidate, own in times.items()
    }


def _decode_rows(shape: Shape) -> Seconds:
    """One decode row over slices of a pool that no cache holds, again and again."""
    row_bytes = shape.kv_heads * shape.head_dim * shape.pool_type.itemsize
    blocks = max(1, SLICE_BYTES // (2 * BLOCK_TOKENS * row_bytes))
    size = (SLICES * blocks, 2, BLOCK_TOKENS, shape.kv_heads, shape.head_dim)
    # Written, and not with zeros: memory nobody has written is one page for all addresses.
    pool = on_huge_pages(size, shape.pool_type).fill_(1)
    keys, values = pool[:, 0], pool[:, 1]
    q = torch.zeros(1, shape.heads, shape.head_dim, dtype=shape.row_type)
    kv = q[:, : shape.kv_heads]
    scale = shape.head_dim**-0.5
    layouts = itertools.cycle([_layout(torch.randperm(blocks) + i * blocks) for i in range(SLICES)])

    def seconds(prefetch: Prefetch) -> float:
        layout = next(layouts)
        begin = time.perf_counter()
        mixed_attention(q, kv, kv, keys, values, layout, scale, prefetch=prefetch)
        return time.perf_counter() - begin

    return seconds


def _products(dtype: torch.dtype) -> Seconds:
    """Few rows times weights that no cache holds, again and again."""
    outputs = max(1, SLICE_BYTES // (SUM * dtype.itemsize))
    weights = itertools.cycle(list(torch.ones(SLICES, outputs, SUM, dtype=dtype)))
    some = [torch.zeros(rows, SUM, dtype=dtype) for rows in ROWS]

    def seconds(prefetch: Prefetch) -> float:
        begin = time.perf_counter()
        for x in some:
            linear(x, next(weights), prefetch=prefetch)
        return time.perf_counter() - begin

    return seconds


def _layout(units: torch.Tensor) -> GroupLayout:
    """One request whose last token is new, and is not stored."""
    nothing = torch.empty(0, dtype=torch.int64)
    new = RowRange(0, BLOCK_TOKENS * len(units) - 1, 1)
    request = RequestLayout(new, (), slice(0, len(units)), False)
    return GroupLayout.of(1, (request,), units, slice(0, 0), nothing, nothing)
