"""How urgent requests are, relative to one another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ellm_sgl.policies.base import FloatArray, IntArray, Requests

LEVELS = 4
"""Levels told apart; what is less urgent than the third shares the fourth."""
LEVEL_FACTOR = 8.0
"""A token kept for a request of one level is worth that of so many of the next. More than the
factors within a level multiply to, so that no less urgent request ever weighs more."""
AGE_S = 60.0
"""A waiting request goes ahead of requests one level above it that arrive so much later."""


@dataclass(frozen=True, eq=False)
class Levels:
    """Levels of the requests of one state: 0 is the most urgent, LEVELS - 1 the least."""

    running: IntArray
    waiting: IntArray
    order: IntArray
    """Positions of the waiting requests in the order in which they should be admitted."""
    several: bool
    """Whether there is more than one."""


def rank_levels(running: Requests, waiting: Requests) -> Levels:
    """Rank by priority; of equal priority, requests with an SLO go first."""
    count = len(running)
    urgency = np.concatenate((_urgency(running), _urgency(waiting)))
    kinds = np.unique(urgency)
    level = np.minimum(len(kinds) - 1 - np.searchsorted(kinds, urgency), LEVELS - 1)
    order = queue_order(waiting, level[count:])
    return Levels(running=level[:count], waiting=level[count:], order=order, several=len(kinds) > 1)


def _urgency(requests: Requests) -> IntArray:
    slo = np.minimum(requests.tpot_slo_s, requests.ttft_slo_s)
    return 2 * requests.priority + np.isfinite(slo)


def queue_order(waiting: Requests, level: IntArray) -> IntArray:
    """Positions of the waiting requests in the order in which they should be admitted.

    By arrival, delayed by `AGE_S` per level. So urgent requests go first, and a request can be
    overtaken only by those that arrive at most (LEVELS - 1) · AGE_S after it.
    """
    return np.lexsort((waiting.request_id, waiting.arrival_s + AGE_S * level))


def keep_weights(level: IntArray, tpot_slo_s: FloatArray, arrival_s: FloatArray) -> FloatArray:
    """What a recomputed token of each request counts, relative to others; at least 1.

    Levels differ by LEVEL_FACTOR. Within a level a tighter SLO counts up to twice as much, and so
    does earlier arrival: if the newest requests are evicted first, the others go on at full
    speed and finish, and their memory brings the newest back. Spread evenly, the same restoration
    would slow all of them down, and no request could pause to spare the step any.
    """
    count = len(level)
    tightest = tpot_slo_s.min(initial=np.inf)
    tightness = 1.0 + (tightest / tpot_slo_s if np.isfinite(tightest) else 0.0)
    seniority = np.empty(count)
    seniority[np.argsort(-arrival_s, kind="stable")] = 1.0 + np.arange(count) / max(count, 1)
    weights: FloatArray = LEVEL_FACTOR ** (LEVELS - 1 - level) * tightness * seniority
    return weights
