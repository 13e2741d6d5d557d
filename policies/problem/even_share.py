"""The same share evicted of each request, kept from one iteration to the next while it will do."""

from __future__ import annotations

import numpy as np

from ellm_sgl.policies.base import Batch, IntArray, SystemState
from ellm_sgl.policies.problem.candidates import (
    Candidates,
    evicted_at,
    share_for,
    short_tokens,
    step_limit_s,
    to_evict,
    work_of,
)

HOLD = 1 / 32
"""A share stays while what it evicts is enough, and at most this part more than enough."""


class EvenShare:
    """Remembers the share ρ of what can be evicted of each request that is."""

    def __init__(self) -> None:
        self._share = 0.0

    def evicted(
        self, state: SystemState, batch: Batch, candidates: Candidates, held: int = 0
    ) -> IntArray | None:
        """n_i of each candidate; None if all is cached. Keeps or renews the share.

        Args:
            held: device tokens of running requests that are not among the candidates.
        """
        memory, block = state.memory, state.memory.block_tokens
        short = short_tokens(state, candidates) + held
        if short <= 0:
            self._share = 0.0
            return None
        most = min(int(candidates.evictable.sum()), memory.max_restored_tokens) // block * block
        least = min(float(to_evict(memory, short)), most)
        enough = min(least * HOLD, most - least)
        evicted = evicted_at(candidates, self._share, block)
        spare = evicted.sum() - least
        if 0 <= spare <= block or (
            0 <= spare <= enough and _in_time(state, batch, candidates, evicted)
        ):
            return evicted
        self._share = share_for(candidates, least, block)
        return evicted_at(candidates, self._share, block)


def _in_time(state: SystemState, batch: Batch, candidates: Candidates, evicted: IntArray) -> bool:
    """Whether the step keeps the SLO by the latency model's estimate."""
    limit_s = step_limit_s(state, batch.admit)
    return limit_s == np.inf or bool(
        state.latency.step_seconds(work_of(candidates, evicted)) <= limit_s
    )
