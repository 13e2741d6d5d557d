"""Who pauses first, and who comes back: whoever is furthest ahead of its SLO can best wait.

Slack is the time by which a request is ahead of its SLO. It grows with every step that is faster
than the SLO, and falls by all the time of a pause. So those with most of it pause, those with least
come back first, and one whose slack runs out changes places with one that has plenty: together they
sit out what memory lacks, and none of them misses its SLO while their slack lasts. Once that of a
paused request is used up, it waits until there is room anyway: one misses the SLO instead of many.
Without an SLO slack is infinite, and the last pause first.
"""

from __future__ import annotations

import numpy as np

from ellm_sgl.policies.base import BoolArray, FloatArray, IntArray, SystemState
from ellm_sgl.policies.problem.candidates import decode_seconds

RESERVE_STEPS = 32
"""Whoever pauses comes back, where others can take its place, before its slack is less than the
time of so many steps."""
AMPLE_STEPS = 2 * RESERVE_STEPS
"""With slack for so many steps, and KV that has to be computed again, the last to come pauses
first: it has least of it, and comes back into the smallest gap."""
GAP = 3
"""The other has at least so many times that more slack: else they change places all the time."""
COST = 0.05
"""Bringing its KV back may take such a share of the time that the other can wait."""


def pause_order(
    request_id: IntArray,
    slack_s: FloatArray,
    paused: BoolArray,
    level: IntArray,
    ample_s: float = np.inf,
) -> IntArray:
    """The running requests in the order in which they should take part: by urgency; then those
    with an SLO, first those that do already, then the paused ones as they come back; then the
    others as they came. The last of all pause first.

    Args:
        ample_s: slack from which on it does not matter who has more of it.
    """
    free = np.isinf(slack_s)
    out, slack = paused & ~free, np.where(free, 0.0, slack_s)
    lost, ample = out & (slack < 0.0), ~out & (slack >= ample_s)
    rank = np.where(lost, -slack, np.where(ample, 0.0, slack))
    return np.lexsort((request_id, rank, ample, lost, out, free, level))


def exchange(state: SystemState, slack_s: FloatArray, paused: BoolArray, level: IntArray) -> None:
    """Let the paused request whose slack runs out first, if any does, change places with the
    active one that is furthest ahead and not more urgent; in `paused`."""
    waiting = np.flatnonzero(paused & (slack_s >= 0.0))
    if not len(waiting):
        return
    back = int(waiting[slack_s[waiting].argmin()])
    others = np.flatnonzero(~paused & (level >= level[back]))
    reserve_s = RESERVE_STEPS * decode_seconds(state, ~paused)
    if slack_s[back] >= reserve_s or not len(others):
        return
    away = int(others[slack_s[others].argmax()])
    active = ~paused
    active[back] = True
    cost_s = decode_seconds(state, active) - reserve_s / RESERVE_STEPS
    if slack_s[away] - slack_s[back] >= max(GAP * reserve_s, cost_s / COST):
        paused[back], paused[away] = False, True
