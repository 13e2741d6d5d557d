"""Which requests pause for a step, so that more urgent ones get their tokens sooner.

All requests that decode in a step share its time, so an urgent one gets faster only if steps get
shorter. The others then alternate: each step runs the most urgent level and of every other group
those that have waited longest for a token. Requests with much to recompute go into groups of their
own, which are the first to be thinned out: one of them lengthens a step as much as many others.

Pauses are spread over steps rather than held all in one: while step time is convex in its rows
(as a roofline is), equal steps take the least time in total.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ellm_sgl.latency import StepWork
from ellm_sgl.policies.base import FloatArray, IntArray, SystemState
from ellm_sgl.policies.slo_priority.levels import LEVELS

MAX_STEPS_PER_TOKEN = 8
"""Each request gets a token in at least one of so many steps. While groups change, the order may
shift: then it is one per time that so many steps were expected to take, and a step."""
LOSS_GAIN = 10.0
"""For each part of the allowed loss that was not used of late, so many may be lost now beyond it:
urgent requests come and go, and what they do not need now they may use later."""
MOST_LOSS = 0.4
"""Most that may be lost at any time; and to keep an SLO, for as long as that takes."""
LOSS_MEMORY_S = 30.0
"""The mean forgets after about so long."""
ROUNDING = 1e-9
"""Losses smaller than this are none."""
IMPLIED_SHARE = 0.4
"""Where urgency comes without an SLO, its steps are to take this share of a full step."""
SLO_SHARE = 0.8
"""Share of an SLO that steps may take; the rest is for the prefills between them, those of less
urgent requests an eighth of the time (`admission.PREFILL_SHARE`)."""


@dataclass(frozen=True, eq=False)
class Group:
    """Requests that alternate: of these, some decode in a step and the others pause."""

    members: IntArray
    """Positions in `state.running`."""
    run: int
    """How many of them run in a step,"""
    pause_s: float = 0.0
    """if so many seconds have passed since a member's last token."""
    overdue_s: float = math.inf
    """Who has waited so long runs in any case."""

    def paused(self, state: SystemState) -> list[int]:
        """The members that pause for this step: all but those that have waited longest for a
        token; of equal waits, all but the oldest."""
        if self.run >= len(self.members) and self.pause_s <= 0.0:
            return []
        waited = state.running.waited_s[self.members]
        run = self.run if self.pause_s <= 0.0 or waited.min() >= self.pause_s else 0
        run = max(run, int(np.count_nonzero(waited >= self.overdue_s)))
        order = np.lexsort((state.running.request_id[self.members], -waited))
        paused: list[int] = self.members[order[run:]].tolist()
        return paused


@dataclass(frozen=True, eq=False)
class Schedule:
    """Which requests alternate with which."""

    groups: tuple[Group, ...]
    """Of the running requests; those in none run in every step."""
    loss: float
    """Share of tokens per second lost by it, as the latency model has it."""

    def paused(self, state: SystemState) -> tuple[int, ...]:
        """Positions in `state.running` of the requests that pause for this step."""
        return tuple(sorted(i for group in self.groups for i in group.paused(state)))


NOBODY_PAUSES = Schedule((), 0.0)


class Losses:
    """How much of tokens per second pauses have cost of late, and so may cost now."""

    def __init__(self, mean: float) -> None:
        """`mean`: share of them that pauses may cost in the mean over LOSS_MEMORY_S."""
        self._allowed_mean = mean
        self._mean = mean
        self._busy_s = math.inf

    def note(self, busy_s: float, loss: float) -> None:
        """Since it was noted last, so much has been lost. `busy_s`: as in `SystemState`."""
        kept = math.exp(-max(busy_s - self._busy_s, 0.0) / LOSS_MEMORY_S)
        self._mean = kept * self._mean + (1 - kept) * loss
        self._busy_s = busy_s

    @property
    def allowed(self) -> float:
        """Share of tokens per second that may be lost now."""
        unused = self._allowed_mean - self._mean
        return min(max(self._allowed_mean + LOSS_GAIN * unused, 0.0), MOST_LOSS)

    @property
    def for_slo(self) -> float:
        """Share of tokens per second that may be lost now where that keeps an SLO."""
        return MOST_LOSS if self._allowed_mean > 0.0 else 0.0


