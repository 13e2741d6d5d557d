"""Which waiting requests join, where some are more urgent than others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ellm_sgl.latency import StepWork
from ellm_sgl.policies.base import IntArray, Requests, SystemState
from ellm_sgl.policies.batch_size import BatchProblem
from ellm_sgl.policies.feasible import least_span_tokens
from ellm_sgl.policies.slo_levels import Levels, queue_order
from ellm_sgl.policies.slo_turns import MOST_STEPS_PER_TURN

MOST_JOINS = 64
"""Requests that one iteration admits; the next one can go on."""


def joining(state: SystemState, levels: Levels, lookahead: int) -> tuple[int, ...]:
    """Positions in `state.waiting` of the requests that join, in order.

    In one iteration requests of one level join, since the first token of each has to wait for
    the prefill of all. How many is Eq. (1)'s answer; but of requests more urgent than some that
    run as many join as memory allows at the others' expense (see `_at_others_expense`). While
    more urgent requests run, the prefill of less urgent ones takes no longer than a step.

    Args:
        lookahead: steps that the batch chosen by Eq. (1) has to be good for.
    """
    places = min(state.max_running - len(state.running), MOST_JOINS)
    order = queue_order(state.waiting, levels.waiting)[: max(places, 0)]
    if len(order) == 0:
        return ()
    level = levels.waiting[order]
    order = order[: _leading(level == level[0])]
    several = len(state.running) > 0 and bool((levels.running != level[0]).any())
    line = _in_line(state, order, ignore_slo=several)
    count = BatchProblem.of(line, len(order), lookahead).solve() - len(state.running)
    if several and level[0] < levels.running.max():
        lower = np.flatnonzero(levels.running > level[0])
        count = max(count, _at_others_expense(line, lower, lookahead // 2))
    if several and level[0] > levels.running.min():
        count = min(count, _within_a_step(line))
    return tuple(order[: max(count, 0)].tolist())


def _leading(true: IntArray) -> int:
    """How many entries from the first on are true."""
    false = np.flatnonzero(~true)
    return int(false[0]) if len(false) else len(true)


def _in_line(state: SystemState, order: IntArray, ignore_slo: bool) -> SystemState:
    """The state with these requests waiting, in this order.

    Args:
        ignore_slo: leave out the requests' own SLOs, and for how long each has had no token:
            where levels differ, the lower ones sit out steps for the sake of the others' SLOs.
    """
    waiting = Requests(**{name: column[order] for name, column in vars(state.waiting).items()})
    running = state.running
    if ignore_slo:
        never = np.full(len(running), np.inf)
        running = replace(running, tpot_slo_s=never, waited_s=np.zeros(len(running)))
        waiting = replace(waiting, tpot_slo_s=np.full(len(order), np.inf))
    return replace(state, running=running, waiting=waiting)


def _at_others_expense(state: SystemState, lower: IntArray, lookahead: int) -> int:
    """How many of the waiting requests can join if less urgent ones that run give up KV, and sit
    out steps, for them.

    As many as memory allows, while a step in which the others take turns is no longer than one in
    which all that run now decode from the cache. Those who give up KV restore it in their turns
    only.

    Args:
        lower: positions of the less urgent running requests.
        lookahead: steps that this has to be good for. (`joining` gives half of what Eq. (1) is
            given: with none, bursts of urgent requests slow one another down as they grow.)
    """
    running, most = len(state.running), len(state.waiting)
    problem = BatchProblem.of(state, most, lookahead)
    size = np.arange(running, running + most + 1)
    given = problem.lineup.evictable[lower].astype(np.float64)
    span = least_span_tokens(problem.memory, problem.short[size])
    fits = (span <= given.sum()) & (span <= problem.memory.transient_tokens)
    share = span / max(float(given.sum()), 1.0) / MOST_STEPS_PER_TURN
    spans = {
        "span_rows": span / MOST_STEPS_PER_TURN,
        "span_squares": share * float(given @ given),
        "span_prefix": share * float(given @ problem.lineup.shared[lower]),
    }
    tokens = problem.tokens[size]
    turns = len(lower) / MOST_STEPS_PER_TURN
    others = float(problem.lineup.tokens[lower].sum())
    seconds = problem.latency.step_seconds
    cached = seconds(StepWork(running, tokens[0]))
    in_turns = seconds(
        StepWork(
            size - len(lower) + turns, tokens - others * (1 - 1 / MOST_STEPS_PER_TURN), **spans
        )
    )
    fits &= in_turns <= cached
    return _leading(fits[1:])


def _within_a_step(state: SystemState) -> int:
    """How many waiting requests can be prefilled in the time of a decode step; at least 1."""
    running = state.running
    new = (state.waiting.tokens - state.waiting.shared_tokens).astype(np.float64)
    pairs = new * (state.waiting.shared_tokens + state.waiting.tokens) / 2
    seconds = state.latency.step_seconds(
        StepWork(
            decode_rows=np.append(len(running), np.zeros(len(new))),
            decode_tokens=np.append(running.tokens.sum(), np.zeros(len(new))),
            span_rows=np.append(running.uncached_tokens.sum(), np.zeros(len(new))),
            prefill_rows=np.append(0.0, new.cumsum()),
            prefill_pairs=np.append(0.0, pairs.cumsum()),
        )
    )
    return max(1, int(np.count_nonzero(seconds[1:] <= seconds[0])))
