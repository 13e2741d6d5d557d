"""Which running requests take part, when not all can.

To restore part of every request in every step may cost more than to pause the last ones, without
their KV, until there is room for them again. The latency model decides: the first k requests run
for which k / T(k, r(k)) is best. Those that pause come back as new requests come in: where there is
room for what they have lost, and more is decoded so until they end, by what is known of output
lengths. SLOs are left aside, since somebody has to wait, and who pauses misses it, too.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ellm_sgl.policies.base import FloatArray, IntArray, SystemState
from ellm_sgl.policies.problem.candidates import (
    Candidates,
    decode_seconds,
    evicted_at,
    least_evicted,
    share_for,
    short_tokens,
)
from ellm_sgl.policies.problem.forecast import Forecast
from ellm_sgl.policies.problem.standing import Standing

GAIN = 0.05
"""Requests begin to pause when that decodes so much more per second."""
COUNT_EVERY = 16
"""Iterations after which it is asked again who takes part, though nobody has come or gone, nor has
twice as much memory come to be missing."""
GROWTH_STEPS = COUNT_EVERY
"""What is evicted of those that pause makes room for so many further steps at once."""


class Pausing:
    """Remembers from one iteration to the next who is paused: the last of the running requests, in
    the order of the state's."""

    def __init__(self) -> None:
        self._paused: IntArray = np.zeros(0, np.int64)
        """Their ids."""
        self._counted: Standing[None] | None = None
        """It stands who takes part."""
        self._evicted: IntArray | None = None
        """n_i of the running requests while some pause; computed with `_counted`."""

    def active(self, state: SystemState) -> int:
        """How many of the running requests take part, from the first on; at least one."""
        ids = state.running.request_id
        paused = np.isin(ids, self._paused)
        active = max(int(paused.argmax()), 1) if paused.any() else len(ids)
        short = max(short_tokens(state, Candidates.of(state)), 0)
        restores = bool(state.running.uncached_tokens[:active].any())
        given = ids, state.memory.device_tokens, short.bit_length(), restores
        if self._counted is None or not self._counted.holds(*given):
            self._counted = Standing(None, *given, iterations=COUNT_EVERY)
            self._evicted = None
            active = participants(state, active)
        self._paused = ids[active:]
        return active

    def evicted(self, state: SystemState, active: int) -> IntArray:
        """n_i of the running requests, while only the first `active` take part."""
        if self._evicted is None:
            self._evicted = evicted_tokens(state, active)
        return self._evicted


def participants(state: SystemState, active: int) -> int:
    """How many of the running requests should take part, from the first on; at least one.

    Args:
        active: how many took part in the step before.
    """
    count, candidates = len(state.running), Candidates.of(state)
    if active == count and short_tokens(state, candidates) <= 0:
        return count
    forecast = _with_paused(Forecast.of(state, 0), candidates)
    sizes = np.arange(1, count + 1)
    _, seconds, fits = forecast.least(sizes)
    value = np.where(fits[0], sizes / seconds[0], 0.0)
    # What was evicted may find no room to come back: each step restores it then.
    value[active - 1] = min(value[active - 1], active / decode_seconds(state, slice(active)))
    best = int(value[:active].argmax()) + 1
    if forecast.short[0, active] > 0.0 and value[best - 1] > (1.0 + GAIN) * value[active - 1]:
        return best
    return max(active, _resumed(forecast, state, active, value))


def _with_paused(forecast: Forecast, candidates: Candidates) -> Forecast:
    """Those beyond the first k hold what cannot be evicted; and until it is asked again each of the
    others may grow by a block."""
    held = (candidates.charged - candidates.evictable).astype(np.float64)
    beyond = np.append(np.cumsum(held[::-1])[::-1], 0.0)
    return replace(
        forecast, short=forecast.short + beyond + forecast.memory.block_tokens * forecast.rows
    )


def _resumed(forecast: Forecast, state: SystemState, active: int, value: FloatArray) -> int:
    """How many take part once some resume: not so many that they would have to pause again, nor
    more than one step can bring back."""
    back = np.cumsum(state.running.uncached_tokens[active:])
    lasting = value[active:] * (1.0 + GAIN) >= np.maximum.accumulate(value)[active:]
    lasting |= forecast.short[0, active + 1 :] <= 0.0
    possible = (back <= state.memory.max_restored_tokens) & lasting
    most = active + int(np.logical_and.accumulate(possible).sum())
    if most == active:
        return active
    return forecast.between(active, most).solve(keep_slo=False)


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
