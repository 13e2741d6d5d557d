"""Which running requests take part, when memory cannot hold them all.

To restore part of every request in every step may cost more than to pause the last ones, without
their KV, until there is room for them again. The latency model decides: the first k
requests run for which k / T(k, r(k)) is best.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ellm_sgl.policies.base import FloatArray, IntArray, SystemState
from ellm_sgl.policies.problem.batch_size import BatchProblem
from ellm_sgl.policies.problem.candidates import Candidates, unowned_tokens

GAIN = 0.05
"""Requests begin to pause when that decodes so much more per second."""

RESUME_STEPS = 64
"""They resume when all that run then fit, fully cached, for so many further steps."""


def participants(state: SystemState, active: int) -> int:
    """How many of the running requests take part, from the first on; at least one.

    Args:
        active: how many took part in the step before.
    """
    count = len(state.running)
    if active == count and _short_tokens(state, 0)[count] <= 0:
        return count
    sizes = np.arange(1, count + 1)
    _, seconds, fits = _problem(state).least(sizes)
    value = np.where(fits, sizes / seconds, 0.0)
    best = int(value[:active].argmax()) + 1
    if value[best - 1] > (1.0 + GAIN) * value[active - 1]:
        return best
    return max(active, _resumed(state, active))


def evicted_tokens(state: SystemState, active: int) -> IntArray:
    """Tokens of KV to evict of each running request, so that the first `active` are cached as far
    as they can be: most of the last requests. All zero for those that take part."""
    count = len(state.running)
    candidates = Candidates.of(state)
    short = _short_tokens(state, RESUME_STEPS)[active] + int(candidates.evictable[active:].sum())
    needed = max(short, 0)
    after = np.cumsum(candidates.evictable[::-1])[::-1] - candidates.evictable  # by later requests
    block = state.memory.block_tokens
    tokens = np.clip(-(-(needed - after) // block) * block, 0, candidates.evictable)
    tokens[: min(active, count)] = 0
    return np.asarray(tokens, np.int64)


def _problem(state: SystemState) -> BatchProblem:
    """Eq. (1) for the first k running requests; SLOs aside, because somebody has to wait."""
    problem = BatchProblem.of(state, 0)
    return dataclasses.replace(
        problem,
        short=_short_tokens(state, 0),
        limit_s=np.full(len(problem.limit_s), np.inf),
    )


def _short_tokens(state: SystemState, ahead: int) -> FloatArray:
    """Device tokens missing if the first k requests are cached, `ahead` steps on, while the
    others hold only what cannot be evicted."""
    candidates = Candidates.of(state, ahead=ahead)
    held = float((candidates.charged - candidates.evictable).sum())
    cached = np.concatenate(([0.0], np.cumsum(candidates.evictable, dtype=np.float64)))
    return cached + (held + unowned_tokens(state) - state.memory.device_tokens)


def _resumed(state: SystemState, active: int) -> int:
    """The largest number of requests that fit for a while, and of which those that resume
    can be restored in one step."""
    fits = _short_tokens(state, RESUME_STEPS)[1:] <= 0.0
    back = np.cumsum(np.where(np.arange(len(fits)) < active, 0, state.running.uncached_tokens))
    possible = np.flatnonzero(fits & (back <= state.memory.max_restored_tokens))
    return int(possible[-1]) + 1 if len(possible) else 1
