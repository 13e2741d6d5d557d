"""From ratios to tokens and to a step's work, as the control loop will apply them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ellm_sgl.latency import StepWork
from ellm_sgl.policies.base import Batch, FloatArray, IntArray, Ratios, Requests, SystemState


def evictable_tokens(requests: Requests, block_tokens: int) -> IntArray:
    """`evictable` of each request."""
    return evictable(requests.tokens, requests.shared_tokens, block_tokens)


def evictable(tokens: IntArray, shared: IntArray, block_tokens: int) -> IntArray:
    """e_i: most tokens that may be uncached of requests of so many tokens: whole blocks, neither
    shared nor the block being filled."""
    blocks = (tokens - 1) // block_tokens - -(-shared // block_tokens)
    return np.asarray(np.maximum(blocks, 0) * block_tokens, np.int64)


def planned_tokens(requests: Requests, ratios: FloatArray, block_tokens: int) -> IntArray:
    """Tokens of each request that stay uncached under these ratios, in whole blocks."""
    blocks = np.floor(ratios * requests.tokens / block_tokens).astype(np.int64)
    return np.minimum(blocks * block_tokens, evictable_tokens(requests, block_tokens))


def step_work(state: SystemState, batch: Batch, ratios: Ratios) -> StepWork:
    """Work of the decode step that these answers lead to, with those that join decoding too."""
    runs = np.ones(len(state.running), bool)
    runs[list(batch.pause)] = False
    join = list(batch.join)
    block = state.memory.block_tokens
    staying = planned_tokens(state.running, ratios.running, block)[runs]
    joining = planned_tokens(select(state.waiting, join), ratios.joining, block)
    spans = np.concatenate((staying, joining)).astype(np.float64)
    tokens = np.concatenate((state.running.tokens[runs], state.waiting.tokens[join]))
    shared = np.concatenate((state.running.shared_tokens[runs], state.waiting.shared_tokens[join]))
    total = float(spans.sum())
    return StepWork(
        decode_rows=len(spans),
        decode_tokens=float(tokens.sum()),
        span_rows=total,
        span_squares=float(spans @ spans),
        span_prefix=float(spans @ shared),
        swap_tokens=total if state.memory.host_tokens else 0,
    )


def select(requests: Requests, positions: Sequence[int]) -> Requests:
    """The requests at these positions, in this order."""
    index = np.array(positions, np.int64)
    return Requests(**{name: column[index] for name, column in vars(requests).items()})
