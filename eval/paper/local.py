"""What the page table's bookkeeping takes on this machine: measured, not simulated."""

from __future__ import annotations

import time

import numpy as np

from ellm_sgl.memory import PageTable, PoolShape

TOKENS, REQUESTS, STEPS = 895, 56, 64
"""A batch of ShareGPT requests half way through their output (222 + 1346 / 2 tokens)."""
BLOCK_TOKENS = 16


def table_seconds(layers: int, group: int) -> float:
    """Time per decode step to extend every request by one token, place new blocks, and look up
    one unit per request and layer group; median of many steps."""
    shape = PoolShape(layers, group, BLOCK_TOKENS)
    blocks = REQUESTS * shape.blocks_for(TOKENS + STEPS)
    table = PageTable(shape, blocks, blocks * shape.num_groups)
    requests = range(REQUESTS)
    for request in requests:
        own = table.allocate(shape.blocks_for(TOKENS))
        table.place(own)
        table.map(request, own, TOKENS)
    last = np.array([table.blocks_of(r)[-1] for r in requests], np.int32)
    times = []
    for step in range(STEPS):
        begin = time.perf_counter()
        if (TOKENS + step) % BLOCK_TOKENS == 0:
            last = table.allocate(REQUESTS)
            table.place(last)
        table.extend_each(requests, last)
        # Every unit's address, as a step reads it.
        table.units[np.concatenate([table.blocks_of(r) for r in requests])].sum()
        times.append(time.perf_counter() - begin)
    return float(np.median(times))
