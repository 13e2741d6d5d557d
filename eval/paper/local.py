"""What is measured on this machine, not simulated: decisions and the page table's bookkeeping."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from ellm_sgl.eval.simulator import Machine
from ellm_sgl.memory import PageTable, PoolShape
from ellm_sgl.policies.testing.bench import PolicyBench, bench

TOKENS, REQUESTS, STEPS = 895, 56, 64
"""A batch of ShareGPT requests half way through their output (222 + 1346 / 2 tokens)."""
BLOCK_TOKENS = 16


@dataclass(frozen=True)
class TableTime:
    """Bookkeeping of one decode step, in seconds of this machine's processor."""

    layer_group: int
    seconds: float


def decisions(calls: int = 100) -> dict[str, PolicyBench]:
    """Times of the policies' answers, 256 requests running and 1,024 waiting."""
    return {name: bench(name, {}, calls) for name in ("fcfs", "slo-priority")}


def table_times(machine: Machine, groups: tuple[int, ...]) -> list[TableTime]:
    """Time per decode step to extend every request by one token, place new blocks, and look up
    one unit per request and layer group; median of many steps."""
    return [TableTime(group, _table_seconds(machine.shape.layers, group)) for group in groups]


def _table_seconds(layers: int, group: int) -> float:
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
