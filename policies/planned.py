"""From ratios to tokens and to a step's work, as the control loop will apply them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from ellm_sgl.latency import FetchingLatencyModel, HostCopies, LatencyModel, StepWork
from ellm_sgl.policies.base import (
    Batch,
    FloatArray,
    IntArray,
    MemoryState,
    Ratios,
    Requests,
    SystemState,
)

Admitted = int | tuple[int, ...]
"""Waiting requests: so many of the first, or those at these positions."""


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


def host_copies(running: Requests, memory: MemoryState) -> HostCopies:
    """What of the tokens that these requests miss, or come to miss, the host has."""
    return HostCopies(
        uncached=int(running.uncached_tokens.sum()),
        held=int(running.uncached_on_host.sum()),
        capacity=memory.host_tokens,
    )


def latency_seen(model: LatencyModel, running: Requests, memory: MemoryState) -> LatencyModel:
    """What a policy is given to predict steps of these requests with, on a server that predicts by
    `model`."""
    if memory.host_tokens == 0:
        return model
    return FetchingLatencyModel(model, host_copies(running, memory))


def step_work(state: SystemState, batch: Batch, ratios: Ratios) -> StepWork:
    """Work of the decode step that these answers lead to, with those admitted decoding too.
    `swap_tokens` are those of the restored tokens that can be fetched."""
    block, memory = state.memory.block_tokens, state.memory
    running, ratio = state.running, ratios.running
    if batch.pause:
        runs = np.delete(np.arange(len(running)), batch.pause)
        kept = int(running.uncached_on_host[list(batch.pause)].sum())
        memory = replace(memory, host_tokens=max(memory.host_tokens - kept, 0))
        running, ratio = select(running, runs), ratio[runs]
    decoding = [_decoding(running, ratio, block)]
    if batch.admit:
        admitted = select(state.waiting, batch.admit)
        decoding.append(_decoding(admitted, ratios.admitted, block))
    rows, tokens, uncached, squares, prefix = map(sum, zip(*decoding, strict=True))
    copies = host_copies(running, memory)
    return StepWork(
        decode_rows=int(rows),
        decode_tokens=tokens,
        restored_tokens=uncached,
        restored_squares=squares,
        restored_prefix=prefix,
        swap_tokens=float(copies.fetched(uncached)),
    )


def _decoding(requests: Requests, ratios: FloatArray, block_tokens: int) -> tuple[float, ...]:
    """Requests, Σ s_i, Σ n_i, Σ n_i² and Σ n_i a_i of requests under these ratios."""
    rows, tokens = len(requests), float(requests.tokens.sum())
    if not ratios.any():
        return rows, tokens, 0.0, 0.0, 0.0
    uncached = planned_tokens(requests, ratios, block_tokens).astype(np.float64)
    shared = requests.shared_tokens
    return rows, tokens, float(uncached.sum()), float(uncached @ uncached), float(uncached @ shared)


@lru_cache(maxsize=1)
def running_and(state: SystemState, admit: Admitted) -> Requests:
    """The running requests, and behind them these of the waiting ones."""
    if not admit:
        return state.running
    rows = slice(admit) if isinstance(admit, int) else np.array(admit, np.int64)
    return joined(state.running, Requests(**{n: c[rows] for n, c in vars(state.waiting).items()}))


def joined(first: Requests, second: Requests) -> Requests:
    """The first requests, and behind them the second ones."""
    behind = vars(second)
    return Requests(**{n: np.concatenate((c, behind[n])) for n, c in vars(first).items()})


def select(requests: Requests, positions: Sequence[int] | IntArray) -> Requests:
    """The requests at these positions, in this order."""
    index = np.array(positions, np.int64)
    return Requests(**{name: column[index] for name, column in vars(requests).items()})
