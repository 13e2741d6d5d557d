"""What batches come to: expected work and memory of the first b candidates, at times ahead.

Requests grow by a token per step, and end by the survival function of output lengths
(`ellm_sgl.policies.lengths`), at their bounds at the latest. Nobody comes in their place: who is
admitted later is decided later. In many requests chance evens out, so memory is planned at its mean
and a few standard deviations, not at everybody's longest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ellm_sgl.latency import HostCopies, LatencyModel, StepWork
from ellm_sgl.policies.base import BoolArray, FloatArray, IntArray, MemoryState, SystemState
from ellm_sgl.policies.planned import evictable, running_and
from ellm_sgl.policies.problem.batch_size import BatchProblem
from ellm_sgl.policies.problem.candidates import (
    SLO_SHARE,
    TOLERANCE,
    charge,
    least_evicted,
    prompts_s,
    slack_s,
    slos_s,
    under_way_s,
    unowned_tokens,
)
from ellm_sgl.policies.problem.left_over import rate_of_all
from ellm_sgl.policies.problem.on_host import fetching

FIRST_STEPS = 8
"""The first time ahead; each further one is `FACTOR` times as far, until all are at their ends,"""
FACTOR = 2
ENDS = 6
"""and before so many of these ends."""
MANY = 128
"""Waiting requests beyond which those that do not even fit now are left out first."""
DEVIATIONS = 2.0
"""Standard deviations above the mean that memory is planned at; of the hazards' level, which all
requests have in common, a single standard error."""
MISSES = 0.1
"""Running requests that may be expected to miss their SLO for each one that comes."""


@dataclass(frozen=True, eq=False)
class Forecast:
    """Of the first b candidates. Arrays are float64 [times, b], b from `fewest`; sums are over
    requests i that go on with probability p_i, at the length s_i that they have by then."""

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
    """Time to compute the rest of prompts under way, and those of who is admitted, [b]."""
    slo_s: FloatArray
    """The least SLO on the time per token, [b]."""
    ahead_s: FloatArray
    """`slack_s` of each running request, [running]: ascending,"""
    going_on: FloatArray
    """and how likely each of these goes on, [times, running]."""
    pace: float
    """`SystemState.pace`."""
    known: int
    """Requests that run or wait."""
    free: float
    """Device tokens that there are for blocks of their own."""
    expected_short: FloatArray
    """Of these, those missing on average if all is cached; negative where all fits;"""
    short: FloatArray
    """and `DEVIATIONS` above that, at most as if nobody ended before its bound."""

    @classmethod
    def of(cls, state: SystemState, waiting: int, fewest: int | None = None) -> Forecast:
        """With up to so many of the waiting requests; of more than `MANY`, as many as fit now.
        There must be a candidate.

        Args:
            fewest: least b, if not as the attribute says: some of those that run may pause.
        """
        if waiting > MANY:
            waiting = _fitting_now(state, waiting)
        if fewest is None:
            fewest = max(1, len(state.running))
        requests, block = running_and(state, waiting), state.memory.block_tokens
        generated = requests.tokens - requests.prompt_tokens
        left = np.maximum(requests.max_new_tokens - generated, 1)
        steps = _times(left)
        hazard = state.lengths.cumulative_hazard(generated, requests.priority, steps)
        bounded = steps[:, None] < left
        tokens, shared = requests.tokens + steps[:, None], requests.shared_tokens
        evict = evictable(tokens, shared, block).astype(np.float64)
        charged = charge(tokens, shared, block).astype(np.float64)
        goes_on = np.exp(-hazard) * bounded
        evicts, holds = goes_on * evict, goes_on * charged
        rows, all_tokens, evictable_tokens, squares, prefix, held, variance, in_doubt, most = (
            _first_sums(
                fewest,
                (goes_on, None),
                (goes_on, tokens),
                (evicts, None),
                (evicts, evict),
                (evicts, shared[None]),
                (holds, None),
                (holds, charged - holds),
                (holds, hazard),
                (bounded, charged),
            )
        )
        deviation = np.sqrt(DEVIATIONS**2 * variance + (state.lengths.doubt * in_doubt) ** 2)
        free = state.memory.device_tokens - unowned_tokens(state)
        nobody = np.zeros(len(state.running) + 1)
        prompts = np.append(nobody, prompts_s(state, slice(waiting))) + under_way_s(state)
        slack = slack_s(state, 1.0)
        order = np.argsort(slack)
        return cls(
            steps=steps,
            memory=state.memory,
            latency=state.latency,
            fewest=fewest,
            rows=rows,
            tokens=all_tokens,
            evictable=evictable_tokens,
            squares=squares,
            prefix=prefix,
            prompts_s=prompts[fewest:],
            slo_s=slos_s(state, waiting)[fewest:],
            ahead_s=slack[order],
            going_on=goes_on[:, order],
            pace=state.pace,
            known=len(state.running) + len(state.waiting),
            free=float(free),
            expected_short=held - free,
            short=np.minimum(held + deviation, most) - free,
        )

    def solve(self, most: int | None = None, keep_slo: bool = True, may_pause: bool = True) -> int:
        """The smallest of the best batch sizes: all that fit without restoring anything; beyond
        that, the one that makes most tokens per second until they and those who are left over
        have ended. Where memory will be short, part of each is restored in every step, or some
        pause, whichever is faster.

        Args:
            most: b is at most this.
            keep_slo: at any time ahead the time per token must keep the SLO.
            may_pause: where not, no step may be short of more than it can restore.

        Returns:
            b; `fewest` if none is possible.
        """
        steps = self._steps(may_pause)
        rate = self._rate(steps.seconds / steps.decodes)
        sizes = self.fewest + np.arange(len(rate))
        length = float(self.tokens[:, -1].sum() / self.rows[:, -1].sum())
        value = rate_of_all(rate, sizes, self.slo_s, self.known, length, self.latency)
        value[~(steps.possible | steps.pauses).all(axis=0)] = 0.0
        if keep_slo:
            pauses, spent_s = steps.pauses, self._spent_s(steps)
            if self.memory.host_tokens > 0:  # else whoever pauses is prefilled again: too dear
                pauses = pauses & (self.expected_short > 0.0)
                value[~self._in_turns(spent_s, steps.decodes, SLO_SHARE)] = 0.0
            # Nobody should have to pause at once.
            value[steps.pauses[0] | ~self._sitting_out(spent_s, pauses, SLO_SHARE)] = 0.0
        if most is not None:
            value[most + 1 - self.fewest :] = 0.0
        cached = np.flatnonzero((value > 0.0) & (self.short <= 0.0).all(axis=0))
        first = int(cached[-1]) if len(cached) else 0
        if (best := value[first:].max()) <= 0.0:
            return self.fewest
        return self.fewest + first + int((value[first:] >= (1.0 - TOLERANCE) * best).argmax())

    def taking_turns(self, share: float) -> int:
        """The most requests that keep this share of their SLO if, where memory will be short, all
        take turns on the device, or part of each is restored in every step, whichever is faster.

        Returns:
            b; less than `fewest` if not even these do.
        """
        steps = self._steps(may_pause=True)
        in_time = self._in_turns(self._spent_s(steps), steps.decodes, share)
        return self.fewest - 1 + int(np.logical_and.accumulate(in_time).sum())

    def _steps(self, may_pause: bool) -> _Steps:
        """What a step does where memory is short, by whichever is faster."""
        seconds, possible = self._restoring()
        decodes, pauses = np.ones(seconds.shape), np.zeros(seconds.shape, np.bool_)
        short = np.flatnonzero((self.short > 0.0).any(axis=0))
        if may_pause and len(short):
            # Where nothing is short nobody has to pause; those sizes are mostly the first ones.
            sizes = slice(int(short[0]), None)
            share, pausing_s = self._pausing(sizes)
            better = ~possible[:, sizes] | (pausing_s < share * seconds[:, sizes])
            pauses[:, sizes] = better
            np.copyto(decodes[:, sizes], share, where=better)
            np.copyto(seconds[:, sizes], pausing_s, where=better)
        return _Steps(seconds, decodes, pauses, possible)

    def _restoring(self) -> tuple[FloatArray, BoolArray]:
        """T with the least Σ n_i that fits into memory, the same share of each request's e_i, and
        whether it fits and a step may restore it; where not, T of nothing evicted."""
        evicted = least_evicted(self.memory, self.short)
        possible = evicted <= np.minimum(self.evictable, self.memory.max_restored_tokens)
        evicted = np.where(possible, evicted, 0.0)
        share = evicted / np.maximum(self.evictable, 1.0)
        work = StepWork(
            decode_rows=self.rows,
            decode_tokens=self.tokens,
            restored_tokens=evicted,
            restored_squares=share * share * self.squares,
            restored_prefix=share * self.prefix,
        )
        return self.latency.step_seconds(work), possible

    def _pausing(self, sizes: slice) -> tuple[FloatArray, FloatArray]:
        """If those pause for whom memory is short, each of whom keeps a block: the share that
        decodes, and T of a step of these; at these positions of [b]."""
        rows, short = self.rows[:, sizes], self.short[:, sizes]
        room = self.free - self.memory.block_tokens * rows
        runs = np.floor(rows * room / np.maximum(room + short, 1.0))
        runs = np.where(short > 0.0, np.maximum(runs, np.minimum(rows, 1.0)), rows)
        share = np.divide(runs, rows, out=np.ones_like(rows), where=rows > 0.0)
        # They grow by as many tokens, for which others are evicted, to be restored later.
        grown = np.where(short > 0.0, runs, 0.0)
        # What memory lacks is on the host as far as it has room; the rest is computed again.
        held = grown * np.minimum(self.memory.host_tokens / np.maximum(short, 1.0), 1.0)
        latency = fetching(self.latency, HostCopies(uncached=grown, held=held, capacity=held))
        tokens = share * self.tokens[:, sizes]
        return share, latency.step_seconds(StepWork(runs, tokens, restored_tokens=grown))

    def _rate(self, seconds: FloatArray) -> FloatArray:
        """Tokens per second that batches make, [b]. A time ahead counts for as many as are left
        then: whoever ends has made room for others, and few steps should pay for none.

        Args:
            seconds: per row that decodes at that time all of them do, [times, b].
        """
        left = self.rows / self.rows[0]
        made, spent = self._between(left * self.rows), self._between(left * seconds)
        return np.asarray(made.sum(axis=0) / spent.sum(axis=0))

    def _spent_s(self, steps: _Steps) -> FloatArray:
        """Time of all steps up to each time ahead but 0, [times - 1, b]."""
        return self.pace * self.summed(steps.seconds)

    def _in_turns(self, spent_s: FloatArray, decodes: FloatArray, share: float) -> BoolArray:
        """Whether those who come keep this share of their SLO, [b], if all take turns where some
        have to pause (who is furthest ahead of its SLO does: `pausing.turns`); and of the running
        requests no more than `MISSES` for each of them are expected to end behind theirs because
        of their prompts.

        Args:
            spent_s: see `_spent_s`.
            decodes: share of the requests that decode, [times, b].
        """
        allowed_s = share * self.slo_s * self.summed(decodes)
        own = (spent_s <= allowed_s).all(axis=0)
        return np.asarray(own & self._others_in_time(spent_s - allowed_s))

    def _sitting_out(self, spent_s: FloatArray, pauses: BoolArray, share: float) -> BoolArray:
        """`_in_turns` if those who come sit out all of these steps.

        Args:
            spent_s: see `_spent_s`.
            pauses: where some have to pause, [times, b].
        """
        slo_s = share * self.slo_s
        decodes = ~pauses[1:]
        decodes[-1] = True  # nobody pauses for ever
        taken = self.summed(np.where(pauses, 0.0, 1.0))
        own = ((taken >= spent_s / slo_s) | ~decodes).all(axis=0)
        return np.asarray(own & self._others_in_time(spent_s - slo_s * self.steps[1:, None]))

    def _others_in_time(self, behind_s: FloatArray) -> BoolArray:
        """Whether, because of the prompts of those who come, no more than `MISSES` of the running
        requests for each of them are expected to end behind their SLO, [b].

        Args:
            behind_s: by so much all fall behind from now to each time ahead but 0, [times - 1, b].
        """
        times, count = behind_s.shape
        late_s = np.empty((times + 1, count))
        late_s[0], late_s[1:] = 0.0, behind_s
        missed = self._missed(late_s + self.prompts_s)
        return np.asarray(missed - missed[0] <= MISSES * np.arange(count))

    def _missed(self, behind_s: FloatArray) -> FloatArray:
        """Running requests that are expected to end behind their SLO, [b].

        Args:
            behind_s: by so much all fall behind from now to each time ahead, [times, b].
        """
        needed_s = np.maximum(behind_s[1:], behind_s[:-1])
        if not len(self.ahead_s) or needed_s.max() <= self.ahead_s[0]:
            return np.zeros(needed_s.shape[1])
        late = np.searchsorted(self.ahead_s, needed_s)
        return np.asarray(self._ends[np.arange(len(late))[:, None], late].sum(axis=0))

    @cached_property
    def _ends(self) -> FloatArray:
        """How many of the first n in the order of `ahead_s` are expected to end up to each time
        ahead but 0 and after the one before it, [times - 1, n from 0]."""
        ends = np.zeros((len(self.steps) - 1, len(self.ahead_s) + 1))
        np.cumsum(self.going_on[:-1] - self.going_on[1:], axis=1, out=ends[:, 1:])
        return ends

    def summed(self, of: FloatArray) -> FloatArray:
        """What a figure [times, ...] per step adds up to, from now to each time ahead but 0."""
        between = self._between(of)
        return np.cumsum(between, axis=0, out=between)

    def _between(self, of: FloatArray) -> FloatArray:
        """What a figure [times, b] per step adds up to from each time to the next."""
        half = np.diff(self.steps)[:, None] / 2.0
        return np.asarray(half * (of[1:] + of[:-1]))


@dataclass(frozen=True, eq=False)
class _Steps:
    """Of a step at each time ahead, of each size: arrays [times, b]."""

    seconds: FloatArray
    """T."""
    decodes: FloatArray
    """Share of the requests that decode."""
    pauses: BoolArray
    """Where the others pause; else part of each is restored, if anything is short,"""
    possible: BoolArray
    """and this tells whether it can be."""


def _fitting_now(state: SystemState, waiting: int) -> int:
    """With how many of up to so many waiting requests the next step fits into memory and SLO: it
    gets no easier until some have ended, and to look far ahead for a thousand takes time."""
    # Those of the first ones that fit are mostly all that do.
    for most in (2 * MANY, waiting):
        first = min(most, waiting)
        problem = BatchProblem.of(state, first)
        limit_s = SLO_SHARE / state.pace * slos_s(state, first)
        sizes = np.arange(problem.fewest, problem.most + 1)
        _, _, fits = replace(problem, limit_s=limit_s).least(sizes)
        leading = problem.fewest + int(np.logical_and.accumulate(fits[1:]).sum())
        if leading < problem.most:
            break
    return max(min(leading, problem.most) - len(state.running), 0)


def _first_sums(
    fewest: int, *products: tuple[FloatArray | BoolArray, FloatArray | IntArray | None]
) -> FloatArray:
    """Of products of two arrays [times, candidates] each (or one alone), their sums over the first
    b, b from `fewest`: shape [products, times, b]."""
    times, count = products[0][0].shape
    sums = np.empty((len(products), times, count - fewest + 1))
    for total, (one, other) in zip(sums, products, strict=True):
        # Of those that are in any batch only the sum is needed: no array of all products is made.
        first, rest = one[:, :fewest], one[:, fewest:]
        if other is None:
            total[:, 0], total[:, 1:] = first.sum(axis=1), rest
        else:
            total[:, 0] = (first * other[:, :fewest]).sum(axis=1)
            np.multiply(rest, other[:, fewest:], out=total[:, 1:])
    return np.cumsum(sums, axis=-1, out=sums)


def _times(left: IntArray) -> IntArray:
    """0, times each `FACTOR` times as far as the one before, and the last steps before requests are
    at their bounds: `ENDS` of these at most, evenly spread. Memory is fullest before such an end.
    """
    further = max(math.ceil(math.log(int(left.max(initial=1)) / FIRST_STEPS, FACTOR)), 0)
    ends = np.sort(left - 1)
    ends = ends[np.append(True, ends[1:] > ends[:-1])]
    chosen = np.arange(ENDS) * (len(ends) - 1) // (ENDS - 1)
    times = {0, *(FIRST_STEPS * FACTOR**k for k in range(further + 1)), *ends[chosen].tolist()}
    return np.array(sorted(times))
