"""What of the running requests' KV the host has for those that take part: what those keep there
that pause is not for them, nor is its room."""

from __future__ import annotations

import numpy as np

from ellm_sgl.latency import FetchingLatencyModel, HostCopies, LatencyModel
from ellm_sgl.policies.base import BoolArray, IntArray, SystemState
from ellm_sgl.policies.planned import evictable_tokens


def fetching(model: LatencyModel, copies: HostCopies) -> LatencyModel:
    """The model that a policy was given, with these copies; as it is where there is no host."""
    return model.with_copies(copies) if isinstance(model, FetchingLatencyModel) else model


def copies_of_first(state: SystemState, sizes: IntArray) -> HostCopies:
    """If the first b of the running requests take part and the others pause, all of whose KV is
    evicted then and goes to the host.

    Args:
        sizes: values of b, int64 [sizes].
    """
    running, memory = state.running, state.memory
    on_host = running.uncached_on_host
    evictable = evictable_tokens(running, memory.block_tokens)
    if_paused = on_host + np.maximum(evictable - running.uncached_tokens, 0)
    held = _of_first(on_host)[sizes]
    beyond = if_paused.sum() - _of_first(if_paused)[sizes]
    return HostCopies(
        uncached=_of_first(running.uncached_tokens)[sizes],
        held=held,
        capacity=np.maximum(memory.host_tokens - beyond, held),
    )


def copies_of(state: SystemState, runs: slice | BoolArray) -> HostCopies:
    """If these of the running requests take part as they are."""
    held = int(state.running.uncached_on_host[runs].sum())
    return HostCopies(int(state.running.uncached_tokens[runs].sum()), held, held)


def _of_first(tokens: IntArray) -> IntArray:
    """Sums over the first b, b from 0."""
    return np.append(0, np.cumsum(tokens))
