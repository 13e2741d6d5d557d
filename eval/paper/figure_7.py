"""Fig. 7's two examples on the page table: two requests of a model with 8 layers, F = 4, of which
the first block of 4 tokens is not cached and goes through transient units."""

from __future__ import annotations

from dataclasses import dataclass

from ellm_sgl.memory import PageTable, PoolShape
from ellm_sgl.memory.shape import IntArray

SHAPE = PoolShape(num_layers=8, layer_group=4, block_tokens=4)
REQUESTS, TOKENS = (1, 2), 12
UNCACHED_BLOCKS = 1
"""Of each request, its first."""
EXAMPLES = {"A": (1, 1), "B": (2, 2)}
"""(l1, l2): layers that are swapped in and recomputed at once."""


@dataclass(frozen=True)
class Example:
    """A page table in the middle of such a step."""

    table: PageTable
    transient: IntArray
    """Units for the uncached tokens' KV, of both requests."""


def transient_units(l1: int, l2: int, shape: PoolShape) -> int:
    """Units that each uncached block needs while it is restored (§4.3.2): l1 layers that are
    swapped in, l2 that are recomputed, and the l1 + l2 that decode reads meanwhile."""
    return -(-2 * (l1 + l2) // shape.layer_group)


def example(name: str) -> Example:
    """One of `EXAMPLES`, on a page table that is as large as it needs."""
    per_block = transient_units(*EXAMPLES[name], SHAPE)
    blocks = SHAPE.blocks_for(TOKENS)
    table = PageTable(SHAPE, len(REQUESTS) * blocks, len(REQUESTS) * blocks * SHAPE.num_groups)
    for request in REQUESTS:
        own = table.allocate(blocks)
        table.place(own)
        table.map(request, own, TOKENS)
        table.note_computed([request], [TOKENS])
        for block in own[:UNCACHED_BLOCKS].tolist():
            table.evict(block)
    return Example(table, table.borrow_units(len(REQUESTS) * UNCACHED_BLOCKS * per_block))