def build(
    state: SystemState, level: IntArray, pressure: bool, allowed_loss: float, slo_loss: float
) -> Schedule:
    """The schedule for these running requests.

    As few pause as bring the step to its target time without losing more tokens per second than
    allowed; if that cannot be, those that make the step shortest. The target is SLO_SHARE of the
    tightest SLO that the most urgent level brings and a step can keep, or of the server's where a
    full step takes longer than that; and where it brings none, under pressure, IMPLIED_SHARE of a
    full step.

    Args:
        level: of each running request.
        pressure: memory is short or requests wait that cannot be admitted.
        allowed_loss: share of tokens per second.
        slo_loss: likewise, where that keeps an SLO.
    """
    lower = level > level.min(initial=LEVELS)
    if not lower.any():
        return NOBODY_PAUSES
    slos_s = state.running.tpot_slo_s[~lower]
    if not (pressure or np.isfinite([*slos_s, state.tpot_slo_s]).any()):
        return NOBODY_PAUSES
    members = _groups(state, level)
    rates = _rate_choices([len(m) for m in members])
    work = _expected_work(state, members, rates)
    seconds = state.latency.step_seconds(work)
    full = float(seconds[0])
    loss = _loss(state, work, seconds)
    # Steps take longer than predicted, by `pace`. All have the server's SLO: while a full step
    # keeps it, none of the others is made to miss it.
    possible = loss <= max(allowed_loss, slo_loss, ROUNDING)
    own = _tightest_kept(slos_s / state.pace, float(seconds[possible].min()))
    server_s = state.tpot_slo_s / state.pace
    slo = own if full <= server_s else min(own, server_s)
    choice = 0
    if pressure and not np.isfinite(own):
        choice = _choose(loss <= max(allowed_loss, ROUNDING), seconds, IMPLIED_SHARE * full)
    if np.isfinite(slo):
        kept = (loss[seconds <= SLO_SHARE * slo] <= slo_loss).any()
        most = max(allowed_loss, slo_loss if kept else 0.0, ROUNDING)
        choice = max(choice, _choose(loss <= most, seconds, SLO_SHARE * slo))
    chosen = rates[choice]
    alternating = np.where(chosen < 1.0, 0.0, chosen)[None]
    pause_s = float(state.latency.step_seconds(_expected_work(state, members, alternating))[0])
    groups = (_group(m, r, pause_s) for m, r in zip(members, chosen.tolist(), strict=True))
    return Schedule(tuple(groups), max(float(loss[choice]), 0.0))


def _tightest_kept(slos_s: FloatArray, step_s: float) -> float:
    """The least of these SLOs that a step of `step_s`, the shortest, keeps: one that is missed
    however the others pause takes nothing from theirs. Of none the least."""
    kept = slos_s[SLO_SHARE * slos_s >= step_s]
    return float((kept if np.isfinite(kept).any() else slos_s).min())


def _group(members: IntArray, rate: float, step_s: float) -> Group:
    """A group of which so many run per step, which takes `step_s` without those groups of which
    less than one does. There 1 / rate steps are from one token to the next, 1 / rate - 1 of them
    paused; half a step less allows for steps of unequal time."""
    return Group(
        members,
        run=max(1, round(rate)),
        pause_s=(1 / rate - 1.5) * step_s if rate < 1 else 0.0,
        overdue_s=(MAX_STEPS_PER_TOKEN - 1.5) * step_s,
    )


def _groups(state: SystemState, level: IntArray) -> list[IntArray]:
    """Positions, in groups: first the most urgent level, then those that alternate, the ones to
    be thinned out first in front: those with uncached tokens before those without, less urgent
    before more urgent."""
    has_uncached = state.running.uncached_tokens > 0
    key = np.where(level == level.min(), -1, 2 * (level.max() - level) + 1000 * ~has_uncached)
    return [np.flatnonzero(key == k) for k in np.unique(key)]


def _rate_choices(sizes: list[int]) -> FloatArray:
    """How many of each group run per step, [choices, groups], from all to the fewest. Each choice
    is one step down from the one before, in the first group that can be thinned out."""
    chosen = [float(size) for size in sizes]
    choices = [chosen]
    for group, size in enumerate(sizes[1:], start=1):
        for rate in _rates(size)[1:]:
            chosen = [*chosen[:group], rate, *chosen[group + 1 :]]
            choices.append(chosen)
    return np.array(choices)


def _rates(size: int) -> list[float]:
    """How many of a group may run per step: all, one less, ..., 1 in MAX_STEPS_PER_TOKEN; or, if
    these are less than one, one in every 2, 3, ... steps."""
    fewest = -(-size // MAX_STEPS_PER_TOKEN)
    whole = [float(n) for n in range(size, fewest - 1, -1)]
    return whole + [1.0 / n for n in range(2, MAX_STEPS_PER_TOKEN // size + 1)]


def _expected_work(state: SystemState, members: list[IntArray], rates: FloatArray) -> StepWork:
    """Mean work of a step, for each choice: every group contributes its mean request."""
    running = state.running
    n = running.uncached_tokens.astype(np.float64)
    columns = np.stack((running.tokens, n, n * n, n * running.shared_tokens))
    means = np.array([columns[:, g].mean(axis=1) for g in members])
    tokens, restored, squares, prefix = (rates @ means).T
    return StepWork(
        decode_rows=rates.sum(axis=1),
        decode_tokens=tokens,
        restored_tokens=restored,
        restored_squares=squares,
        restored_prefix=prefix,
        swap_tokens=restored if state.memory.host_tokens else 0,
    )


def _loss(state: SystemState, work: StepWork, seconds: FloatArray) -> FloatArray:
    """Share of tokens per second that each choice loses against the first, the full step.

    A token counts what it takes there: an equal part of the step with all cached, and as much of
    the rest as it has of the restored tokens. Otherwise it would seem a gain to put off the
    requests that have most to recompute, though they run later.
    """
    rows, restored = np.asarray(work.decode_rows), np.asarray(work.restored_tokens)
    tokens = np.asarray(work.decode_tokens)
    cached = float(state.latency.step_seconds(StepWork(rows[0], tokens[0])))
    per_token = (seconds[0] - cached) / max(float(restored[0]), 1.0)
    return np.asarray(1.0 - (rows * cached / rows[0] + restored * per_token) / seconds, np.float64)


def _choose(allowed: npt.NDArray[np.bool_], seconds: FloatArray, target: float) -> int:
    """The first allowed choice that is in time; else the shortest that is allowed. The first
    of all is: it loses nothing."""
    in_time = np.flatnonzero(allowed & (seconds <= target))
    if len(in_time):
        return int(in_time[0])
    return int(np.where(allowed, seconds, np.inf).argmin())
