"""What batches come to: expected work and memory of the first b candidates, at times to come.

Requests grow by a token per step and end by the survival function of output lengths
(`policies.lengths`), at their bounds at the latest. Nobody is taken to come in their place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ellm_sgl.latency import LatencyModel, StepWork
from ellm_sgl.policies.base import BoolArray, FloatArray, IntArray, MemoryState, SystemState
from ellm_sgl.policies.planned import evictable, running_and
from ellm_sgl.policies.problem.candidates import least_evicted, unowned_tokens

FIRST_STEPS = 32
"""The first time ahead; each next one is twice as far, to the last bound."""
import os
DEVIATIONS = float(os.environ.get("Z", "1.5"))
"""So many standard deviations of memory above its mean there has to be room for."""
TOLERANCE = 0.005


@dataclass(frozen=True, eq=False)
class Forecast:
    """Arrays are [times, b], b from 0."""

    steps: IntArray
    """Times ahead, in steps; the first is now."""
    memory: MemoryState
    latency: LatencyModel
    fewest: int
    rows: FloatArray
    """Requests that still run, Σ p_i."""
    tokens: FloatArray
    """Σ p_i s_i."""
    evictable: FloatArray
    squares: FloatArray
    prefix: FloatArray
    short: FloatArray
    """Device tokens that are missing if all is cached, at `DEVIATIONS` above the mean."""

    @classmethod
    def of(cls, state: SystemState, most: int) -> Forecast:
        requests, block = running_and(state, slice(most)), state.memory.block_tokens
        generated = requests.tokens - requests.prompt_tokens
        left = np.maximum(requests.max_new_tokens - generated, 1)
        steps = _times(int(left.max(initial=1)))
        p = state.lengths.survival(generated, requests.priority, steps)
        p *= steps[:, None] < left
        tokens = requests.tokens + steps[:, None]
        own = tokens // block + 1 - -(-requests.shared_tokens // block)
        charged = own * block
        evict = evictable(tokens, requests.shared_tokens, block)
        columns = np.zeros((7, len(steps), len(left) + 1))
        out = columns[:, :, 1:]
        out[0] = p
        out[1] = p * tokens
        out[2] = p * evict
        out[3] = out[2] * evict
        out[4] = out[2] * requests.shared_tokens
        out[5] = p * charged
        out[6] = out[5] * charged * (1.0 - p)
        rows, tok, ev, sq, pre, ch, var = np.cumsum(columns, axis=2)
        short = ch + DEVIATIONS * np.sqrt(var) + (unowned_tokens(state) - state.memory.device_tokens)
        return cls(steps, state.memory, state.latency, max(1, len(state.running)), rows, tok, ev, sq, pre, short)

    def seconds(self, sizes) -> tuple[FloatArray, FloatArray, BoolArray]:
        evicted = least_evicted(self.memory, self.short[:, sizes])
        ev = self.evictable[:, sizes]
        share = evicted / np.maximum(ev, 1.0)
        seconds = self.latency.step_seconds(
            StepWork(
                decode_rows=self.rows[:, sizes],
                decode_tokens=self.tokens[:, sizes],
                restored_tokens=evicted,
                restored_squares=share * share * self.squares[:, sizes],
                restored_prefix=share * self.prefix[:, sizes],
            )
        )
        fits = (evicted <= ev) & (evicted <= self.memory.max_restored_tokens)
        return evicted, seconds, fits.all(axis=0)

    def solve(self, limit_s: FloatArray) -> int:
        """limit_s [b]: mean time of a step"""
        sizes = np.arange(self.fewest, self.rows.shape[1])
        evicted, seconds, fits = self.seconds(sizes)
        width = np.diff(self.steps)[:, None]
        spent = np.cumsum(width * (seconds[1:] + seconds[:-1]) / 2, axis=0)
        fits &= (spent <= limit_s[sizes] * self.steps[1:, None]).all(axis=0)
        rows = self.rows[:, sizes]
        made = (width * (rows[1:] + rows[:-1]) / 2).sum(axis=0)
        value = np.where(fits, made / spent[-1], 0.0)
        cached = np.flatnonzero(fits & (evicted == 0.0).all(axis=0))
        first = int(cached[-1]) if len(cached) else 0
        best = value[first:].max()
        if best <= 0.0:
            return self.fewest
        return int(sizes[first + int((value[first:] >= (1.0 - TOLERANCE) * best).argmax())])


def _times(furthest: int) -> IntArray:
    doubled = max(math.ceil(math.log2(max(furthest, FIRST_STEPS) / FIRST_STEPS)), 0)
    return np.append(0, FIRST_STEPS << np.arange(doubled + 1))
