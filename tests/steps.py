"""Random steps: requests over a page table in which any block may lack any of its units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from ellm_sgl.kernels.layout import GroupLayout, RowRange
from ellm_sgl.memory import NONE, PageTable, PoolShape
from ellm_sgl.memory.shape import IntArray
from ellm_sgl.step import NewTokens, StepPlan, plan_step
from ellm_sgl.step.restoration import Restoration

VOCABULARY = 50
SHAPES = (
    PoolShape(num_layers=2, layer_group=1, block_tokens=1),
    PoolShape(num_layers=5, layer_group=2, block_tokens=4),
    PoolShape(num_layers=4, layer_group=1, block_tokens=4),
    PoolShape(num_layers=3, layer_group=8, block_tokens=16),
    PoolShape(num_layers=4, layer_group=2, block_tokens=16),
)


@dataclass(frozen=True)
class Step:
    """One step, ready to be planned. Sequence i is `requests[i]`."""

    table: PageTable
    requests: tuple[NewTokens, ...]
    tokens: tuple[npt.NDArray[np.int64], ...]
    """Token ids of each request. Where requests share blocks, they share tokens."""
    depths: tuple[IntArray, ...]
    resident: IntArray
    """`table.units` as the step begins; `table` has some of the missing blocks placed since."""

    def token_ids(self, seq_id: int, start: int, end: int) -> npt.NDArray[np.int64]:
        return self.tokens[seq_id][start:end]

    def plan(self) -> StepPlan:
        blocks = np.concatenate([self.table.blocks_of(r.seq_id) for r in self.requests])
        groups = self.table.shape.num_groups
        missing = recomputing_to(blocks, np.concatenate(self.depths), groups)
        return plan_step(self.table, self.requests, missing, self.token_ids)

    def place_of(self, seq_id: int, position: int) -> tuple[int, int]:
        """(block, offset) of a token."""
        block_tokens = self.table.shape.block_tokens
        block = int(self.table.blocks_of(seq_id)[position // block_tokens])
        return block, position % block_tokens

    def unit_of(self, units: IntArray, seq_id: int, position: int, group: int) -> int:
        """Unit of a token in a layer group according to `units`, or NONE."""
        return int(units[self.place_of(seq_id, position)[0], group])


def recomputing_to(blocks: IntArray, depths: IntArray, num_groups: int) -> Restoration:
    """Of these blocks, in any order, each to its depth."""
    blocks, first = np.unique(blocks, return_index=True)
    staged = np.full((len(blocks), num_groups), NONE, np.int32)
    return Restoration(blocks, depths[first], staged, (), np.empty(0, np.int32))


def recomputing(table: PageTable, blocks: IntArray) -> Restoration:
    """Of what these blocks miss, by recomputation alone."""
    return recomputing_to(blocks, table.depth(blocks), table.shape.num_groups)


def rows_of(layout: GroupLayout) -> list[tuple[int, RowRange]]:
    """(request, rows) of all rows alive in a layer group."""
    return [
        (i, rows)
        for i, request in enumerate(layout.requests)
        for rows in (request.new, *request.spans)
    ]


@st.composite
def steps(draw: st.DrawFn, shapes: tuple[PoolShape, ...] = SHAPES, complete: bool = False) -> Step:
    """Decode rows and chunks of prompts, whole or with missing blocks, sharing prefixes or not.

    Args:
        shapes: to choose from.
        complete: every block has all its units.
    """
    shape = draw(st.sampled_from(shapes))
    random = np.random.default_rng(draw(st.integers(0, 2**16), "seed"))
    requests = draw(_requests(shape.block_tokens))
    table = PageTable(shape, num_blocks=30, num_units=30 * shape.num_groups)
    first = table.allocate(shape.blocks_for(requests[0].end))
    tokens = [random.integers(0, VOCABULARY, requests[0].end)]
    table.map(0, first, requests[0].end)
    for request in requests[1:]:
        both_know = min(requests[0].start, request.start) // shape.block_tokens
        shared = draw(st.integers(0, both_know), "shared blocks")
        own = table.allocate(shape.blocks_for(request.end) - shared)
        table.map(request.seq_id, np.concatenate([first[:shared], own]), request.end)
        prefix = tokens[0][: shared * shape.block_tokens]
        rest = random.integers(0, VOCABULARY, request.end - len(prefix))
        tokens.append(np.concatenate([prefix, rest]))

    blocks = np.flatnonzero(table.references(range(31)))
    table.place(random.permutation(blocks))
    if not complete:
        _evict_some(draw, table, blocks)
    resident = table.units.copy()
    depths = tuple(table.depth(table.blocks_of(request.seq_id)) for request in requests)
    missing = blocks[(resident[blocks] == NONE).any(axis=1)].tolist()
    table.place(draw(st.lists(st.sampled_from(missing), unique=True)) if missing else [])
    return Step(table, requests, tuple(tokens), depths, resident)


@st.composite
def _requests(draw: st.DrawFn, block_tokens: int) -> tuple[NewTokens, ...]:
    requests = []
    for seq_id in range(draw(st.integers(1, 4), "requests")):
        end = draw(st.integers(1, 5 * block_tokens), "tokens")
        new = draw(st.one_of(st.just(1), st.integers(1, end)), "new tokens")
        requests.append(NewTokens(seq_id, end - new, end))
    return tuple(requests)


def _evict_some(draw: st.DrawFn, table: PageTable, blocks: Any) -> None:
    """Take from each block all of its units, none, or any."""
    every = 2**table.shape.num_groups - 1
    lost = st.one_of(st.just(0), st.just(every), st.integers(0, every))
    for block in blocks.tolist():
        groups = draw(lost, "units lost")
        for group in range(table.shape.num_groups):
            if groups >> group & 1:
                table.evict(block, slice(group, group + 1))
