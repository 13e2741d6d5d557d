"""Which running requests take part, when not all can.

To restore part of every request in every step may cost more than to pause some, without their KV,
until there is room for them again. The latency model decides how many: the first k requests run for
which k / T(k, r(k)) is best, those left over in mind, in the order of `turns.pause_order`. When
those that pause come back `resuming` decides.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ellm_sgl.policies.base import BoolArray, IntArray, SystemState
from ellm_sgl.policies.pausing.resuming import GAIN, brought_back, computed_again, with_paused
from ellm_sgl.policies.pausing.turns import AMPLE_STEPS, exchange, pause_order
from ellm_sgl.policies.planned import select
from ellm_sgl.policies.problem.batch_size import BatchProblem
from ellm_sgl.policies.problem.candidates import (
    SLO_SHARE,
    Candidates,
    decode_seconds,
    evicted_at,
    least_evicted,
    share_for,
    short_tokens,
    slack_s,
    slos_s,
)
from ellm_sgl.policies.problem.left_over import rate_of_all
from ellm_sgl.policies.problem.on_host import copies_of_first, fetching
from ellm_sgl.policies.problem.standing import Standing

COUNT_EVERY = 16
"""Iterations after which it is asked again who takes part, though nobody has come or gone, nor has
twice as much memory come to be missing."""
GROWTH_STEPS = 4
"""What is evicted of those that pause makes room for so many further steps at once: what is kept
need not be brought back."""


class Pausing:
    """Remembers from one iteration to the next who is paused."""

    def __init__(self) -> None:
        self.paused_ids: IntArray = np.zeros(0, np.int64)
        self._counted: Standing[None] | None = None
        """It stands who takes part."""
        self._order: IntArray = np.zeros(0, np.int64)
        """Positions of the running requests, the paused ones last; computed with `_counted`, and"""
        self._evicted: IntArray | None = None
        """n_i of the running requests while some pause."""

    def paused(self, state: SystemState, level: IntArray | None = None) -> IntArray:
        """Positions of the running requests that pause; not of all.

        Args:
            level: int64 [running]; the higher ones are less urgent and pause first.
        """
        ids = state.running.request_id
        paused = np.isin(ids, self.paused_ids)
        short = max(short_tokens(state, Candidates.of(state)), 0)
        restores = bool(state.running.uncached_tokens[~paused].any())
        given = ids, state.memory.device_tokens, short.bit_length(), restores
        if self._counted is None or not self._counted.holds(*given):
            self._counted = Standing(None, *given, iterations=COUNT_EVERY)
            self._evicted = None
            if short > 0 or paused.any():
                self._choose(state, paused, np.zeros_like(ids) if level is None else level)
        self.paused_ids = ids[paused]
        return np.flatnonzero(paused)

    def take_over(self, paused_ids: IntArray) -> None:
        """These pause now, by somebody else's choice."""
        self.paused_ids, self._counted = paused_ids, None

    def evicted(self, state: SystemState, paused: int) -> IntArray:
        """n_i of the running requests, while so many pause; more as the others grow."""
        short = short_tokens(state, Candidates.of(state))
        if self._evicted is None or short > self._evicted.sum():
            evicted = evicted_tokens(_in_order(state, self._order), len(self._order) - paused)
            self._evicted = np.empty_like(evicted)
            self._evicted[self._order] = evicted
        return self._evicted

    def _choose(self, state: SystemState, paused: BoolArray, level: IntArray) -> None:
        """Who pauses from now on, in `paused`."""
        ids, slack = state.running.request_id, slack_s(state, SLO_SHARE)
        ample_s = np.inf
        if state.memory.host_tokens == 0:
            ample_s = AMPLE_STEPS * decode_seconds(state, ~paused)
        order = pause_order(ids, slack, paused, level, ample_s)
        active = max(int(paused[order].argmax()), 1) if paused.any() else len(order)
        active = participants(_in_order(state, order), active)
        paused[order] = np.arange(len(order)) >= active
        exchange(state, slack, paused, level)
        self._order = pause_order(ids, slack, paused, level)


def _in_order(state: SystemState, order: IntArray) -> SystemState:
    """With the running requests in this order."""
    return replace(state, running=select(state.running, order))


def participants(state: SystemState, active: int) -> int:
    """How many of the running requests should take part, from the first on; at least one.

    Args:
        active: how many took part in the step before.
    """
    count = len(state.running)
    if active == count and short_tokens(state, Candidates.of(state)) <= 0:
        return count
    sizes, anything = np.arange(1, count + 1), np.full(count + 1, np.inf)
    now, every = BatchProblem.of(state, 0), np.arange(count + 1)
    now = replace(
        now,
        limit_s=anything,
        short=with_paused(state, now.short, every),
        latency=fetching(state.latency, copies_of_first(state, sizes)),
    )
    _, seconds, fits = now.least(sizes)
    value = np.where(fits, sizes / seconds, 0.0)
    # What was evicted may find no room to come back: each step restores it then.
    value[active - 1] = min(value[active - 1], active / decode_seconds(state, slice(active)))
    known = count + len(state.waiting)
    length, slo_s = float(state.running.tokens.mean()), float(slos_s(state, 0)[0])
    value = rate_of_all(value, sizes, slo_s, known, length, now.latency)
    best = int(value[:active].argmax()) + 1
    if now.short[active] > 0.0 and value[best - 1] > (1.0 + GAIN) * value[active - 1]:
        return best
    back = brought_back if state.memory.host_tokens > 0 else computed_again
    return max(active, back(state, active, now.short, value))


def evicted_tokens(state: SystemState, active: int) -> IntArray:
    """n_i of each running request, so that the first `active` are cached as far as they can be:
    of the others, the last first, what these need; if that is not enough, the same share of all
    that take part."""
    candidates, block = Candidates.of(state), state.memory.block_tokens
    later = Candidates.of(state, ahead=GROWTH_STEPS)
    room = int((later.charged - candidates.charged)[:active].sum())
    if state.running.uncached_tokens[:active].any():
        room += active * block  # else what comes back would not stay
    most = candidates.evictable
    short = short_tokens(state, candidates)
    needed = max(short + room, 0)
    after = np.cumsum(most[::-1])[::-1] - most  # what those behind it can give
    evicted = np.clip(-(-(needed - after) // block) * block, 0, most)
    evicted[:active] = 0
    missing = float(least_evicted(state.memory, short - evicted.sum()))
    if missing > 0.0:
        first = candidates[:active]
        evicted[:active] = evicted_at(first, share_for(first, missing, block), block)
    return np.asarray(evicted, np.int64)
