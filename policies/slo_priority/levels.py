"""How urgent requests are, relative to one another."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ellm_sgl.policies.base import FloatArray, IntArray, Requests, SystemState
from ellm_sgl.policies.problem.candidates import SLO_SHARE, slack_s

LEVELS = 4
"""Levels told apart; what is less urgent than the third shares the fourth."""
LEVEL_FACTOR = 8.0
"""A token kept for a request of one level is worth that of so many of the next. More than the
factors within a level multiply to, so that no less urgent request ever weighs more."""
AGE_S = 60.0
"""A waiting request goes ahead of requests one level above it that arrive so much later; one that
runs counts as one level more urgent when it has paused for others so long in all."""


@dataclass(frozen=True, eq=False)
class Levels:
    """Levels of the requests of one state: 0 is the most urgent, LEVELS - 1 the least."""

    running: IntArray
    waiting: IntArray
    order: IntArray
    """Positions of the waiting requests in the order in which they should be admitted."""
    several: bool
    """Whether there is more than one."""


class Overtaken:
    """For how long each running request has paused until there is room, in all, while it was not
    ahead of its SLO.

    What counts is the sum: were it the last pause alone, a request would come back for a token and
    pause as long again for each of those to follow.
    """

    def __init__(self) -> None:
        self._paused: IntArray = np.zeros(0, np.int64)
        """Ids of those that have paused since the iteration before."""
        self._seconds: dict[int, float] = {}
        self._busy_s = math.inf
        """`SystemState.busy_s` of the iteration before."""

    def note(self, paused: IntArray) -> None:
        """The requests with these ids pause until the next iteration."""
        self._paused = paused

    def aged(self, state: SystemState, level: IntArray) -> IntArray:
        """The running requests' levels, each less by one for every AGE_S that it has paused."""
        passed = max(state.busy_s - self._busy_s, 0.0)
        self._busy_s = state.busy_s
        if not (len(self._paused) or self._seconds):
            return level
        ids, slack = state.running.request_id, slack_s(state, SLO_SHARE)
        late = np.isin(ids, self._paused) & ((slack < 0.0) | np.isinf(slack))
        before = [self._seconds.get(i, 0.0) for i in ids.tolist()]
        seconds = np.array(before) + passed * late
        pairs = zip(ids.tolist(), seconds.tolist(), strict=True)
        self._seconds = {i: s for i, s in pairs if s > 0.0}
        return np.asarray(np.maximum(level - seconds // AGE_S, 0), np.int64)


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
    overtaken only by those that arrive at most (LEVELS - 1) · AGE_S after it; also while others
    pause (see `admission.admit`).
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
