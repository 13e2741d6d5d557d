"""Which requests are on the device, when more run than it holds and their SLO leaves time.

Where the TPOT SLO is much longer than a step, a request that has decoded ahead of its SLO can
pause, its KV on the host, while others decode; it resumes, its KV fetched beside the steps of
these, before a reader at the SLO's pace would have to wait. So more requests run than memory holds
and start earlier, while steps stay as large as memory allows.

```
 request  1   active ──────▶ paused (host) ─ ─ ─ ─ ─▶ resuming (fetched) ▶ active ───
 request  2   active ────────────────▶ paused ─ ─ ─ ─ ─ ─ ─ ─▶ resuming ▶ active ───
 request  9   waits for room ▶ prefill ▶ active ─────────▶ paused ─ ─ ─ ─ ─ ─
```

Slack is the time by which a request is ahead of its SLO: SLO × tokens − time since the first one.
It grows by SLO − T in an active step of T seconds, and falls by T in a paused one. Whoever has most
pauses, whoever has least resumes: earliest deadline first, one at a time over the link.
"""

from __future__ import annotations

import numpy as np

from ellm_sgl.latency import StepWork
from ellm_sgl.policies.base import Batch, BoolArray, FloatArray, IntArray, Ratios, SystemState
from ellm_sgl.policies.pausing.choice import Pausing
from ellm_sgl.policies.pausing.limits import (
    AHEAD,
    LINK_SHARE,
    Deadlines,
    Memory,
    can_rotate,
    excess_share,
)
from ellm_sgl.policies.pausing.refusals import Refusals
from ellm_sgl.policies.pausing.turns import COST
from ellm_sgl.policies.pausing.urgency import Urgency
from ellm_sgl.policies.problem.candidates import SLO_SHARE, Candidates, ratios_of, under_way_s
from ellm_sgl.policies.problem.even_share import EvenShare
from ellm_sgl.policies.problem.forecast import Forecast
from ellm_sgl.policies.problem.standing import Standing
from ellm_sgl.policies.problem.under_way import as_running

KEPT_SHARE = 0.02
"""Share of memory that paused requests may keep (the block being filled, of each) where others wait
nevertheless: it makes steps smaller, and all who wait do so for tokens per second,"""
KEPT_FOR_ALL = 0.2
"""and where nobody has to wait then: a short queue is not worth a wait for everybody's end."""
MOST_WAITS = 4
"""Iterations without anything fetched (a prefill takes one) after which the rest of a request's KV
is left to the step itself: the host does not have it."""
ADMITTED_RATIO = 0.99
"""What those admitted are said to be brought to: SGLang's admission then reserves next to nothing
for tokens to come. Room for these is made by pausing somebody."""
SOLVE_EVERY = 16
"""Iterations after which it is asked again by how much active requests should exceed memory."""
NOBODY = -1


