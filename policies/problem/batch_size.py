"""How many requests run: the eLLM paper's Eq. (1) over batch size and ratio, in whole requests.

For a batch of the first b requests, T rises with what is restored, and memory asks for a least
amount of it: so each b has one amount that matters, and that one is known in closed form.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ellm_sgl.latency import LatencyModel, StepWork
from ellm_sgl.policies.base import BoolArray, FloatArray, IntArray, MemoryState, SystemState
from ellm_sgl.policies.problem.candidates import (
    TOLERANCE,
    Candidates,
    evicted_at,
    least_evicted,
    share_for,
    slos_s,
    unowned_tokens,
    work_of,
)


@dataclass(frozen=True, eq=False)
class BatchProblem:
    """Eq. (1) for the first b candidates. Arrays have one entry for each b from 0."""

    candidates: Candidates
    memory: MemoryState
    latency: LatencyModel
    fewest: int
    """Least b: the running requests, or the one request that would be alone."""
    tokens: FloatArray
    """Σ s_i."""
    evictable: FloatArray
    """Σ e_i."""
    squares: FloatArray
    """Σ e_i²."""
    prefix: FloatArray
    """Σ e_i a_i."""
    short: FloatArray
    """Device tokens that are missing if all is cached; negative where all fits."""
    limit_s: FloatArray
    """SLO - WT_max."""

    @classmethod
    def of(cls, state: SystemState, most: int) -> BatchProblem:
        """The problem with up to `most` waiting requests, at their present lengths."""
        candidates = Candidates.of(state, most)
        evictable = candidates.evictable.astype(np.float64)
        columns = np.zeros((5, len(evictable) + 1))
        columns[:, 1:] = (
            candidates.tokens,
            evictable,
            evictable * evictable,
            evictable * candidates.shared,
            candidates.charged,
        )
        tokens, sums, squares, prefix, charged = np.cumsum(columns, axis=1)
        waited_s = float(state.running.waited_s.max(initial=0.0))
        return cls(
            candidates=candidates,
            memory=state.memory,
            latency=state.latency,
            fewest=max(1, len(state.running)),
            tokens=tokens,
            evictable=sums,
            squares=squares,
            prefix=prefix,
            short=charged + (unowned_tokens(state) - state.memory.device_tokens),
            limit_s=slos_s(state, most) - waited_s,
        )

    @property
    def most(self) -> int:
        """Largest b: all candidates."""
        return len(self.tokens) - 1

    def solve(self) -> int:
        """The best b, by looking at every one."""
        return self.best_of(np.arange(self.fewest, self.most + 1))

    def best_of(self, sizes: IntArray) -> int:
        """The smallest of the best of these batch sizes.

        All that fit without restoring anything are in; b / T decides about more than that.

        Args:
            sizes: values of b, ascending.

        Returns:
            b; `fewest` if none of them fits.
        """
        evicted, seconds, fits = self.least(sizes)
        value = np.where(fits, sizes / seconds, 0.0)
        cached = np.flatnonzero(fits & (evicted == 0.0))
        first = int(cached[-1]) if len(cached) else 0
        while (best := value[first:].max()) > 0.0:
            choice = first + int((value[first:] >= (1.0 - TOLERANCE) * best).argmax())
            size = int(sizes[choice])
            if evicted[choice] == 0.0 or self._fits_rounded(size, float(evicted[choice])):
                return size
            value[choice] = 0.0
        return self.fewest

    def least(self, sizes: IntArray) -> tuple[FloatArray, FloatArray, BoolArray]:
        """For each of these batch sizes: the least Σ n_i that fits into memory, T with the same
        share of each request's e_i evicted, and whether that keeps all bounds. T of none evicted
        where no such share fits."""
        evicted = least_evicted(self.memory, self.short[sizes])
        evictable = self.evictable[sizes]
        fits = (evicted <= evictable) & (evicted <= self.memory.max_restored_tokens)
        taken = np.where(fits, evicted, 0.0)
        share = taken / np.maximum(evictable, 1.0)
        seconds = self.latency.step_seconds(
            StepWork(
                decode_rows=sizes,
                decode_tokens=self.tokens[sizes],
                restored_tokens=taken,
                restored_squares=share * share * self.squares[sizes],
                restored_prefix=share * self.prefix[sizes],
            )
        )
        return evicted, seconds, fits & (seconds <= self.limit_s[sizes])

    def _fits_rounded(self, size: int, tokens: float) -> bool:
        """Whether the first `size` requests keep the SLO with whole blocks evicted of each."""
        first, block = self.candidates[:size], self.memory.block_tokens
        evicted = evicted_at(first, share_for(first, tokens, block), block)
        if evicted.sum() > self.memory.max_restored_tokens:
            return False
        seconds = float(self.latency.step_seconds(work_of(first, evicted)))
        return seconds <= float(self.limit_s[size])
