"""What batches come to: expected work and memory of the first b candidates, at times ahead.

Requests grow by a token per step, and end by the survival function of output lengths
(`ellm_sgl.policies.lengths`), at their bounds at the latest. Nobody comes in their place: who is
admitted later is decided later. In many requests chance evens out, so memory is planned at its mean
and a few standard deviations, not at everybody's longest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.special import xlogy

from ellm_sgl.latency import LatencyModel, StepWork
from ellm_sgl.policies.base import BoolArray, FloatArray, IntArray, MemoryState, SystemState
from ellm_sgl.policies.planned import evictable, running_and
from ellm_sgl.policies.problem.batch_size import BatchProblem
from ellm_sgl.policies.problem.candidates import (
    TOLERANCE,
    least_evicted,
    prompts_s,
    slos_s,
    unowned_tokens,
)

FIRST_STEPS = 32
"""The first time ahead; each further one is `FACTOR` times as far, until all are at their ends,"""
FACTOR = 2
ENDS = 6
"""and before so many of these ends."""
MANY = 128
"""Waiting requests beyond which those that do not even fit now are left out first."""
DEVIATIONS = 2.0
"""Standard deviations above the mean that memory is planned at; of the hazards' level, which all
requests have in common, a single standard error."""
SLO_SHARE = 0.95
"""Of an SLO on the time per token, that is planned with: a request may meet slower steps than the
mean one."""


@dataclass(frozen=True, eq=False)
class Forecast:
    """Of the first b candidates. Arrays are float64 [times, b], b from 0; sums are over requests i
    that go on with probability p_i, at the length s_i that they have by then."""

    steps: IntArray
    """Times ahead, in steps, int64 [times]; the first is 0."""
    memory: MemoryState
    latency: LatencyModel
    fewest: int
    """Least b: the running requests, or the one request that would be alone."""
    rows: FloatArray
    """Σ p_i."""
    tokens: FloatArray
    """Σ p_i s_i."""
    evictable: FloatArray
    """Σ p_i e_i."""
    squares: FloatArray
    """Σ p_i e_i²."""
    prefix: FloatArray
    """Σ p_i e_i a_i."""
    prompts_s: FloatArray
    """Time to compute the prompts of those who wait, [b]."""
    slo_s: FloatArray
    """The least SLO on the time per token, [b]."""
    ahead_s: FloatArray
    """Time by which each running request is ahead of its SLO, [running]; negative: behind."""
    pace: float
    """`SystemState.pace`."""
    free: float
    """Device tokens that there are for blocks of their own."""
    short: FloatArray
    """Of these, those missing if all is cached, `DEVIATIONS` above their mean, at most as if nobody
    ended before its bound; negative where all fits."""

    @classmethod
    def of(cls, state: SystemState, waiting: int) -> Forecast:
        """With up to so many of the waiting requests; of `MANY`, as many as fit now."""
        if waiting > MANY:
            waiting = _fitting_now(state, waiting)
        requests, block = running_and(state, slice(waiting)), state.memory.block_tokens
        generated = requests.tokens - requests.prompt_tokens
        left = np.maximum(requests.max_new_tokens - generated, 1)
        steps = _times(left)
        bounded = steps[:, None] < left
        survival = state.lengths.survival(generated, requests.priority, steps)
        goes_on = survival * bounded
        tokens, shared = requests.tokens + steps[:, None], requests.shared_tokens
        evict = evictable(tokens, shared, block)
        charged = (tokens // block + 1 - -(-shared // block)) * block
        columns = np.zeros((9, len(steps), len(left) + 1))
        columns[:7, :, 1:] = goes_on
        columns[7, :, 1:] = bounded * charged
        columns[8, :, 1:] = -xlogy(survival, survival) * bounded * charged
        for column, of in zip(
            columns[1:7],
            (tokens, evict, evict * evict, evict * shared, charged, charged**2 * (1.0 - goes_on)),
            strict=True,
        ):
            column[:, 1:] *= of
        sums = np.cumsum(columns, axis=2)
        rows, all_tokens, evictable_tokens, squares, prefix, held, variance, most, in_doubt = sums
        deviation = np.sqrt(DEVIATIONS**2 * variance + (state.lengths.doubt * in_doubt) ** 2)
        free = state.memory.device_tokens - unowned_tokens(state)
        return cls(
            steps=steps,
            memory=state.memory,
            latency=state.latency,
            fewest=max(1, len(state.running)),
            rows=rows,
            tokens=all_tokens,
            evictable=evictable_tokens,
            squares=squares,
            prefix=prefix,
            prompts_s=np.append(np.zeros(len(state.running) + 1), prompts_s(state, slice(waiting))),
            slo_s=slos_s(state, waiting),
            ahead_s=_ahead_s(state),
            pace=state.pace,
            free=float(free),
            short=np.minimum(held + deviation, most) - free,
        )

    def between(self, fewest: int, most: int) -> Forecast:
        """The same for so many of the candidates."""
        arrays: dict[str, Any] = {
            name: array[..., : most + 1]
            for name, array in vars(self).items()
            if np.ndim(array) == 2 or name in ("prompts_s", "slo_s")
        }
        return replace(self, fewest=fewest, **arrays)

    def least(self, sizes: IntArray) -> tuple[FloatArray, FloatArray, BoolArray]:
        """For each of these batch sizes, [times, sizes]: the least Σ n_i that fits into memory, T
        with the same share of each request's e_i evicted, and whether it fits and a step may
        restore it; where not, the first two are those of nothing evicted."""
        evicted = least_evicted(self.memory, self.short[:, sizes])
        evictable = self.evictable[:, sizes]
        fits = (evicted <= evictable) & (evicted <= self.memory.max_restored_tokens)
        evicted = np.where(fits, evicted, 0.0)
        share = evicted / np.maximum(evictable, 1.0)
        seconds = self.latency.step_seconds(
            StepWork(
                decode_rows=self.rows[:, sizes],
                decode_tokens=self.tokens[:, sizes],
                restored_tokens=evicted,
                restored_squares=share * share * self.squares[:, sizes],
                restored_prefix=share * self.prefix[:, sizes],
            )
        )
        return evicted, seconds, fits

    def solve(self, keep_slo: bool = True, may_pause: bool = True) -> int:
        """The smallest of the best batch sizes: all that fit without restoring anything; beyond
        that, the one that makes most tokens per second until they have ended. Where memory will be
        short, part of each is restored in every step, or the last pause, whichever is faster.

        Args:
            keep_slo: at any time ahead the time per token must keep the SLO.
            may_pause: where not, no step may be short of more than it can restore.

        Returns:
            b; `fewest` if none is possible.
        """
        sizes = np.arange(self.fewest, self.rows.shape[1])
        _, restoring_s, possible = self.least(sizes)
        share, pausing_s = self._pausing(sizes)
        pauses = may_pause & (~possible | (pausing_s < share * restoring_s))
        seconds = np.where(pauses, pausing_s, restoring_s)
        value = self._rate(sizes, np.where(pauses, pausing_s / share, restoring_s))
        value[~(possible | pauses).all(axis=0)] = 0.0
        if keep_slo:
            value[~self._in_time(sizes, seconds, pauses)] = 0.0
        cached = np.flatnonzero((value > 0.0) & (self.short[:, sizes] <= 0.0).all(axis=0))
        first = int(cached[-1]) if len(cached) else 0
        if (best := value[first:].max()) <= 0.0:
            return self.fewest
        return int(sizes[first + int((value[first:] >= (1.0 - TOLERANCE) * best).argmax())])

    def _pausing(self, sizes: IntArray) -> tuple[FloatArray, FloatArray]:
        """If the last pause of those for whom memory is short, each of whom keeps a block: the
        share that decodes, and T of a step of these; [times, sizes]."""
        rows, short = self.rows[:, sizes], self.short[:, sizes]
        room = self.free - self.memory.block_tokens * rows
        runs = np.floor(rows * room / np.maximum(room + short, 1.0))
        runs = np.where(short > 0.0, np.maximum(runs, np.minimum(rows, 1.0)), rows)
        share = np.divide(runs, rows, out=np.ones_like(rows), where=rows > 0.0)
        work = StepWork(decode_rows=runs, decode_tokens=share * self.tokens[:, sizes])
        return share, self.latency.step_seconds(work)

    def _rate(self, sizes: IntArray, seconds: FloatArray) -> FloatArray:
        """Tokens per second that batches make, [sizes]. A time ahead counts for as many as are left
        then: whoever ends has made room for others, and few steps should pay for none.

        Args:
            seconds: of a step, [times, sizes].
        """
        rows = self.rows[:, sizes]
        left = rows / rows[0]
        return np.asarray(self.summed(left * rows)[-1] / self.summed(left * seconds)[-1])

    def _in_time(self, sizes: IntArray, seconds: FloatArray, pauses: BoolArray) -> BoolArray:
        """Whether nobody misses the SLO because of those who come: neither they themselves, who
        are the last, so pause first, and should not do so at once, nor of the running requests,
        which their prompts hold up, any that would keep it without them.

        Args:
            seconds: of a step, [times, sizes], in which
            pauses: those who come pause.
        """
        spent_s = self.pace * self.summed(seconds)
        slo_s = SLO_SHARE * self.slo_s[sizes]
        decodes = ~pauses[1:]
        decodes[-1] = True  # nobody pauses for ever
        own = (self.summed(~pauses) >= spent_s / slo_s) | ~decodes
        allowed_s = slo_s * self.steps[1:, None]
        kept = self.ahead_s >= (spent_s - allowed_s)[:, :1]
        ahead_s = np.where(kept, self.ahead_s, np.inf).min(axis=1, initial=np.inf)
        others = spent_s + self.prompts_s[sizes] <= allowed_s + ahead_s[:, None]
        return np.asarray((own & others).all(axis=0) & ~pauses[0])

    def summed(self, of: FloatArray | BoolArray) -> FloatArray:
        """What a figure [times, ...] per step adds up to, from now to each time ahead but 0."""
        between = np.diff(self.steps)[:, None] * (1.0 * of[1:] + of[:-1]) / 2
        return np.cumsum(between, axis=0)


def _fitting_now(state: SystemState, waiting: int) -> int:
    """With how many of up to so many waiting requests the next step fits into memory and SLO: it
    gets no easier until some have ended, and to look far ahead for a thousand takes time."""
    problem = BatchProblem.of(state, waiting)
    limit_s = SLO_SHARE / state.pace * slos_s(state, waiting)
    sizes = np.arange(problem.fewest, problem.most + 1)
    _, _, fits = replace(problem, limit_s=limit_s).least(sizes)
    most = problem.fewest + int(np.logical_and.accumulate(fits[1:]).sum())
    return max(min(most, problem.most) - len(state.running), 0)


def _ahead_s(state: SystemState) -> FloatArray:
    """Time by which each running request is ahead of its SLO, [running]; 0 if it has none, or not
    two tokens yet."""
    running = state.running
    slo_s = np.minimum(running.tpot_slo_s, state.tpot_slo_s)
    told = np.isfinite(slo_s) & np.isfinite(running.tpot_s)
    spare_s = np.where(told, slo_s, 0.0) - np.where(told, running.tpot_s, 0.0)
    return np.asarray(spare_s * (running.tokens - running.prompt_tokens), np.float64)


def _times(left: IntArray) -> IntArray:
    """0, times each `FACTOR` times as far as the one before, and the last steps before requests are
    at their bounds: `ENDS` of these at most, evenly spread. Memory is fullest before such an end.
    """
    further = max(math.ceil(math.log(int(left.max(initial=1)) / FIRST_STEPS, FACTOR)), 0)
    ends = np.unique(left - 1)
    ends = ends[np.linspace(0, len(ends) - 1, min(len(ends), ENDS)).astype(np.int64)]
    return np.unique(np.concatenate(([0], FIRST_STEPS * FACTOR ** np.arange(further + 1), ends)))
