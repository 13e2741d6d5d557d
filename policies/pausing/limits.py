"""Time and memory of requests that rotate on the device: what `rotation` decides by."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ellm_sgl.latency import HostCopies, StepWork
from ellm_sgl.policies.base import BoolArray, FloatArray, IntArray, MemoryState, SystemState
from ellm_sgl.policies.problem.candidates import (
    SLO_SHARE,
    Candidates,
    ahead_s,
    attainable_slo_s,
    decode_seconds,
    least_evicted,
    short_tokens,
    unowned_tokens,
)
from ellm_sgl.policies.problem.on_host import fetching

LINK_SHARE = 0.5
"""Share of the link's time that fetching ahead may take."""
AHEAD = 8
"""Steps of growth that there has to be room for, so that not every step pauses somebody; but less
than a block."""
GUARD_STEPS = 4
"""Whoever resumes is to be there so many steps before its deadline."""
BEYOND = np.array([0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.35, 0.5, 0.75, 1.0])
"""Shares of memory by which active requests may exceed it."""
MAX_EVICTED = 0.8
"""Of what can be evicted of them, so much at most is planned with: whole blocks are evicted."""
HOST_SHARE = 0.5
"""Of host memory, for those that take turns: what active ones lack comes from the rest in every
step, and all grow. With a host as large as the device and shares of 0, 1/4, 1/2, 3/4 and 1 the demo
model decodes 1,064, 1,132, 1,118, 1,035 and 996 tokens/s simulated, means of lengths known, unknown
and shifting (`bench regret`, loose SLO); with 1/2 the mean TTFT is least."""
GAIN = 0.02
"""They exceed it where that decodes so much more per second."""

LOOSE = 2.0
"""Steps of a full device that the SLO is long at least: where it is tighter, requests get ahead of
it so slowly that whoever has paused once for more than was foreseen misses it."""
STILL_LOOSE = 1.9
"""Those who rotate go on while it is so long: to change the way costs evictions, and a step's time
is known only so well."""


@dataclass(frozen=True, eq=False)
class Deadlines:
    """The running requests in time. Arrays have one entry for each."""

    slack_s: FloatArray
    """Time until a reader at the SLO's pace (`turn_slos_s`) has to wait."""
    fetch_s: FloatArray
    """Time in which its KV comes from the host."""
    step_s: float
    """Time of a step of the active ones."""

    @classmethod
    def of(cls, state: SystemState, active: BoolArray) -> Deadlines:
        running = state.running
        slo = SLO_SHARE * turn_slos_s(state)
        link = LINK_SHARE * state.hardware.link_bytes_per_s
        fetch_token_s = state.model.kv_bytes_per_token / link
        return cls(
            slack_s=ahead_s(running, slo) + slo,  # until the next token is due
            fetch_s=np.asarray(running.tokens * fetch_token_s + state.hardware.link_latency_s),
            step_s=decode_seconds(state, active),
        )

    def spare_s(self, paused: BoolArray) -> float:
        """By how much all that are paused can be put off and still resume in time, one after the
        other, earliest deadline first; inf if nobody is paused."""
        slack, fetch = self.slack_s[paused], self.fetch_s[paused]
        order = np.argsort(slack, kind="stable")
        # Nothing is fetched faster than a step takes: units are handed over between steps.
        back = np.cumsum(np.maximum(fetch, self.step_s)[order]) + GUARD_STEPS * self.step_s
        return float((slack[order] - back).min(initial=np.inf))


@dataclass(frozen=True, eq=False)
class Memory:
    """Device tokens that the running requests need. Arrays have one entry for each."""

    room: int
    """Of the device, for running requests,"""
    beyond: int
    """and what it pays to restore in every step beside."""
    state: MemoryState
    """Gives M_o and the block size."""
    cached: IntArray
    """Of a request on the device, AHEAD steps on."""
    kept: IntArray
    """Of a paused request: the block being filled, and what others share."""

    @classmethod
    def of(cls, state: SystemState, excess_share: float) -> Memory:
        """`excess_share`: see the function of that name."""
        candidates = Candidates.of(state, ahead=min(AHEAD, state.memory.block_tokens - 1))
        room = state.memory.device_tokens - unowned_tokens(state)
        return cls(
            room=room,
            beyond=int(excess_share * room),
            state=state.memory,
            cached=candidates.charged,
            kept=candidates.charged - candidates.evictable,
        )

    @property
    def freed(self) -> IntArray:
        """By each request that pauses."""
        return self.cached - self.kept

    def free(self, present: BoolArray) -> int:
        """Tokens that are left with these on the device and the others paused; may be negative."""
        needed = int(np.where(present, self.cached, self.kept).sum())
        return self.room + self.beyond - needed

    def turns(self, kept_share: float) -> int:
        """How many requests of the running ones' mean length may run, if those that pause keep this
        share of the room."""
        active = (1.0 - kept_share) * self.room / max(self.cached.mean(), 1.0)
        return int(active + kept_share * self.room / max(self.kept.mean(), 1.0))

    @property
    def both_tiers(self) -> int:
        """How many requests of the running ones' mean length the device and HOST_SHARE of the host
        have room for."""
        host = HOST_SHARE * self.state.host_tokens
        return int((self.room + host) / max(self.cached.mean(), 1.0))

    def holds(self, active: BoolArray, resuming: int | None) -> bool:
        """Whether enough of the active ones can be evicted for all to fit: of the resuming one
        nothing is."""
        needed = np.where(active, self.cached, self.kept)
        if resuming is not None:
            needed[resuming] = self.cached[resuming]
        evictable = self.freed[active].sum()
        return bool(least_evicted(self.state, needed.sum() - self.room) <= evictable)


