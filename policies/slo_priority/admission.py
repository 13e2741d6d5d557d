"""Which waiting requests are admitted, where some are more urgent than others, and how often the
prompts of less urgent ones may hold up more urgent ones that decode."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ellm_sgl.latency import StepWork
from ellm_sgl.policies.base import BoolArray, FloatArray, IntArray, Requests, SystemState
from ellm_sgl.policies.planned import evictable_tokens, running_and, select
from ellm_sgl.policies.problem.candidates import (
    SLO_SHARE,
    decode_seconds,
    least_evicted,
    prompts_s,
    slack_s,
    slos_s,
)
from ellm_sgl.policies.problem.forecast import FIRST_STEPS, Forecast
from ellm_sgl.policies.problem.under_way import as_running
from ellm_sgl.policies.slo_priority.levels import LEVELS, Levels
from ellm_sgl.policies.slo_priority.schedule import MAX_STEPS_PER_TOKEN
from ellm_sgl.policies.slo_priority.schedule import SLO_SHARE as STEPS_SHARE

BRIEF_S = 0.1
"""Longest prefill of several requests while requests that are more urgent may come."""
MOST_ADMITTED = 64
"""Requests that one iteration admits; the next one can go on."""
PREFILL_SHARE = 0.125
"""Of the time in which requests of different urgency are there: prompts of less urgent ones, while
more urgent requests decode."""
MOST_SAVED_S = 10.0
"""A longer prompt need not save up more: it waits this / PREFILL_SHARE at most."""
PATIENCE = 2.0
"""A prompt that takes longer than the more urgent requests are ahead of their SLO saves up so many
times its time: most of them have got further by then. A request that has just begun is ahead by
next to nothing, and if its answer is short it cannot make up for the prompt."""
CONTENDED_S = 30.0
"""For so long after requests of different urgency were seen, others are expected."""


class PrefillBudget:
    """Time saved up for prompts of less urgent requests while more urgent ones decode.

    Nothing decodes while a prompt is computed: one of 800 tokens may take as long as a dozen steps.
    So while more urgent requests decode, less urgent prompts have to save up for their time first.
    """

    def __init__(self) -> None:
        self._saved_s = 0.0
        self._until_s = math.inf
        self._busy_s = math.inf
        """`SystemState.busy_s` until then."""
        self._several = False
        self._contended_s = -math.inf
        self._offered: dict[int, float] = {}

    def note(self, state: SystemState, several: bool) -> None:
        """Time has passed, and of the requests that were offered some were admitted.

        Args:
            several: some requests are more urgent than others.
        """
        if several and self._several:
            saved_s = PREFILL_SHARE * max(state.busy_s - self._busy_s, 0.0)
            self._saved_s = min(self._saved_s + saved_s, MOST_SAVED_S)
        if several:
            self._contended_s = state.now_s
        self._until_s, self._busy_s, self._several = state.now_s, state.busy_s, several
        if self._offered:
            begun = np.concatenate((state.running.request_id, state.prefilling.request_id))
            admitted = self._offered.keys() & set(begun.tolist())
            self._saved_s = max(self._saved_s - sum(self._offered[i] for i in admitted), 0.0)
            self._offered = {}

    @property
    def contended(self) -> bool:
        """Whether somebody more urgent than those present may well come."""
        return self._until_s - self._contended_s < CONTENDED_S

    def affords(self, seconds: float) -> bool:
        """Whether enough has been saved up for a prompt of so many seconds."""
        return self._saved_s >= min(seconds, MOST_SAVED_S)

    def offer(self, waiting: Requests, seconds: FloatArray) -> None:
        """These may be admitted; their prompts take so long, each. inf where nobody is held up: who
        comes next finds nothing saved up, and so is not held up at once."""
        self._offered = dict(zip(waiting.request_id.tolist(), seconds.tolist(), strict=True))


def admit(
    state: SystemState, levels: Levels, budget: PrefillBudget, below: int = LEVELS
) -> tuple[int, ...] | None:
    """Positions in `state.waiting` of the requests that are admitted, in order; None if those first
    in line have to wait for `budget`.

    In one iteration requests of one level are admitted, since the first token of each has to wait
    for the prefill of all. How many is Eq. (1)'s answer; but of requests more urgent than some that
    run as many are admitted as memory allows at the others' expense (see `_at_others_expense`).
    While more urgent requests run, the prefill of less urgent ones takes no longer than a step, or
    is of one request, and `budget` says when.

    Args:
        below: only requests of lower levels, which are more urgent, are admitted: those of this
            level pause until there is room for them. Nobody goes ahead of one in line that has to
            wait for these: its age has brought it there.
    """
    seen = as_running(state)
    places = min(state.max_running - len(seen.running), MOST_ADMITTED)
    order = levels.order[: _leading(levels.waiting[levels.order] < below)]
    if places <= 0 or len(order) == 0:
        return ()
    order = affordable(state, levels, budget, order)[:places]
    if len(order) == 0:
        return None
    level = levels.waiting[order]
    order = order[: _leading(level == level[0])]
    several = len(state.running) > 0 and bool((levels.running != level[0]).any())
    line = _in_line(seen, order, ignore_slo=several)
    forecast = Forecast.of(line, len(order))
    count = forecast.solve() - len(line.running)
    if several and level[0] < levels.running.max():
        lower = np.flatnonzero(levels.running > level[0])
        count = max(count, _at_others_expense(line, lower, forecast))
    if several and level[0] <= levels.running.min():
        count = min(count, _in_time(seen, levels, order))
    return tuple(paced(state, levels, budget, order)[: max(count, 0)].tolist())


def affordable(
    state: SystemState, levels: Levels, budget: PrefillBudget, order: IntArray
) -> IntArray:
    """Of the requests at these positions in `state.waiting`, not empty, those that need not wait
    for `budget`: all, or those that are as urgent as the most urgent that run."""
    most_urgent = levels.running.min(initial=LEVELS)
    head = levels.waiting[order[0]]
    if head <= most_urgent:
        return order
    seconds = float(prompts_s(state, order[:1])[0])
    slack = slack_s(state, SLO_SHARE)[levels.running < head]
    if seconds > slack.min(initial=np.inf, where=slack >= 0.0):
        seconds *= PATIENCE
    if budget.affords(seconds):
        return order
    return np.asarray(order[levels.waiting[order] <= most_urgent])


def paced(state: SystemState, levels: Levels, budget: PrefillBudget, order: IntArray) -> IntArray:
    """Of these requests of one level, not empty, the first ones whose prompts hold up those that
    are, or may come to be, more urgent only for as long as they may; `budget` is told of them."""
    if not budget.contended:
        return order
    held_up = levels.waiting[order[0]] > levels.running.min(initial=LEVELS)
    seconds = prompts_s(state, order)
    limit_s = decode_seconds(state) if held_up else BRIEF_S
    first = select(state.waiting, order)
    if held_up:
        budget.offer(first, np.diff(seconds, prepend=0.0))
    elif not levels.several:
        budget.offer(first, np.full(len(order), np.inf))
    return order[: max(1, int(np.count_nonzero(seconds <= limit_s)))]


def _in_time(seen: SystemState, levels: Levels, order: IntArray) -> int:
    """How many of these, the most urgent of all, can join their like within the SLOs of both,
    while of the less urgent no more decode than must: nobody pauses for anyone less urgent, so that
    whoever has joined stays in every step. All, where one alone could not keep its SLO.

    Args:
        seen: with the prompts under way among the running, who count as their like.
    """
    known = len(levels.running)
    lower = levels.running > levels.waiting[order[0]]
    alike = np.append(np.flatnonzero(~lower), np.arange(known, len(seen.running)))
    line = replace(seen, running=select(seen.running, alike), waiting=select(seen.waiting, order))
    tokens = np.cumsum(running_and(line, len(order)).tokens)
    fewest = np.array([lower.sum(), seen.running.tokens[:known][lower].sum()]) / MAX_STEPS_PER_TOKEN
    work = StepWork(np.arange(1, len(tokens) + 1) + fewest[0], tokens + fewest[1])
    seconds = seen.pace * seen.latency.step_seconds(work)
    kept = seconds <= STEPS_SHARE * slos_s(line, len(order))[1:]
    if not kept[0]:
        return len(order)
    return _leading(kept[len(alike) :])


def _leading(true: BoolArray) -> int:
    """How many entries from the first on are true."""
    return int(np.logical_and.accumulate(true).sum())


def _in_line(state: SystemState, order: IntArray, ignore_slo: bool) -> SystemState:
    """The state with these requests waiting, in this order.

    Args:
        ignore_slo: leave out the requests' own SLOs, and for how long each has had no token:
            where levels differ, the lower ones pause at times for the sake of the others' SLOs.
    """
    waiting, running = select(state.waiting, order), state.running
    if ignore_slo:
        never = np.full(len(running), np.inf)
        running = replace(running, tpot_slo_s=never, waited_s=np.zeros(len(running)))
        waiting = replace(waiting, tpot_slo_s=np.full(len(order), np.inf))
    return replace(state, running=running, waiting=waiting)


def _at_others_expense(state: SystemState, lower: IntArray, forecast: Forecast) -> int:
    """How many of the waiting requests can be admitted if less urgent ones that run are evicted
    for them: as many as memory allows for the next steps.

    Those evicted restore their KV in the steps that they take part in; or they pause until there is
    room, and then nothing is restored for them.

    Args:
        lower: positions of the less urgent running requests.
        forecast: of all of these requests.
    """
    evictable = evictable_tokens(state.running, state.memory.block_tokens)[lower].sum()
    soon = forecast.steps <= FIRST_STEPS
    evicted = least_evicted(state.memory, forecast.short[soon].max(axis=0))
    return _leading(evicted[1:] <= evictable)
