"""The loop, in order:

```
 ┌─▶ observe ─▶ decide ─▶ make room ─▶ place ─▶ plan ─▶ execute ─▶ report ─┐
 └──────────────────────────────────────────────────────────────────────────┘
```

Who drives it: on a server SGLang's scheduler, whose functions call the phases where it does the
same for itself (`ellm_sgl.sglang.hooks`); in the simulator its own loop
(`ellm_sgl.eval.simulator.engine`). No SGLang in here.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from ellm_sgl.engine.attainment import TPOT, TTFT, Attainment
from ellm_sgl.engine.controller import Controller
from ellm_sgl.engine.decision import Decision, InForce
from ellm_sgl.engine.request_table import NO_ENTRIES, Entries, RequestTable
from ellm_sgl.latency import NO_WORK, StepWork
from ellm_sgl.memory import ElasticMemory
from ellm_sgl.memory.shape import NO_BLOCKS, IntArray
from ellm_sgl.policies import SystemState
from ellm_sgl.policies.base import NO_GROWTH
from ellm_sgl.step.executor import Executor
from ellm_sgl.step.plan import StepPlan
from ellm_sgl.step.planner import Planner
from ellm_sgl.step.restoration import GroupTransfer


class Iteration:
    """One per scheduler process. Requests are named by their entry in `requests`, and once they
    have blocks, also by `seq_id`, their number in the page table.

    Args:
        controller: asks the policy, and keeps the log of steps.
        elastic: memory.
        unit_bytes: size of a unit.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        controller: Controller,
        elastic: ElasticMemory,
        unit_bytes: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.controller = controller
        self.elastic = elastic
        self.requests = RequestTable()
        self.attainment = Attainment()
        self.in_force = InForce()
        self.growth = NO_GROWTH
        """What the pool could come to hold beside what it does; who drives the loop knows."""
        self.clock = clock
        self._unit_bytes = unit_bytes
        self._in_step: tuple[Entries, npt.NDArray[np.int64]] | None = None
        self._refused: tuple[int | None, int, int] | None = None
        """See `refused`."""

    # -- observe ----------------------------------------------------------------------------

    def observe(
        self,
        running: Entries,
        seq_ids: Sequence[int],
        waiting: Entries,
        prefilling: Entries = NO_ENTRIES,
        reclaimable: int = 0,
    ) -> SystemState:
        """The state that the policy is asked about.

        Args:
            running: entries of the requests that decode, and their
            seq_ids: in the same order.
            waiting: entries of those that wait.
            prefilling: entry of the one whose prompt is under way (`ElasticMemory.under_way`), or
                none.
            reclaimable: device tokens of cached prefixes that nobody uses.
        """
        now, elastic, requests = self.clock(), self.elastic, self.requests
        lengths = elastic.table.lengths_of(seq_ids)
        uncached = elastic.table.uncached_tokens(seq_ids)
        on_host = elastic.table.uncached_on_host(seq_ids)
        shared = elastic.shared_tokens(seq_ids)
        decoding = requests.running(running, lengths, shared, uncached, on_host, now)
        under_way = elastic.under_way
        to_lack = under_way.uncached_blocks * elastic.table.shape.block_tokens
        coming = requests.prefilling(prefilling, to_lack, now)
        return self.controller.state(
            now,
            decoding,
            requests.waiting(waiting, now),
            coming,
            dataclasses.replace(elastic.memory_state(seq_ids, reclaimable), growth=self.growth),
            requests.lengths(decoding),
            _left(int(coming.tokens.sum()), under_way.left) if len(coming) else NO_WORK,
        )

    # -- decide -----------------------------------------------------------------------------

    def decision_stands(self, seq_ids: Sequence[int]) -> bool:
        """Whether the last decision still holds without asking (`Policy.idle_without_pressure`):
        all of these, which run, is cached, and there is room for a block more of each."""
        table = self.elastic.table
        return (
            self.in_force.stands
            and not self.in_force.admit
            and table.free_units >= len(seq_ids) * table.shape.num_groups
            and not (table.missing_units and table.lacking_blocks(seq_ids).any())
        )

    def decide(self, state: SystemState) -> Decision:
        """Ask the policy. With several ranks, one of them does."""
        return self.controller.decide(state)

    def put_in_force(
        self,
        decision: Decision,
        running: Sequence[int],
        seq_ids: Sequence[int],
        waiting: Sequence[int],
        cached: Callable[[], IntArray] = lambda: NO_BLOCKS,
    ) -> None:
        """From now on `decision` holds, on those who were observed. Before anybody is admitted
        those that run come to its ratios: a prompt takes units from nobody, and its blocks that get
        none are computed again in the step after it.

        Args:
            cached: blocks that those who are admitted will find; these stay.
        """
        paused_before = self.in_force.pause
        self.in_force = InForce.of(decision, running, seq_ids, waiting)
        self.elastic.room.left_bytes = decision.step_bytes
        self.elastic.totals.pauses += len(self.in_force.pause - paused_before)
        if decision.admit and any(decision.ratios):
            with self.elastic.totals.bookkeeping():
                kept = cached()
                for paused in (True, False):
                    those = [s for s, e in zip(seq_ids, running, strict=True)
                             if (e in self.in_force.pause) == paused]  # fmt: skip
                    self.bring_to_ratios(those, paused, kept)

    def decide_nothing(self) -> None:
        """Nobody runs or waits."""
        self.in_force = dataclasses.replace(
            self.in_force,
            uncached_ratios={},
            admit={},
            admitted_ratios=(),
            pause=frozenset(),
            fetch_ahead_s=0.0,
        )

    def ask_anew(self) -> None:
        """The policy is another: what the one before promised holds no more."""
        self.in_force = dataclasses.replace(self.in_force, stands=False)

    def idle(self) -> None:
        """The time until the next step is nobody's."""
        self.controller.steps.idle()

    def admission_tokens(self, reclaimable: int = 0) -> tuple[int, int]:
        """(now, eventually) for the first who may be admitted: see `AdmissionRoom.tokens`."""
        return self.elastic.admission_room(reclaimable).tokens(self.in_force.first_ratio)

    def refused(self, eventually: int, entry: int | None = None) -> None:
        """Those who wait found no room beyond so many tokens: of the one considered last, by
        default the first who may be admitted."""
        first, pool = self.in_force.first, self.elastic.table.unit_limit
        self._refused = first if entry is None else entry, eventually, pool

    def queue_closed(self, closed: bool, anybody_waits: bool, reclaimable: int = 0) -> bool:
        """Whether nobody is admitted now: nobody is to be, or, `closed` before, the same request is
        first that was refused, and there is no more room than then. A pool that has grown is more,
        whatever those that were admitted in the same pass, and who runs, have taken since."""
        if not self.in_force.admit:
            self._refused = None
            return anybody_waits
        if not closed or self._refused is None:
            return False
        entry, eventually, pool = self._refused
        if entry != self.in_force.first or self.elastic.table.unit_limit > pool:
            return False
        return self.admission_tokens(reclaimable)[1] <= eventually

    # -- make room --------------------------------------------------------------------------

    def make_room(self, blocks: int, seq_ids: Sequence[int], beside: Sequence[int] = ()) -> bool:
        """Evict until so many blocks can be placed, as far as possible.

        Args:
            seq_ids: who decodes in the step, and
            beside: whose prompts are in it.

        Returns:
            Whether there is room, and one step can restore what it has to.
        """
        elastic = self.elastic
        with elastic.totals.bookkeeping():
            units = blocks * elastic.table.shape.num_groups
            # A mixed step places nothing of what it computes again.
            room = elastic.make_room_for_step(units, seq_ids, exchanges=not beside)
            return room and elastic.fits_one_step([*seq_ids, *beside], units)

    def bring_to_ratios(
        self, seq_ids: Sequence[int], paused: bool = False, kept: IntArray = NO_BLOCKS
    ) -> None:
        """Evict from these requests what the decision asks for, but for blocks that are `kept`. The
        `paused` take no part in the step, which need not restore them."""
        ratios = [self.in_force.uncached_ratios.get(seq_id, 0.0) for seq_id in seq_ids]
        self.elastic.bring_to_ratios(seq_ids, ratios, paused, kept)

    # -- place ------------------------------------------------------------------------------

    def fetch_ahead(
        self, paused: Sequence[int], decoding: int, seconds: float
    ) -> tuple[IntArray, IntArray]:
        """Place blocks of paused requests that are to resume, to be fetched beside a step of so
        many `decoding` requests, in the `seconds` that the link has for it.

        Returns:
            Host units, and the device units that they go to.
        """
        return self.elastic.fetch_ahead(paused, decoding, self._units_in(seconds))

    def _units_in(self, seconds: float) -> int:
        """Units that the link copies in this time."""
        return int(seconds * self.controller.limits.hardware.link_bytes_per_s / self._unit_bytes)

    # -- plan -------------------------------------------------------------------------------

    def plan_decode(
        self, planner: Planner, seq_ids: Sequence[int], paused: Sequence[int] = ()
    ) -> StepPlan:
        """Plan one more token for each request, and what is fetched ahead for those paused."""
        with self.elastic.totals.bookkeeping():
            if not paused:
                return planner.decode(seq_ids, self.in_force.split)
            seconds = self.in_force.fetch_ahead_s
            # Before the plan: none of its copies is of a unit that then is another's.
            self.elastic.room_ahead(paused, seq_ids, self._units_in(seconds))
            plan = planner.decode(seq_ids, self.in_force.split)
            ahead = self.fetch_ahead(paused, len(seq_ids), seconds)
            if not len(ahead[0]):
                return plan
            return plan._replace(fetched_ahead=GroupTransfer.of(*ahead))

    def plan_extend(
        self, planner: Planner, seq_ids: Sequence[int], counts: Sequence[int]
    ) -> StepPlan:
        """Plan the last `counts` tokens of each request: a prompt, or a chunk of one.

        Cached prefixes that nobody uses make way for what is fetched: it would be computed again.
        """
        elastic = self.elastic
        with elastic.totals.bookkeeping():
            if elastic.table.missing_units:
                fetched = elastic.fetched_blocks(elastic.table.missing_blocks(seq_ids))
                elastic.reclaim_prefixes(elastic.slots * fetched)
            return planner.extend(seq_ids, counts, self.in_force.split)

    # -- execute ----------------------------------------------------------------------------

    @contextmanager
    def execute(self, executor: Executor, plan: StepPlan, work: StepWork) -> Iterator[None]:
        """The forward pass inside this context follows `plan`, whose work is `work`."""
        self.started(work)
        try:
            with executor.execute(plan):
                yield
        finally:
            self.elastic.totals.swap_stall_s += executor.stall_s
            self.controller.steps.stalled(executor.stall_s)

    # -- report -----------------------------------------------------------------------------

    def started(self, work: StepWork, steps: int = 1) -> None:
        """A step of this work begins; the one before it has ended."""
        self.controller.steps.start(work, steps)

    def in_step(self, entries: Entries, lengths: npt.NDArray[np.int64]) -> None:
        """These requests get a token in the step being prepared; `lengths` counts it."""
        self._in_step = entries, lengths

    def report(self) -> None:
        """The step has ended: its requests have their tokens."""
        if self._in_step is not None:
            self.requests.decoded(*self._in_step, self.clock())
            self._in_step = None

    def ended(self, entry: int, output_tokens: int, aborted: bool) -> None:
        """A request has ended, with so many tokens of output."""
        if output_tokens and not aborted:
            done = self.requests.measured(entry, self.clock())
            tpot_slo_s = min(done.tpot_slo_s, self.controller.limits.tpot_slo_s)
            self.attainment.ended(done.priority, TPOT, tpot_slo_s, done.tpot_s)
            self.attainment.ended(done.priority, TTFT, done.ttft_slo_s, done.ttft_s)
        self.controller.guard.ended(self.requests.end(entry, output_tokens, aborted))

    def left(self, entry: int) -> None:
        """The server knows a request no longer; if it has not ended, it was aborted."""
        if self._refused is not None and self._refused[0] == entry:
            self._refused = None  # who gets that entry next is somebody else
        if (ended := self.requests.remove(entry)) is not None:
            self.controller.guard.ended(ended)

    def retracted(self, entry: int, tokens: int) -> None:
        """A running request waits again, with so many tokens of prompt and output."""
        self.requests.wait_again(entry, tokens, self.clock())


def _left(tokens: int, left: int) -> StepWork:
    """The last so many tokens of a prompt."""
    pairs = left * (tokens - left) + left * (left + 1) / 2
    return StepWork(0, 0, prefill_rows=left, prefill_pairs=pairs)
