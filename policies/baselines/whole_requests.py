"""Whole requests leave the device and come back, as vLLM swaps them: a baseline to compare with."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ellm_sgl.latency import StepWork
from ellm_sgl.policies.base import Batch, IntArray, Policy, Ratios, SystemState, Threads
from ellm_sgl.policies.fcfs.feasible import Candidates, unowned_tokens

BoolArray = npt.NDArray[np.bool_]

SWAP_ALL = Threads(swap_layers=1, recompute_layers=0, delta=512)
"""What the host has is fetched; nothing of it is computed again."""


class WholeRequests(Policy):
    """All of a request's KV is on the device and it decodes, or it sits out without.

    - Where the next step's tokens do not fit, the requests that arrived last give up their KV and
      sit out; at least one runs.
    - Those that sit out come back in the order in which they arrived, each when all of its KV
      fits beside a further block of everybody's; a step that sends one out brings none back.
    - Nobody new joins while somebody sits out; else all that the server's accounting admits.

    Shared blocks and the block being filled stay, as for any policy.
    """

    def __init__(self) -> None:
        self._out: frozenset[int] = frozenset()
        """Ids of the requests that sit out."""

    def idle_without_pressure(self) -> bool:
        return True

    def batch(self, state: SystemState) -> Batch:
        running = state.running.request_id
        out = np.isin(running, list(self._out))
        if len(running):
            if out.all():  # those that ran have all left
                out[0] = False
            out = _next_out(state, out)
        self._out = frozenset(running[out].tolist())
        waiting = () if self._out else tuple(range(len(state.waiting)))
        return Batch(join=waiting, pause=tuple(np.flatnonzero(out).tolist()))

    def ratio(self, state: SystemState, batch: Batch) -> Ratios:
        ratios = np.zeros(len(state.running))
        paused = list(batch.pause)
        if paused:
            given = Candidates.of(state, []).evictable[paused]
            # In the middle of a token, so that rounding down to whole blocks gives all of them.
            ratios[paused] = np.where(given > 0, given + 0.5, 0.0) / state.running.tokens[paused]
        return Ratios(running=ratios, joining=np.zeros(len(batch.join)))

    def threads(self, state: SystemState, plan: StepWork) -> Threads:
        return SWAP_ALL


def _next_out(state: SystemState, out: BoolArray) -> BoolArray:
    """Who sits out this step, given who did before (not all)."""
    candidates = Candidates.of(state, [])
    given_up = np.where(out, candidates.evictable, 0)
    used = int((candidates.charged - given_up).sum()) + unowned_tokens(state)
    room = state.memory.device_tokens - used
    if room < 0:
        return _send_out(out, candidates.evictable, -room)
    return _bring_back(state, out, candidates.evictable, room)


def _send_out(out: BoolArray, evictable: IntArray, short: int) -> BoolArray:
    """The last of those that run leave too, until `short` tokens are free; the first stays."""
    out = out.copy()
    for i in np.flatnonzero(~out)[:0:-1].tolist():
        if short <= 0:
            break
        out[i] = True
        short -= int(evictable[i])
    return out


def _bring_back(state: SystemState, out: BoolArray, evictable: IntArray, room: int) -> BoolArray:
    """The first of those that sit out come back, while they fit into `room` tokens and one step
    can restore them."""
    out = out.copy()
    restored = 0
    for i in np.flatnonzero(out).tolist():
        room -= int(evictable[i])
        restored += int(state.running.uncached_tokens[i])
        growth = state.memory.block_tokens * (int(np.count_nonzero(~out)) + 1)
        if room < growth or restored > state.memory.transient_tokens:
            break
        out[i] = False
    return out
