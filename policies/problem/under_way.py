"""Prompts under way: they decode next, and grow as everybody does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ellm_sgl.policies.base import SystemState
from ellm_sgl.policies.planned import joined, select


def as_running(state: SystemState) -> SystemState:
    """The state as if requests whose prompts are computed in chunks decoded already, with their
    prompts in memory: behind the running ones, for questions about who is admitted beside them."""
    coming = state.prefilling
    if not len(coming):
        return state
    # They have waited for their first token, which comes with the prompt.
    waited = np.append(state.running.waited_s, np.zeros(len(coming)))
    block = state.memory.block_tokens
    held = int((-(-coming.tokens // block) - coming.uncached_tokens // block).sum()) * block
    memory = replace(state.memory, device_tokens=state.memory.device_tokens + held)
    return replace(
        state,
        running=replace(joined(state.running, coming), waited_s=waited),
        prefilling=select(coming, ()),
        memory=memory,
    )
