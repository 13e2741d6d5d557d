"""What the number of layers per group, F, costs and saves on the page table alone: fragmentation
(memory in allocated units that holds no token) and the bookkeeping's time per decode step, for
Llama2-13B and the paper's ShareGPT lengths, as in the eLLM paper's Table 2.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ellm_sgl.client.traces import IntArray
from ellm_sgl.client.workloads import paper_workload
from ellm_sgl.eval.simulator.machines import MODELS
from ellm_sgl.memory import PageTable, PoolShape

BLOCK_TOKENS = 16
RUNNING, STEPS = 56, 256
"""Requests in the batch, and decode steps."""


@dataclass(frozen=True)
class TableAlone:
    """One F on the page table alone."""

    layer_group: int
    fragmentation: float
    step_us: float
    """Bookkeeping of one decode step of RUNNING requests: median."""
    units: int
    """In use, in the mean."""


def measure_table(group: int, seed: int = 0) -> TableAlone:
    """Decode steps of a batch in which a request that ends is followed by a new one."""
    layers = MODELS["llama2-13b"].layers
    shape = PoolShape(layers, group, BLOCK_TOKENS)
    trace = paper_workload("sharegpt", 40 * RUNNING, seed)
    lengths = trace.prompt_tokens + trace.output_tokens
    batch = _midway(trace.prompt_tokens, lengths, np.random.default_rng(seed))
    blocks = int(sum(shape.blocks_for(int(n)) for n in np.sort(lengths)[-RUNNING:]))
    table = PageTable(shape, blocks, blocks * shape.num_groups)
    for request, (length, _) in enumerate(batch):
        _enter(table, request, length)
    waiting = iter(zip(trace.prompt_tokens.tolist(), lengths.tolist(), strict=True))
    held = wasted = 0
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        decoding = []
        for request, (length, last) in enumerate(batch):
            if length >= last:
                _leave(table, request)
                batch[request] = next(waiting)
                _enter(table, request, batch[request][0])
            else:
                decoding.append(request)
                batch[request] = (length + 1, last)
        _decode(table, decoding)
        times.append(time.perf_counter() - began)
        # A unit holds BLOCK_TOKENS tokens of F layers; of the last group, fewer layers.
        held += table.used_units * BLOCK_TOKENS * group
        wasted += table.used_units * BLOCK_TOKENS * group - layers * sum(n for n, _ in batch)
    return TableAlone(
        layer_group=group,
        fragmentation=wasted / held,
        step_us=statistics.median(times) * 1e6,
        units=round(held / STEPS / BLOCK_TOKENS / group),
    )


def _midway(prompt: IntArray, last: IntArray, rng: np.random.Generator) -> list[tuple[int, int]]:
    """(tokens now, tokens at its end) of requests as one finds them in a server that has run for
    long: long answers are in flight more often, each at any point."""
    output = last - prompt
    chosen = rng.choice(len(output), RUNNING, p=output / output.sum())
    done = (rng.random(RUNNING) * output[chosen]).astype(np.int64)
    return list(zip((prompt[chosen] + done).tolist(), last[chosen].tolist(), strict=True))


def _enter(table: PageTable, request: int, length: int) -> None:
    blocks = table.allocate(table.shape.blocks_for(length))
    table.place(blocks)
    table.map(request, blocks, length)


def _leave(table: PageTable, request: int) -> None:
    blocks = table.blocks_of(request).copy()
    table.unmap(request)
    table.release(blocks)


def _decode(table: PageTable, requests: Sequence[int]) -> None:
    """A token more for each of these."""
    begins = table.lengths_of(requests) % BLOCK_TOKENS == 0
    new = table.allocate(int(np.count_nonzero(begins)))
    table.place(new)
    last = np.array([table.blocks_of(r)[-1] for r in requests], np.int32)
    last[begins] = new
    table.extend_each(requests, last)
