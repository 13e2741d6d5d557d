"""Whole requests are evicted and restored, as vLLM swaps them: a baseline to compare with."""

from __future__ import annotations

import numpy as np

from ellm_sgl.latency import StepWork
from ellm_sgl.policies.base import (
    Batch,
    BoolArray,
    IntArray,
    Policy,
    Ratios,
    SystemState,
    WorkSplit,
)
from ellm_sgl.policies.problem.candidates import Candidates, ratios_of, unowned_tokens

SWAP_ALL = WorkSplit(swap_layers=1, recompute_layers=0, delta=512)
"""What the host has is fetched; nothing of it is computed again."""


class WholeRequests(Policy):
    """All of a request's KV is on the device and it decodes, or it pauses without.

    - Where the next step's tokens do not fit, the requests that arrived last are evicted and
      pause; at least one runs.
    - Paused requests resume in the order in which they arrived, each when all of its KV fits beside
      a further block of everybody's; a step that pauses one resumes none.
    - Nobody is admitted while somebody is paused, or in the step that brings back the last of them:
      their KV counts from the next one on. Else all that the server's accounting admits.

    Shared blocks and the block being filled stay, as for any policy.
    """

    def __init__(self) -> None:
        self._paused: frozenset[int] = frozenset()
        """Ids of the paused requests."""

    def idle_without_pressure(self) -> bool:
        return True

    def never_waits(self) -> bool:
        return True

    def batch(self, state: SystemState) -> Batch:
        running, before = state.running.request_id, self._paused
        paused = np.isin(running, list(before))
        if len(running):
            if paused.all():  # those that ran have all ended
                paused[0] = False
            paused = _next_paused(state, paused)
        self._paused = frozenset(running[paused].tolist())
        resumed = before.intersection(running[~paused].tolist())
        waiting = () if self._paused or resumed else tuple(range(len(state.waiting)))
        return Batch(admit=waiting, pause=tuple(np.flatnonzero(paused).tolist()))

    def ratio(self, state: SystemState, batch: Batch) -> Ratios:
        evicted = np.zeros(len(state.running), np.int64)
        paused = list(batch.pause)
        if paused:
            evicted[paused] = Candidates.of(state).evictable[paused]
        return Ratios(ratios_of(evicted, state.running.tokens), np.zeros(len(batch.admit)))

    def split(self, state: SystemState, plan: StepWork) -> WorkSplit:
        return SWAP_ALL


def _next_paused(state: SystemState, paused: BoolArray) -> BoolArray:
    """Who pauses in this step, given who did before (not all)."""
    candidates = Candidates.of(state)
    evicted = np.where(paused, candidates.evictable, 0)
    used = int((candidates.charged - evicted).sum()) + unowned_tokens(state)
    room = state.memory.device_tokens - used
    if room < 0:
        return _pause(paused, candidates.evictable, -room)
    return _resume(state, paused, candidates.evictable, room)


def _pause(paused: BoolArray, evictable: IntArray, short: int) -> BoolArray:
    """The last of those that run pause too, until `short` tokens are free; the first runs on."""
    paused = paused.copy()
    for i in np.flatnonzero(~paused)[:0:-1].tolist():
        if short <= 0:
            break
        paused[i] = True
        short -= int(evictable[i])
    return paused


def _resume(state: SystemState, paused: BoolArray, evictable: IntArray, room: int) -> BoolArray:
    """The first of the paused ones resume, while they fit into `room` tokens and one step can
    restore them."""
    paused = paused.copy()
    restored = 0
    for i in np.flatnonzero(paused).tolist():
        room -= int(evictable[i])
        restored += int(state.running.uncached_tokens[i])
        growth = state.memory.block_tokens * (int(np.count_nonzero(~paused)) + 1)
        if room < growth or restored > state.memory.max_restored_tokens:
            break
        paused[i] = False
    return paused
