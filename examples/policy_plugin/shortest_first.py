"""Admits the shortest waiting request first, so that short ones need not wait for long ones."""

from __future__ import annotations

import numpy as np

from ellm_sgl.latency import StepWork
from ellm_sgl.policies import Batch, Policy, Ratios, SystemState, WorkSplit, plan_split


class ShortestFirst(Policy):
    """Admits by length, less what a request has waited; keeps all cached that fits.

    Args:
        tokens_per_second: each second of waiting makes a request this many tokens shorter in the
            order, so that long ones get their turn too.
    """

    def __init__(self, tokens_per_second: float = 20.0) -> None:
        if not tokens_per_second > 0:
            raise ValueError(
                f"tokens_per_second is {tokens_per_second}; give more than 0, or long requests "
                "may wait for ever"
            )
        self._rate = tokens_per_second

    def batch(self, state: SystemState) -> Batch:
        waiting = state.waiting
        order = np.argsort(waiting.tokens - self._rate * waiting.waited_s, kind="stable")
        return Batch(admit=tuple(order.tolist()))  # the server admits as many as there is room for

    def ratio(self, state: SystemState, batch: Batch) -> Ratios:
        return Ratios(running=np.zeros(len(state.running)), admitted=np.zeros(len(batch.admit)))

    def split(self, state: SystemState, plan: StepWork) -> WorkSplit:
        return plan_split(state, plan)
