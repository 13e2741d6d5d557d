"""Memory, work and SLO of the first b candidates: the constraints of Eq. (1).

Device memory is counted in tokens, in whole blocks. A request is charged for its blocks that no
other request uses, with room for one more token; shared blocks are counted once, as the memory
that is in use now beyond all such blocks. What can be evicted of a request is its blocks but the
shared ones and the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from ellm_sgl.latency import StepWork
from ellm_sgl.policies.base import (
    Batch,
    BoolArray,
    FloatArray,
    IntArray,
    MemoryState,
    Ratios,
    Requests,
    SystemState,
)
from ellm_sgl.policies.planned import Admitted, evictable, running_and
from ellm_sgl.policies.problem.on_host import copies_of, fetching

SLO_SHARE = 0.95
"""Of an SLO on the time per token, that is planned with: a request may meet slower steps than the
mean one, and what was not foreseen."""


@dataclass(frozen=True, eq=False)
class Candidates:
    """Requests that may run together, in columns; the running ones come first."""

    request_id: IntArray
    tokens: IntArray
    """s_i, after `ahead` further steps."""
    shared: IntArray
    """Tokens of blocks that other requests use too."""
    evictable: IntArray
    """e_i: tokens that can be evicted; a multiple of the block size."""
    charged: IntArray
    """Device tokens of the request if all of it is cached, shared blocks excluded."""

    @classmethod
    def of(cls, state: SystemState, admit: Admitted = (), ahead: int = 0) -> Candidates:
        """The running requests and, of the waiting ones, those to `admit`, in order.

        Args:
            ahead: steps to look ahead: every request is taken to be longer by so many tokens, or by
                the tokens that it may still generate if these are fewer.
        """
        return _candidates(state, admit or (), ahead)

    def __getitem__(self, chosen: slice | BoolArray) -> Candidates:
        return Candidates(**{name: column[chosen] for name, column in vars(self).items()})


@lru_cache(maxsize=2)  # within one decision several ask for the same
def _candidates(state: SystemState, admit: Admitted, ahead: int) -> Candidates:
    requests, block = running_and(state, admit), state.memory.block_tokens
    tokens, shared = requests.tokens, requests.shared_tokens
    if ahead:
        generated = tokens - requests.prompt_tokens
        remaining = np.maximum(requests.max_new_tokens - generated, 0)
        tokens = tokens + np.minimum(remaining, ahead)
    return Candidates(
        request_id=requests.request_id,
        tokens=tokens,
        shared=shared,
        evictable=evictable(tokens, shared, block),
        charged=charge(tokens, shared, block),
    )


def charge(tokens: IntArray, shared: IntArray, block_tokens: int) -> IntArray:
    """Device tokens of each request if all of it is cached: its own blocks, with room for one more
    token."""
    return np.asarray((tokens // block_tokens + 1 - -(-shared // block_tokens)) * block_tokens)


def ratios_of(evicted: IntArray, tokens: IntArray) -> FloatArray:
    """r_i that evict n_i of s_i tokens: of the middle of a token, so that rounding down to whole
    blocks gives n_i."""
    return np.where(evicted > 0, (evicted + 0.5) / tokens, 0.0)


def ratios_for(
    state: SystemState, batch: Batch, evicted: IntArray | None, eventually: bool = True
) -> Ratios:
    """The answer by which n_i of each running and each admitted request is evicted, nothing if
    `evicted` is None.

    Args:
        eventually: those admitted are said to come to at least their eventual ratio.
    """
    count = len(state.running)
    eventual = _eventual_ratio(state, batch.admit) if batch.admit and eventually else 0.0
    if evicted is None:
        return Ratios(np.zeros(count), np.full(len(batch.admit), eventual))
    ratios = ratios_of(evicted, running_and(state, batch.admit).tokens)
    return Ratios(ratios[:count], np.maximum(ratios[count:], eventual))


def _eventual_ratio(state: SystemState, admit: tuple[int, ...]) -> float:
    """The uncached ratio that the running and these waiting requests would come to if all got as
    long as they may. The server's own admission accounting reckons with that, and has to let in
    those that were chosen because most end before."""
    longest = Candidates.of(state, admit, LONGEST)
    needed = float(least_evicted(state.memory, short_tokens(state, longest)))
    return min(needed, int(longest.evictable.sum())) / int(longest.tokens.sum())


LONGEST = 1 << 40
"""Steps after which every request has all the tokens that it may generate."""


def short_tokens(state: SystemState, candidates: Candidates) -> int:
    """Device tokens that are missing if all is cached; negative where all fits."""
    return int(candidates.charged.sum()) + unowned_tokens(state) - state.memory.device_tokens


@lru_cache(maxsize=1)
def unowned_tokens(state: SystemState) -> int:
    """Device tokens in use now, beyond the running requests' own blocks: shared blocks, and
    what the server holds beside its running requests."""
    running, block = state.running, state.memory.block_tokens
    own = -(-running.tokens // block) + -running.shared_tokens // block
    own = own + -running.uncached_tokens // block  # -n // m is less the whole blocks that hold n
    used = state.memory.device_tokens - state.memory.device_free_tokens
    return max(0, used - int(np.maximum(own, 0).sum()) * block)


def least_evicted(memory: MemoryState, short: FloatArray | float) -> FloatArray:
    """Σ n_i that covers a shortage: whole blocks, and M_o for the tokens that they restore.

    Args:
        short: device tokens that are missing if all is cached; may be negative.

    Returns:
        Tokens; inf if eviction gains nothing, because M_o takes all of it.
    """
    gain = 1.0 - memory.staging_overhead
    if gain <= 0.0:
        return np.where(np.greater(short, 0.0), np.inf, 0.0)
    blocks = np.ceil(np.maximum(short, 0.0) / (gain * memory.block_tokens))
    return np.asarray(blocks * memory.block_tokens, np.float64)


def to_evict(memory: MemoryState, short: FloatArray | float) -> FloatArray:
    """Σ n_i of requests that run in any case: as `least_evicted`; and where M_o takes all that
    eviction gains, what is missing. So much of it as has no room to be fetched is computed again.
    """
    if memory.staging_overhead >= 1.0:
        memory = replace(memory, staging_overhead=0.0)
    return least_evicted(memory, short)


def gained(memory: MemoryState) -> float:
    """Device tokens for each token that is evicted of requests that run in any case."""
    return 1.0 - memory.staging_overhead if memory.staging_overhead < 1.0 else 1.0


def evicted_at(candidates: Candidates, share: float, block_tokens: int) -> IntArray:
    """n_i of each request if one share ρ of e_i, in [0, 1], is evicted.

    Rounded to whole blocks, up or down by a number that belongs to the request and spreads
    evenly over requests: so the sum follows the share closely even if all are of one length,
    and a request's blocks stay as they are while share and length do.
    """
    blocks = candidates.evictable // block_tokens
    rounded = np.floor(share * blocks + _spread(candidates)).astype(np.int64)
    return np.minimum(rounded, blocks) * block_tokens


def _spread(candidates: Candidates) -> FloatArray:
    """A number in [0, 1) that belongs to each request; spread evenly over requests."""
    return np.asarray(candidates.request_id * GOLDEN % 1.0)


TOLERANCE = 0.005
"""Of batch sizes within this of the best, the smallest is taken: it restores least."""
GOLDEN = (5**0.5 - 1) / 2
"""Its multiples modulo 1 spread evenly over [0, 1), however many there are (Weyl)."""
BISECTIONS = 16
"""Leaves less than b / 2¹⁵ blocks between the two ends."""


def share_for(candidates: Candidates, tokens: float, block_tokens: int) -> float:
    """The least share whose `evicted_at` add up to so many tokens; 1 if they cannot."""
    evictable = float(candidates.evictable.sum())
    if tokens >= evictable:
        return 1.0
    guess, error = tokens / evictable, len(candidates.tokens) * block_tokens / evictable
    low, high = max(0.0, guess - error), min(1.0, guess + error)
    blocks, needed = candidates.evictable // block_tokens, tokens / block_tokens
    spread = _spread(candidates)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if np.minimum(np.floor(middle * blocks + spread), blocks).sum() >= needed:
            high = middle
        else:
            low = middle
    return high


def work_of(candidates: Candidates, evicted: IntArray) -> StepWork:
    """The decode step of these candidates, of which the n_i = `evicted` tokens are recomputed."""
    n = evicted.astype(np.float64)
    return StepWork(
        decode_rows=len(candidates.tokens),
        decode_tokens=float(candidates.tokens.sum()),
        restored_tokens=float(n.sum()),
        restored_squares=float(n @ n),
        restored_prefix=float(n @ candidates.shared),
    )


def under_way_s(state: SystemState) -> float:
    """Time for which those who decode have yet to wait for prompts under way."""
    left = state.prefill_left
    return float(state.latency.step_seconds(left)) if left.prefill_rows else 0.0


def prompts_s(state: SystemState, waiting: slice | IntArray) -> FloatArray:
    """Time to compute the prompts of the first, the first two, ... of these waiting requests."""
    tokens, shared = state.waiting.tokens[waiting], state.waiting.shared_tokens[waiting]
    if not len(tokens):
        return np.zeros(0)
    rows, pairs = (tokens - shared).cumsum(), ((tokens - shared) * (tokens + shared) / 2).cumsum()
    work = StepWork(0, 0, prefill_rows=rows, prefill_pairs=pairs)
    return np.broadcast_to(state.latency.step_seconds(work), rows.shape)


def decode_seconds(state: SystemState, runs: slice | BoolArray = slice(None)) -> float:
    """Time of a decode step of these running requests, by tokens cached and restored."""
    tokens, uncached = state.running.tokens[runs], state.running.uncached_tokens[runs]
    work = StepWork(len(tokens), float(tokens.sum()), restored_tokens=float(uncached.sum()))
    return float(fetching(state.latency, copies_of(state, runs)).step_seconds(work))


def step_limit_s(state: SystemState, admit: Sequence[int] = ()) -> float:
    """Most seconds that a step may take, SLO - WT_max of Eq. (1), where these waiting requests are
    admitted.

    The SLO is the least of the server's and those of all requests that take part
    (`attainable_slo_s`); WT_max is the time since that running request's last token for which it
    is longest.
    """
    waited = float(state.running.waited_s.max(initial=0.0))
    running = attainable_slo_s(state, state.running)
    admitted = attainable_slo_s(state, state.waiting, list(admit))
    return min(float(running.min(initial=np.inf)), float(admitted.min(initial=np.inf))) - waited


def slos_s(state: SystemState, most: int) -> FloatArray:
    """The least TPOT SLO of the first b candidates (`attainable_slo_s`), [b] from 0: the running
    requests count for every b."""
    least = float(attainable_slo_s(state, state.running).min(initial=np.inf))
    waiting = attainable_slo_s(state, state.waiting, slice(most))
    run = np.full(len(state.running) + 1, least)
    return np.minimum.accumulate(np.concatenate((run, waiting)))


def attainable_slo_s(
    state: SystemState, requests: Requests, which: slice | list[int] = slice(None)
) -> FloatArray:
    """The TPOT SLO of each of these requests, its own or the server's, whichever is less, but for
    one that it would miss even alone: nobody is held back for the sake of what cannot be."""
    own_s, tokens = requests.tpot_slo_s[which], requests.tokens[which]
    if not len(own_s) or not (np.isfinite(own_s).any() or np.isfinite(state.tpot_slo_s)):
        return own_s
    alone_s = state.latency.step_seconds(StepWork(np.ones(len(tokens)), tokens.astype(np.float64)))
    least_s = state.pace * alone_s / SLO_SHARE
    slos_s = own_s, np.full(len(own_s), state.tpot_slo_s)
    return np.minimum(*(np.where(each < least_s, np.inf, each) for each in slos_s))


def slack_s(state: SystemState, share: float) -> FloatArray:
    """Time by which each running request is ahead of this share of its TPOT SLO, [running];
    negative: behind; inf: it has none. All of a pause counts at once."""
    return ahead_s(state.running, share * np.minimum(state.running.tpot_slo_s, state.tpot_slo_s))


def ahead_s(running: Requests, slo_s: FloatArray) -> FloatArray:
    """`slack_s` for these TPOT SLOs, [running]."""
    further = np.maximum(running.tokens - running.prompt_tokens, 0)  # the last one has no KV
    allowed_s = np.full(len(running), np.inf)
    np.multiply(slo_s, further, out=allowed_s, where=np.isfinite(slo_s))
    tpot_s = np.where(np.isnan(running.tpot_s), 0.0, running.tpot_s)
    return np.asarray(allowed_s - tpot_s * further - running.waited_s)
