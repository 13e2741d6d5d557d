"""Chooses the prefetch of decode rows by measuring it on this machine, when a server starts."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ellm_sgl.kernels.cpu.attention import mixed_attention
from ellm_sgl.kernels.cpu.prefetch import CANDIDATES, DEFAULT, Prefetch, from_environment
from ellm_sgl.kernels.layout import GroupLayout, RequestLayout, RowRange

BLOCK_TOKENS = 16
SLICE_BYTES = 8 << 20
"""KV that one call reads."""
SLICES = 13
"""Read in turn, so that each is out of the caches when its turn comes again. A prime, so that all
candidates get all slices."""
ROUNDS, ROUNDS_OF_TWO = 7, 15
WORTH = 0.95
"""A candidate must take less than this share of the default's time."""


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
    """What the environment says, else the fastest candidate here: some tens of milliseconds.

    Another than the default must win twice: among all, and then against the default alone. On a
    machine too busy to tell it stays the default. Results do not depend on it, to the bit.

    Raises:
        ValueError: the environment says something else than a choice.
    """
    if (given := from_environment()) is not None:
        return given
    calls = _Calls(shape)
    best, ratio = min(calls.ratios(CANDIDATES, ROUNDS).items(), key=lambda item: item[1])
    if ratio >= WORTH or calls.ratios((DEFAULT, best), ROUNDS_OF_TWO)[best] >= WORTH:
        return DEFAULT
    return best


class _Calls:
    """One decode row over slices of a pool that no cache holds, again and again."""

    def __init__(self, shape: Shape) -> None:
        row_bytes = shape.kv_heads * shape.head_dim * shape.pool_type.itemsize
        blocks = max(1, SLICE_BYTES // (2 * BLOCK_TOKENS * row_bytes))
        size = (SLICES * blocks, 2, BLOCK_TOKENS, shape.kv_heads, shape.head_dim)
        # Written, and not with zeros: memory nobody has written is one page for all addresses.
        pool = torch.ones(size, dtype=shape.pool_type)
        self._keys, self._values = pool[:, 0], pool[:, 1]
        self._q = torch.zeros(1, shape.heads, shape.head_dim, dtype=shape.row_type)
        self._kv = self._q[:, : shape.kv_heads]
        self._scale = shape.head_dim**-0.5
        self._layouts = [_layout(torch.randperm(blocks) + i * blocks) for i in range(SLICES)]
        self._slices = self._in_turn()
        self._seconds(DEFAULT)  # the first call starts threads

    def ratios(self, candidates: Sequence[Prefetch], rounds: int) -> dict[Prefetch, float]:
        """Of each candidate's time to the first one's: medians of the rounds."""
        times: dict[Prefetch, list[float]] = {candidate: [] for candidate in candidates}
        for number in range(rounds):
            for candidate in candidates[:: -1 if number % 2 else 1]:
                times[candidate].append(self._seconds(candidate))
        first = times[candidates[0]]
        return {
            candidate: statistics.median(x / y for x, y in zip(own, first, strict=True))
            for candidate, own in times.items()
        }

    def _seconds(self, prefetch: Prefetch) -> float:
        layout = next(self._slices)
        begin = time.perf_counter()
        mixed_attention(
            self._q, self._kv, self._kv, self._keys, self._values, layout, self._scale,
            prefetch=prefetch,
        )  # fmt: skip
        return time.perf_counter() - begin

    def _in_turn(self) -> Iterator[GroupLayout]:
        while True:
            yield from self._layouts


def _layout(units: torch.Tensor) -> GroupLayout:
    """One request whose last token is new, and is not stored."""
    nothing = torch.empty(0, dtype=torch.int64)
    new = RowRange(0, BLOCK_TOKENS * len(units) - 1, 1)
    request = RequestLayout(new, (), slice(0, len(units)), False)
    return GroupLayout.of(1, (request,), units, slice(0, 0), nothing, nothing)
