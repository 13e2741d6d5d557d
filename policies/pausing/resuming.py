"""When those that pause take part again: with their KV on the host, or computed once more."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ellm_sgl.latency import StepWork
from ellm_sgl.policies.base import BoolArray, FloatArray, IntArray, SystemState
from ellm_sgl.policies.problem.candidates import Candidates
from ellm_sgl.policies.problem.forecast import Forecast
from ellm_sgl.policies.problem.on_host import copies_of_first, fetching

GAIN = 0.05
"""Requests begin to pause when that decodes so much more per second."""


def with_paused(state: SystemState, short: FloatArray, rows: FloatArray | IntArray) -> FloatArray:
    """Device tokens that are missing with the last of the running requests paused: they hold what
    cannot be evicted; and until it is asked again each of the others may grow by a block.

    Args:
        short: without those that pause, [..., b], up to all requests;
        rows: and how many decode.
    """
    candidates = Candidates.of(state)
    held = (candidates.charged - candidates.evictable).astype(np.float64)
    beyond = np.append(np.cumsum(held[::-1])[::-1], 0.0)
    beyond = beyond[-short.shape[-1] :]
    return np.asarray(short + beyond + state.memory.block_tokens * rows)


def brought_back(state: SystemState, active: int, short: FloatArray, value: FloatArray) -> int:
    """How many take part once some resume whose KV the host has: not so many that they would have
    to pause again, nor more than one step can bring back.

    Args:
        short: see `with_paused`, now, [b from 0];
        value: tokens per second that the first b decode now, [b from 1].
    """
    lasting = value[active:] * (1.0 + GAIN) >= np.maximum.accumulate(value)[active:]
    most = _most_back(state, active, lasting | (short[active + 1 :] <= 0.0))
    if most == 0:
        return active
    forecast = Forecast.of(state, 0, fewest=active)
    short = with_paused(state, forecast.short, forecast.rows)
    copies = copies_of_first(state, np.arange(active, len(state.running) + 1))
    forecast = replace(forecast, short=short, latency=fetching(state.latency, copies))
    return forecast.solve(most=active + most, keep_slo=False)


def computed_again(state: SystemState, active: int, short: FloatArray, value: FloatArray) -> int:
    """How many take part once some resume whose KV has to be computed again: those for whom there
    is room, no more than one step can compute, if until memory is short again all of them decode
    more per second, that step included, than those that take part already. Takes the same as
    `brought_back`."""
    most = _most_back(state, active, short[active + 1 :] <= 0.0)
    if most == 0 or (most == len(state.running) - active and not len(state.waiting)):
        return active + most  # with memory for all, nobody else has a use for it
    back = state.running.uncached_tokens[active:].astype(np.float64)
    forecast = Forecast.of(state, 0, fewest=active)
    short = with_paused(state, forecast.short, forecast.rows)[:, : most + 1]
    sums = (np.append(0.0, np.cumsum(of[:most])) for of in (back, back * back))
    return active + int(np.flatnonzero(_pays(forecast, short, *sums)).max(initial=0))


def _most_back(state: SystemState, active: int, possible: BoolArray) -> int:
    """How many of those that pause can resume, of whom these can, [paused], if one step can restore
    what all of them lack."""
    back = np.cumsum(state.running.uncached_tokens[active:])
    possible = possible & (back <= state.memory.max_restored_tokens)
    return int(np.logical_and.accumulate(possible).sum())


def _pays(
    forecast: Forecast, short: FloatArray, tokens: FloatArray, squares: FloatArray
) -> BoolArray:
    """Whether b requests decode more per second than the fewest, from now until memory is
    short, [b]; the time to bring their KV back included.

    Args:
        short: device tokens that are missing, [times, b]; none is now;
        tokens: to be restored first, [b],
        squares: and the sum of their squares over requests.
    """
    latency = forecast.latency
    columns, fewest = np.arange(short.shape[1]), np.zeros(short.shape[1], np.int64)
    rows, held = forecast.rows[:, columns], forecast.tokens[:, columns]
    seconds = latency.step_seconds(StepWork(rows, held))
    work = StepWork(rows[0], held[0], restored_tokens=tokens, restored_squares=squares)
    back_s = latency.step_seconds(work) - seconds[0]
    late = short > 0.0
    ends = np.where(late.any(axis=0), late.argmax(axis=0), len(forecast.steps) - 1)
    last, first = short[ends, columns], short[ends - 1, columns]
    part = np.where(last > 0.0, first / np.minimum(first - last, -1.0), 1.0)

    def until(of: FloatArray, size: IntArray) -> FloatArray:
        whole = np.vstack((np.zeros(len(columns)), forecast.summed(of)))
        before, after = whole[ends - 1, size], whole[ends, size]
        return np.asarray(before + part * (after - before))

    made, spent_s = until(rows, columns), until(seconds, columns) + back_s
    return np.asarray(made * until(seconds, fewest) > until(rows, fewest) * spent_s)