class Rotation:
    """Remembers from one iteration to the next who is paused, and who of these is resuming."""

    def __init__(self) -> None:
        self._paused: IntArray = np.empty(0, np.int64)
        """Ids of the paused requests, the resuming one included."""
        self._resuming = NOBODY
        self._missing = 0
        """Tokens that the resuming one still lacked in the iteration before."""
        self._waits = 0
        """Iterations in which nothing was fetched."""
        self._iterations = 0
        self._excess_share = 0.0
        self._turns: Standing[int] | None = None
        """How many may run: it hardly changes with a step's tokens."""
        self._applies = False
        self._refusals = Refusals()

    def applies(self, state: SystemState, pausing: Pausing) -> bool:
        """Whether requests rotate now; whoever pauses in the one way goes on in the other."""
        before = self._applies
        self._applies = can_rotate(state, before)
        if self._applies and not before:
            self._paused = pausing.paused_ids
        elif before and not self._applies:
            pausing.take_over(self._paused)
        return self._applies

    def decide(
        self, state: SystemState, urgency: Urgency | None = None, queue: int | None = None
    ) -> RotationDecision:
        """Who is active in the next step, and how many are admitted.

        Args:
            state: those that wait are in the order in which they are to be admitted.
            urgency: without it all are alike.
            queue: how many wait, those included who are not to be admitted now; None: all in
                `state`.
        """
        ids = state.running.request_id
        paused = np.isin(ids, self._paused)
        found = np.flatnonzero(paused & (ids == self._resuming))
        resuming = int(found[0]) if len(found) else None
        if resuming is not None and self._is_back(state, resuming):
            paused[resuming], resuming = False, None
        if not state.running.uncached_tokens[paused].any() and _all_fit(state):
            paused[:], resuming = False, None
        if paused.all():  # whoever was active has ended
            back = int(state.running.waited_s.argmax()) if resuming is None else resuming
            paused[back], resuming = False, None
        if self._iterations % SOLVE_EVERY == 0:
            self._excess_share = excess_share(state)
        self._iterations += 1
        decision = RotationDecision(
            state,
            urgency or Urgency.alike(state),
            paused,
            resuming,
            self._excess_share,
            self._most_running(state, len(state.waiting) if queue is None else queue),
            self._refusals.kept_out(state),
        )
        self._refusals.offered = decision.admit > 0
        self._remember(state, decision)
        return decision

    def _most_running(self, state: SystemState, queue: int) -> int:
        """How many requests may run: those that run, and from the first on those that wait."""
        seen, count = as_running(state), len(state.running)
        running, waiting = seen.running.request_id, state.waiting.request_id
        places = min(state.max_running - len(running), len(waiting))
        if places <= 0:
            return count
        given = running, waiting[:places], (state.tpot_slo_s, state.memory.device_tokens)
        if self._turns is None or not self._turns.holds(*given):
            most = Forecast.of(seen, places).taking_turns(SLO_SHARE) - len(state.prefilling)
            most = min(most, _worth_it(state, queue))
            self._turns = Standing(most, *given, iterations=SOLVE_EVERY)
        return self._turns.answer

    def _is_back(self, state: SystemState, resuming: int) -> bool:
        """All its KV is there; or nothing more of it comes, because the host does not have it."""
        missing = int(state.running.uncached_tokens[resuming])
        if missing < self._missing:
            self._waits = 0
        elif not len(state.prefilling):  # while a prompt is computed nothing is fetched
            self._waits += 1
        self._missing = missing
        return missing == 0 or self._waits >= MOST_WAITS

    def _remember(self, state: SystemState, decision: RotationDecision) -> None:
        ids, resuming = state.running.request_id, decision.resuming
        self._paused = ids[decision.paused]
        now = NOBODY if resuming is None else int(ids[resuming])
        if now != self._resuming:
            self._waits = 0
            self._missing = 0 if resuming is None else int(state.running.tokens[resuming])
        self._resuming = now


