"""Which requests are on the device, when more run than it holds and their SLO leaves time.

Where the TPOT SLO is much longer than a step, a request that has decoded ahead of its SLO can sit
out, its KV on the host, while others decode; it comes back, its KV fetched beside the steps of
these, before a reader at the SLO's pace would have to wait. So more requests run than memory holds
and start earlier, while steps stay as large as memory allows.

```
 request  1   inside ──────▶ out (host) ─ ─ ─ ─ ─ ─▶ coming (fetched) ▶ inside ───
 request  2   inside ────────────────▶ out ─ ─ ─ ─ ─ ─ ─ ─ ─▶ coming ▶ inside ───
 request  9   waits for room ▶ prefill ▶ inside ─────────▶ out ─ ─ ─ ─ ─ ─
```

Slack is the time by which a request is ahead of its SLO: SLO × tokens − time since the first one.
It grows by SLO − T in a step of T seconds inside, and falls by T outside. Whoever has most leaves,
whoever has least comes back: earliest deadline first, one at a time over the link.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import numpy as np

from ellm_sgl.latency import StepWork
from ellm_sgl.policies.base import Batch, FloatArray, IntArray, SystemState
from ellm_sgl.policies.pausing.limits import AHEAD, BoolArray, Deadlines, Memory, paying_share

logger = logging.getLogger(__name__)

LEFT_SHARE = 0.05
"""Share of memory that those who are out may keep (the block being filled, of each) before nobody
leaves for a newcomer any more: it makes steps smaller."""
MOST_WAITS = 4
"""Iterations without anything fetched (a prefill takes one) after which the rest of a request's KV
is left to the step itself: the host does not have it."""
JOINING_RATIO = 0.99
"""What those who join are said to be brought to: SGLang's admission then reserves next to nothing
for tokens to come. Room for these is made by sending somebody out."""
SOLVE_EVERY = 16
"""Iterations after which it is asked anew by how much those inside should exceed memory."""
NOBODY = -1


@dataclass(frozen=True, eq=False)
class Turn:
    """What rotation wants of one iteration."""

    join: int
    """So many of the first waiting requests join: there is room for them, and time."""
    out: BoolArray
    """Running requests that sit out,"""
    coming: int | None
    """and the position of that one of these whose KV is fetched meanwhile."""

    def batch(self) -> Batch:
        return Batch(join=tuple(range(self.join)), pause=tuple(np.flatnonzero(self.out).tolist()))

    def gone(self) -> BoolArray:
        """Those who give up all they may: who is out, but for the one that is fetched."""
        gone = self.out.copy()
        if self.coming is not None:
            gone[self.coming] = False
        return gone


class Rotation:
    """Remembers from one iteration to the next who is out, and who of these is coming back."""

    def __init__(self) -> None:
        self._out: IntArray = np.empty(0, np.int64)
        """Ids of the requests that are out, the coming one included."""
        self._coming = NOBODY
        self._missing = 0
        """Tokens that the coming one still lacked in the iteration before."""
        self._waits = 0
        """Iterations in which nothing was fetched."""
        self._iterations = 0
        self._paying_share = 0.0

    def turn(self, state: SystemState) -> Turn:
        """Who is inside for the next step, and how many join."""
        ids = state.running.request_id
        out = np.isin(ids, self._out)
        found = np.flatnonzero(out & (ids == self._coming))
        coming = int(found[0]) if len(found) else None
        if coming is not None and self._has_come(state, coming):
            out[coming], coming = False, None
        if out.all():  # whoever was inside has ended
            back = int(state.running.waited_s.argmax()) if coming is None else coming
            out[back], coming = False, None
        if self._iterations % SOLVE_EVERY == 0:
            self._paying_share = paying_share(state)
        self._iterations += 1
        seating = _Seating(state, out, coming, self._paying_share)
        seating.make_room_to_grow()
        seating.call_back_in_time()
        join = seating.joining()
        if join == 0:
            seating.call_back_if_free()
        self._remember(state, seating)
        return Turn(join, seating.out, seating.coming)

    def _has_come(self, state: SystemState, coming: int) -> bool:
        """All its KV is there; or nothing more of it comes, because the host does not have it."""
        missing = int(state.running.uncached_tokens[coming])
        self._waits = self._waits + 1 if missing >= self._missing else 0
        self._missing = missing
        return missing == 0 or self._waits >= MOST_WAITS

    def _remember(self, state: SystemState, seating: _Seating) -> None:
        ids, coming = state.running.request_id, seating.coming
        self._out = ids[seating.out]
        now = NOBODY if coming is None else int(ids[coming])
        if now != self._coming:
            self._waits = 0
            self._missing = 0 if coming is None else int(state.running.tokens[coming])
        self._coming = now


class _Seating:
    """One iteration's decision in the making."""

    def __init__(
        self, state: SystemState, out: BoolArray, coming: int | None, paying: float
    ) -> None:
        self.state = state
        self.out = out
        self.coming = coming
        self.memory = Memory.of(state, paying)
        self.deadlines = Deadlines.of(state, ~out)
        self._expects = False
        """Somebody has left for a request that is to join in the next iteration."""

    def make_room_to_grow(self) -> None:
        """Send out those with most slack until those who stay have room for AHEAD more steps."""
        leaving = self._leaving(self.coming, 0)
        if leaving is None and self.coming is not None:
            self.coming = None
            leaving = self._leaving(None, 0)
        self._send_out(leaving)

    def call_back_in_time(self) -> None:
        """Fetch the one whose deadline is the earliest, if it cannot be put off any longer; others
        leave for it if they are further ahead."""
        if self.coming is not None or self.deadlines.spare_s(self.out) > 0.0:
            return
        back = self._next()
        leaving = self._leaving(back, 0)
        slack, fetch = self.deadlines.slack_s, self.deadlines.fetch_s
        if leaving is None or (slack[leaving] - fetch[leaving] <= slack[back] + fetch[back]).any():
            return
        self._send_out(leaving)
        self.coming = back

    def joining(self) -> int:
        """How many of the waiting requests join. If there is time for one, but no room, those
        with most slack leave now, so that it joins in the next iteration."""
        running, waiting = self.state.running, self.state.waiting
        inside = int(np.count_nonzero(~self.out))
        places = min(self.deadlines.most_running(inside), self.state.max_running) - len(running)
        first = waiting.tokens[: max(int(places), 0)]
        if not len(first):
            return 0
        block = self.state.memory.block_tokens
        room = np.cumsum(((first + AHEAD) // block + 1) * block)
        seconds = self._prefill_seconds(first)
        in_time = np.searchsorted(seconds, self.deadlines.spare_s(self.out), side="right")
        fitting = np.searchsorted(room, self.memory.free(self._present()), side="right")
        if in_time and not fitting:
            self._make_way(int(room[0]), float(seconds[0]))
        return int(min(in_time, fitting))

    def call_back_if_free(self) -> None:
        """Fetch the one whose deadline is the earliest, if there is room for it anyway."""
        if self.coming is None and self.out.any() and not self._expects:
            back = self._next()
            leaving = self._leaving(back, 0)
            if leaving is not None and not len(leaving):
                self.coming = back

    def _make_way(self, tokens: int, seconds: float) -> None:
        """Those with most slack leave for so many tokens, if they can be back in time though a
        prefill of so many seconds holds all up."""
        leaving = self._leaving(self.coming, tokens)
        if leaving is None:
            return
        out = self.out.copy()
        out[leaving] = True
        kept = int(self.memory.left[out].sum())
        if kept <= LEFT_SHARE * self.memory.room and self.deadlines.spare_s(out) >= seconds:
            self._send_out(leaving)
            self._expects = True

    def _prefill_seconds(self, tokens: IntArray) -> FloatArray:
        """Time of the prompts up to each of these."""
        pairs = np.cumsum(tokens * (tokens + 1.0) / 2)
        work = StepWork(0, 0, prefill_rows=np.cumsum(tokens), prefill_pairs=pairs)
        return self.state.latency.step_seconds(work)

    def _next(self) -> int:
        """Of those who are out, the one whose deadline is the earliest."""
        return int(np.where(self.out, self.deadlines.slack_s, np.inf).argmin())

    def _present(self, coming: int | None = None) -> BoolArray:
        """Those who are on the device, or are being fetched."""
        present = ~self.out
        for one in (self.coming, coming):
            if one is not None:
                present[one] = True
        return present

    def _leaving(self, coming: int | None, tokens: int) -> IntArray | None:
        """The fewest of those inside, by slack, without which so many tokens are free while this
        one comes; None if all but one are not enough."""
        present = self._present(coming)
        short = tokens - self.memory.free(present)
        inside = np.flatnonzero(~self.out)
        by_slack = inside[np.argsort(-self.deadlines.slack_s[inside], kind="stable")][:-1]
        freed = np.cumsum((self.memory.cached - self.memory.left)[by_slack])
        count = 0 if short <= 0 else int(np.searchsorted(freed, short)) + 1
        stay = ~self.out
        stay[by_slack[:count]] = False
        if count > len(by_slack) or not self.memory.holds(stay, coming):
            return None
        return by_slack[:count]

    def _send_out(self, leaving: IntArray | None) -> None:
        if leaving is not None:
            self.out[leaving] = True


def can_rotate(state: SystemState) -> bool:
    """Whether requests can take turns at all: the host keeps the KV of those that are out, and
    every running request has an SLO. Says in the log, once per process, why not."""
    if state.memory.host_tokens == 0:
        _say_once("there is no host tier: give --ellm-host-kv-tokens")
        return False
    slo = np.minimum(state.running.tpot_slo_s, state.tpot_slo_s)
    if not np.isfinite(slo).all():
        _say_once("a request has no TPOT SLO: give --ellm-tpot-slo-ms, or tpot_slo_ms with each")
        return False
    return True


@cache
def _say_once(reason: str) -> None:
    logger.warning("rotation is off: %s", reason)