def can_rotate(state: SystemState, before: bool = False) -> bool:
    """Whether requests can rotate at all: the host keeps the KV of those that pause, and TPOT SLOs
    that can be kept, which some of them have, are several steps long.

    Args:
        before: whether they rotate already. To begin with, the steps are those of a device full of
            newcomers, for these are whom rotation admits.
    """
    memory, slo = state.memory, turn_slos_s(state)
    if memory.host_tokens == 0 or not np.isfinite(slo).all():
        return False
    if short_tokens(state, Candidates.of(state)) > memory.host_tokens:
        return False
    loose = STILL_LOOSE if before else LOOSE
    return bool(slo.min() >= loose * full_step_s(state, at_first=not before))


def turn_slos_s(state: SystemState) -> FloatArray:
    """The TPOT SLO by which each running request takes turns, [running]: whoever has none that can
    be kept, at the pace of the others' loosest, so that it is not put off for ever, and those who
    rotate need not stop for it. inf where nobody has one."""
    slo = attainable_slo_s(state, state.running)
    kept = slo[np.isfinite(slo)]
    return np.where(np.isfinite(slo), slo, kept.max()) if len(kept) else slo


def full_step_s(state: SystemState, at_first: bool = False) -> float:
    """Time of a step of as many requests of the running ones' mean length as memory holds.

    Args:
        at_first: of the mean length that they began with, alone or with those that wait, if that is
            less: the step that a device full of newcomers takes, the longest that there is.
    """
    candidates, running = Candidates.of(state), state.running
    lengths = [(candidates.charged, candidates.tokens)]
    if at_first:
        own, waits = running.prompt_tokens - running.shared_tokens, state.waiting.tokens
        # What those that wait share is known once they run.
        for each, all_told in (
            (own, running.prompt_tokens),
            (np.append(own, waits), np.append(running.prompt_tokens, waits)),
        ):
            blocks = np.maximum(each, 0) // state.memory.block_tokens + 1
            lengths.append((blocks * state.memory.block_tokens, all_told))
    charged, tokens = np.array([(own.mean(), all_told.mean()) for own, all_told in lengths]).T
    rows = _room(state) / charged
    seconds = state.latency.step_seconds(StepWork(decode_rows=rows, decode_tokens=rows * tokens))
    return float(state.pace * np.max(seconds))


def _room(state: SystemState) -> float:
    """Device tokens for running requests' own blocks."""
    return float(max(state.memory.device_tokens - unowned_tokens(state), 0))


def excess_share(state: SystemState) -> float:
    """By what share active requests should exceed their room, each step restoring what they lack,
    so that most tokens per second are decoded: Eq. (1) for so many requests of mean length."""
    candidates = Candidates.of(state)
    charged = candidates.charged.astype(np.float64)
    room = _room(state)
    if room == 0.0:  # all of it is with others
        return 0.0
    most = MAX_EVICTED * candidates.evictable.sum() / charged.sum()
    excess = room * BEYOND
    rows = (room + excess) / charged.mean()
    evicted = least_evicted(state.memory, excess)
    possible = evicted <= np.minimum(most * (room + excess), state.memory.max_restored_tokens)
    evicted = np.where(possible, evicted, 0.0)
    work = StepWork(
        decode_rows=rows,
        decode_tokens=rows * candidates.tokens.mean(),
        restored_tokens=evicted,
        restored_squares=evicted * evicted / rows,
    )
    # The host has room for what is evicted beside what those keep there for whom no room is left.
    others = np.maximum(charged.sum() - (room + excess), 0.0)
    host = np.maximum(state.memory.host_tokens - others, 0.0)
    seconds = fetching(state.latency, HostCopies(0, 0, host)).step_seconds(work)
    slo_s = SLO_SHARE * float(attainable_slo_s(state, state.running).min())
    possible &= state.pace * seconds <= slo_s
    possible[0] = True
    value = np.where(possible, rows / seconds, 0.0)
    best = int(value.argmax())
    return float(BEYOND[best]) if value[best] > (1.0 + GAIN) * value[0] else 0.0