class RotationDecision:
    """Which requests pause, resume and are admitted in one iteration."""

    def __init__(
        self,
        state: SystemState,
        urgency: Urgency,
        paused: BoolArray,
        resuming: int | None,
        excess: float,
        most_running: int,
        kept_out: bool,
    ) -> None:
        """Decides, from who was paused and resuming before, and how many may run.

        Args:
            kept_out: the server has not admitted the first who waits though there is room.
        """
        self.paused = paused
        """Running requests that pause,"""
        self.resuming = resuming
        """and the position of that one of these whose KV is fetched meanwhile."""
        self._state = state
        self._urgency = urgency
        self._memory = Memory.of(state, excess)
        self._deadlines = Deadlines.of(state, ~paused)
        self._kept_out = kept_out
        self._expects = False
        """Somebody pauses for a request to be admitted in the next iteration."""
        self._make_room_to_grow()
        self._resume_in_time()
        self.admit = self._admitted(most_running)
        """So many of the first waiting requests are admitted: there is room for them, and time."""
        if self.admit == 0 or kept_out:
            self._resume_if_free()

    def batch(self) -> Batch:
        pause = tuple(np.flatnonzero(self.paused).tolist())
        return Batch(admit=tuple(range(self.admit)), pause=pause)

    def ratios(self, even: EvenShare) -> Ratios:
        """Of paused requests all is evicted; of active ones the same share, the least that fits; of
        the resuming one nothing, so that its KV is fetched."""
        state, batch, active = self._state, self.batch(), ~self.paused
        candidates = Candidates.of(state)
        evicted = np.where(self.paused, candidates.evictable, 0)
        if self.resuming is not None:
            evicted[self.resuming] = 0
        held = int((candidates.charged - evicted)[~active].sum())
        partial = even.evicted(state, batch, candidates[active], held)
        if partial is not None:
            evicted[active] = partial
        admitted = np.full(len(batch.admit), ADMITTED_RATIO)
        return Ratios(ratios_of(evicted, state.running.tokens), admitted)

    def _make_room_to_grow(self) -> None:
        """Pause those with most slack until the active ones have room for AHEAD more steps."""
        pausing = self._to_pause(self.resuming)
        if pausing is None and self.resuming is not None:
            self.resuming = None
            pausing = self._to_pause(None)
        if pausing is not None:
            self.paused[pausing] = True

    def _resume_in_time(self) -> None:
        """Fetch the one whose deadline is the earliest, if it cannot be put off any longer; others
        pause for it if they are further ahead."""
        if self.resuming is not None or not self.paused.any():
            return
        back, level = self._in_line()[0], self._urgency.running
        urgent = bool((level[~self.paused] > level[back]).any())
        if not urgent and self._deadlines.spare_s(self.paused) > 0.0:
            return
        pausing = self._to_pause(back, level=int(level[back]))
        if pausing is None:
            self._change_places(back)
            return
        slack, fetch = self._deadlines.slack_s, self._deadlines.fetch_s
        alike = pausing[level[pausing] == level[back]]
        if (slack[alike] - fetch[alike] <= slack[back] + fetch[back]).any():
            return
        self.paused[pausing] = True
        self.resuming = back

    def _change_places(self, back: int) -> None:
        """This one decodes in place of those active ones beside whom it has no room, where all but
        one are not enough: its KV comes in the next step itself."""
        slack, fetch, level = (
            self._deadlines.slack_s,
            self._deadlines.fetch_s,
            self._urgency.running,
        )
        active = np.flatnonzero(~self.paused)
        if (level[active] == level[back]).any() and self._deadlines.spare_s(self.paused) > 0.0:
            return
        stay = np.zeros_like(self.paused)
        stay[back] = True
        room, takes = self._memory.free(stay), self._memory.freed
        for one in active[np.lexsort((slack[active], level[active]))].tolist():
            if takes[one] <= room:
                stay[one] = True
                room -= takes[one]
        leave = active[~stay[active]]
        if (level[leave] < level[back]).any() or not self._memory.holds(stay, None):
            return
        alike = leave[level[leave] == level[back]]
        # What both take to come back is little of the time for which the other can wait.
        both = fetch[back] + fetch[alike].max(initial=0.0)
        least = slack[back] + max(fetch[back] * LINK_SHARE / COST, both)
        if (slack[alike] >= least).all():
            self.paused[leave], self.paused[back] = True, False

    def _admitted(self, most_running: int) -> int:
        """How many of the waiting requests are admitted. If there is time for one, but no room,
        those with most slack pause now, so that it is admitted in the next iteration."""
        running, waiting = len(self._state.running), self._state.waiting
        places = self._state.max_running - running - len(self._state.prefilling)
        first = waiting.tokens[: self._urgency.in_line(most_running - running, places)]
        if not len(first):
            return 0
        level = int(self._urgency.waiting[0])
        block = self._state.memory.block_tokens
        room = np.cumsum(((first + AHEAD) // block + 1) * block)
        seconds = self._prefill_seconds(first)
        in_time = np.searchsorted(seconds, self._spare_s(self.paused, level), side="right")
        free = self._memory.free(self._present())
        if in_time and free < room[0] and not self._kept_out:
            self._make_way(int(room[0]), float(seconds[0]), level)
        # What those that pause now have is there until the next step.
        now = min(free, self._state.memory.device_free_tokens + self._memory.beyond)
        if in_time and now < room[0] <= free:
            self._expects = True
        return int(min(in_time, np.searchsorted(room, now, side="right")))

    def _resume_if_free(self) -> None:
        """Fetch the first one, by urgency and deadline, if there is room for it anyway. Nobody
        waits for one that has none beside any of those who are active."""
        if self.resuming is not None or self._expects:
            return
        line, takes = np.array(self._in_line(), np.int64), self._memory.freed
        most = self._memory.free(self._present()) + int(takes[self._by_slack()[:-1]].sum())
        for back in line[takes[line] <= most].tolist():
            pausing = self._to_pause(back)
            if pausing is not None:
                self.resuming = None if len(pausing) else back
                return

    def _make_way(self, tokens: int, seconds: float, level: int) -> None:
        """Those with most slack pause for so many tokens of a request of this level, if they can be
        back in time though a prefill of so many seconds holds all up."""
        pausing = self._to_pause(self.resuming, tokens, level)
        if pausing is None:
            return
        paused = self.paused.copy()
        paused[pausing] = True
        if self._spare_s(paused, level) >= seconds:
            self.paused, self._expects = paused, True

    def _spare_s(self, paused: BoolArray, level: int) -> float:
        """`Deadlines.spare_s` of those that are paused and no less urgent than this level."""
        return self._deadlines.spare_s(paused & (self._urgency.running <= level))

    def _prefill_seconds(self, tokens: IntArray) -> FloatArray:
        """Time of prompts under way, and up to each of these."""
        pairs = np.cumsum(tokens * (tokens + 1.0) / 2)
        work = StepWork(0, 0, prefill_rows=np.cumsum(tokens), prefill_pairs=pairs)
        return self._state.latency.step_seconds(work) + under_way_s(self._state)

    def _in_line(self) -> list[int]:
        """Those who are paused, the most urgent first and then by deadline."""
        paused = np.flatnonzero(self.paused)
        keys = self._deadlines.slack_s[paused], self._urgency.running[paused]
        line: list[int] = paused[np.lexsort(keys)].tolist()
        return line

    def _by_slack(self) -> IntArray:
        """Those who are active, in the order in which they pause."""
        active = np.flatnonzero(~self.paused)
        keys = -self._deadlines.slack_s[active], -self._urgency.running[active]
        return np.asarray(active[np.lexsort(keys)])

    def _present(self, resuming: int | None = None) -> BoolArray:
        """Those who are on the device, or are being fetched."""
        present = ~self.paused
        for one in (self.resuming, resuming):
            if one is not None:
                present[one] = True
        return present

    def _to_pause(self, resuming: int | None, tokens: int = 0, level: int = 0) -> IntArray | None:
        """The fewest of those that are active, the least urgent first and then by slack, without
        which so many tokens are free while this one is fetched; None if all but one are not enough.

        Args:
            level: of those that are no more urgent than this.
        """
        short = tokens - self._memory.free(self._present(resuming))
        by_slack = self._by_slack()[:-1]
        by_slack = by_slack[self._urgency.running[by_slack] >= level]
        freed = np.cumsum(self._memory.freed[by_slack])
        count = 0 if short <= 0 else int(np.searchsorted(freed, short)) + 1
        stay = ~self.paused
        stay[by_slack[:count]] = False
        if count > len(by_slack) or not self._memory.holds(stay, resuming):
            return None
        return by_slack[:count]


def _worth_it(state: SystemState, queue: int) -> int:
    """How many may run for what those of them that pause keep of memory, and for what the host has
    room for beside what active ones lack: more where all who wait can run then than where some wait
    nevertheless."""
    memory, known = Memory.of(state, 0.0), len(state.running) + queue
    most = memory.turns(KEPT_FOR_ALL)
    if known > most:
        most = memory.turns(KEPT_SHARE)
    return min(most, memory.both_tiers)


def _all_fit(state: SystemState) -> bool:
    return Memory.of(state, 0.0).free(np.ones(len(state.running), np.bool_)) >= 0
