"""Hooks through which the policy's decision reaches SGLang's scheduler.

One decision per iteration, made before SGLang considers new requests, and applied where SGLang
acts: the order and number of waiting requests that join, the running requests that sit out, the
ratios (`scheduling.apply_targets`).
"""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ellm_sgl.engine import Arrival, ControlLoop, Decision
from ellm_sgl.engine.request_table import RequestBook, slots_array
from ellm_sgl.policies import SystemState
from ellm_sgl.sglang import runtime
from ellm_sgl.sglang.slo import slo_seconds

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler

_SLOT = "_ellm_slot"
"""Attribute of a `Req`: its slot in the request book."""


@dataclass
class Deciding:
    """The decision in force, and the requests it speaks of. One per scheduler process."""

    loop: ControlLoop
    scheduler: Scheduler
    book: RequestBook = field(default_factory=RequestBook)
    ratios: dict[int, float] = field(default_factory=dict)
    """Target ratio by `seq_id` of the running requests."""
    joining_ratio: float = 0.0
    join: dict[Req, int] = field(default_factory=dict)
    """Waiting requests that may join, with their rank."""
    reorders: bool = False
    pause: frozenset[Req] = frozenset()
    fetch_ahead_s: float = 0.0
    """Seconds of the link that the coming step may spend on those who sit it out."""
    prefilling: Sequence[int] = ()
    """`seq_id` of the prompts in the step being prepared: what decodes beside them is mixed in."""
    paused: ScheduleBatch | None = None
    """Requests that sit out the step under way."""
    sat_out: frozenset[Req] = frozenset()
    """Requests that sat out the step before."""
    in_step: tuple[Any, Any] | None = None
    """Slots and lengths of the requests in the step under way."""
    settled: bool = False
    """Whether the last decision was to keep everything, and stands by the policy's promise."""
    budget_at_refusal: int | None = None
    """Tokens that could be admitted when SGLang last found no room."""

    def apply_targets(self, reqs: list[Req], sitting_out: bool = False) -> None:
        """Bring these requests to the policy's ratios."""
        seq_ids = runtime.rows_of(reqs)
        ratios = [self.ratios.get(s, 0.0) for s in seq_ids]
        runtime.current().elastic.apply_targets(seq_ids, ratios, sitting_out)

    def sitting_out(self) -> list[int]:
        """`seq_id` of the requests that sit out the step under way."""
        return [] if self.paused is None else runtime.rows_of(self.paused.reqs)

    def stepping(self, batch: ScheduleBatch, indices: Sequence[int]) -> list[int]:
        """Those of these requests of `batch` that take part in its next step: all but the paused,
        unless that leaves nobody.

        Nobody is paused while some request has penalties: SGLang's penalizers count tokens per
        batch and cannot be taken apart and put together again.
        """
        stay = [i for i in indices if batch.reqs[i] not in self.pause]
        if not stay or batch.sampling_info.penalizer_orchestrator.is_required:
            return list(indices)
        return stay

    def rest(self, reqs: Sequence[Req]) -> None:
        """Those of these requests that are paused give up what the policy asks of them."""
        if resting := [r for r in reqs if r in self.pause]:
            self.apply_targets(resting, sitting_out=True)

    def take_out(self, batch: ScheduleBatch, stay: Sequence[int]) -> None:
        """Keep these requests in `batch` for its next step; the others sit it out."""
        if len(stay) == len(batch.reqs):
            return
        paused = copy.copy(batch)
        paused.sampling_info = copy.copy(batch.sampling_info)
        paused.sampling_info.penalizer_orchestrator = copy.copy(
            batch.sampling_info.penalizer_orchestrator
        )
        staying = set(stay)
        paused.filter_batch(keep_indices=[i for i in range(len(batch.reqs)) if i not in staying])
        batch.filter_batch(keep_indices=sorted(staying))
        self.paused = paused

    def bring_back(self) -> None:
        """Those who sat out are running requests like any other."""
        paused, self.paused = self.paused, None
        if paused is None:
            return
        self.sat_out = frozenset(paused.reqs)
        running = self.scheduler.running_batch
        if running.is_empty():  # the others have gone into a mixed step
            paused.batch_is_full = running.batch_is_full
            self.scheduler.running_batch = paused
        else:
            running.merge_batch(paused)

    def end_aborted(self, batch: ScheduleBatch) -> None:
        """End requests that were aborted while they sat out: to be ended by SGLang they would have
        to be restored first and decode a token that nobody reads.

        Their last step has been accounted for, also with overlap scheduling: they had no part in
        the one that may be under way.
        """
        from sglang.srt.mem_cache.common import release_kv_cache

        sat_out, self.sat_out = self.sat_out, frozenset()
        aborted = [r for r in batch.reqs if r in sat_out and r.to_finish is not None]
        for req in aborted:
            req.update_finish_state()
            release_kv_cache(req, self.scheduler.tree_cache)
            req.time_stats.set_completion_time()
            self.scheduler.output_streamer.stream_output([req], req.return_logprob)
        if aborted:
            batch.filter_batch()
            batch.batch_is_full = False

    # -- observe ----------------------------------------------------------------------------

    def slots(self, reqs: list[Req]) -> Any:
        """Slots of these requests in the book, those of new ones first entered."""
        try:
            return slots_array([r._ellm_slot for r in reqs])
        except AttributeError:
            for req in reqs:
                if not hasattr(req, _SLOT):
                    self._enter(req)
            return slots_array([r._ellm_slot for r in reqs])

    def _enter(self, req: Req) -> None:
        now = time.monotonic()
        tpot, ttft = slo_seconds(req.sampling_params.custom_params)
        slot = self.book.add(
            Arrival(
                tokens=len(req.origin_input_ids) + len(req.output_ids),
                prompt_tokens=len(req.origin_input_ids),
                max_new_tokens=req.sampling_params.max_new_tokens,
                arrival_s=now,
                priority=self._urgency(req),
                tpot_slo_s=tpot,
                ttft_slo_s=ttft,
            ),
            now,
        )
        setattr(req, _SLOT, slot)
        weakref.finalize(req, self.book.remove, slot).atexit = False

    def _urgency(self, req: Req) -> int:
        """SGLang's priority, turned so that larger is more urgent."""
        if req.priority is None or abs(req.priority) >= 2**62:  # SGLang's "none given"
            return 0
        lower_first = self.scheduler.schedule_low_priority_values_first
        return -req.priority if lower_first else int(req.priority)

    def observe(self, running: list[Req], waiting: list[Req]) -> SystemState:
        now = time.monotonic()
        elastic = runtime.current().elastic
        seq_ids = runtime.rows_of(running)
        lengths = elastic.table.lengths_of(seq_ids)
        return self.loop.state(
            now,
            self.book.running(
                self.slots(running),
                lengths,
                elastic.shared_tokens(seq_ids),
                elastic.uncached_tokens(seq_ids),
                now,
            ),
            self.book.waiting(self.slots(waiting), now),
            elastic.memory_state(seq_ids, self._reclaimable()),
        )

    def _reclaimable(self) -> int:
        return int(self.scheduler.tree_cache.evictable_size())

    def token_decoded(self, reqs: list[Req], seq_ids: Sequence[int]) -> None:
        """These requests get a token each in the step that is being prepared."""
        self.in_step = self.slots(reqs), runtime.current().table.lengths_of(seq_ids)

    def _note_tokens(self) -> None:
        """The step before has ended: its requests have their tokens."""
        if self.in_step is not None:
            self.book.decoded(*self.in_step, time.monotonic())
            self.in_step = None

    def retracted(self, reqs: list[Req]) -> None:
        """SGLang has sent these requests back to the queue."""
        for req, slot in zip(reqs, self.slots(reqs), strict=True):
            tokens = len(req.origin_input_ids) + len(req.output_ids)
            self.book.wait_again(slot, tokens, time.monotonic())

    # -- decide -----------------------------------------------------------------------------

    @property
    def asks(self) -> bool:
        """Whether this rank's policy is the one that is asked."""
        return bool(self.scheduler.ps.tp_rank == 0)

    def decide(self, batch: ScheduleBatch) -> None:
        """Ask the policy about this iteration, on rank 0, and share its decision."""
        self.prefilling = ()
        self._note_tokens()
        self.end_aborted(batch)
        if self._settled(batch):
            return
        running = [r for r in batch.reqs if not r.finished()]
        order = np.argsort(self.book.request_ids(self.slots(running)), kind="stable")
        running = [running[i] for i in order]
        waiting = self.scheduler.waiting_queue
        self.slots(waiting)  # on every rank: the order of entry is the order of ids
        paused_before = self.pause
        self.ratios, self.join, self.pause = {}, {}, frozenset()
        self.fetch_ahead_s = 0.0
        if not running and not waiting:
            if self.scheduler.chunked_req is None:
                self.loop.steps.idle()
            return
        decision = self._agreed(running, waiting)
        self.ratios = dict(zip(runtime.rows_of(running), decision.ratios, strict=True))
        self.joining_ratio = decision.joining_ratio
        self.join = {waiting[w]: rank for rank, w in enumerate(decision.join)}
        self.reorders = decision.reorders
        # An aborted request ends with the token it decodes next.
        self.pause = frozenset(r for p in decision.pause if not (r := running[p]).to_finish)
        self.fetch_ahead_s = decision.fetch_ahead_s
        runtime.current().elastic.totals.sat_out += len(self.pause - paused_before)
        runtime.current().threads = decision.threads
        self.settled = decision.settles
        self._open_or_close(batch)

    def _settled(self, batch: ScheduleBatch) -> bool:
        """Whether the last decision stands without asking (`Policy.idle_without_pressure`)."""
        table = runtime.current().table
        return (
            self.settled
            and not self.scheduler.waiting_queue
            and self.scheduler.chunked_req is None
            and not self.join
            and table.none_units == 0
            and table.free_units >= len(batch.reqs) * table.shape.num_groups
            and not all(r.finished() for r in batch.reqs)
        )

    def _agreed(self, running: list[Req], waiting: list[Req]) -> Decision:
        """Rank 0's decision: clocks differ between ranks, decisions must not. Only rank 0 has the
        policy at all, since what it promises, and whether it can be made, may differ as well."""
        ranks = self.scheduler.ps
        if ranks.tp_size == 1:
            return self.loop.decide(self.observe(running, waiting))
        from sglang.srt.utils import broadcast_pyobj

        group = self.scheduler.tp_group
        mine = [self.loop.decide(self.observe(running, waiting))] if self.asks else []
        (decision,) = broadcast_pyobj(mine, group.rank, group.cpu_group, src=group.ranks[0])
        return decision

    def _open_or_close(self, batch: ScheduleBatch) -> None:
        """SGLang stops looking at its queue once a batch is full. Close it when nobody is to
        join, and open it again when more could be admitted than when it found no room."""
        if not self.join:
            batch.batch_is_full = bool(self.scheduler.waiting_queue)
            self.budget_at_refusal = None
        elif batch.batch_is_full and (
            self.budget_at_refusal is None or self.budget() > self.budget_at_refusal
        ):
            batch.batch_is_full = False

    def budget(self) -> int:
        """Tokens of requests that could be admitted, once they are at their ratios."""
        elastic = runtime.current().elastic
        return elastic.admission_tokens(self._reclaimable(), self.joining_ratio)[1]


def deciding() -> Deciding:
    """This process's decision in force; hooks call it only once the scheduler exists."""
    found = runtime.current().deciding
    assert found is not None, "eLLM is enabled, but SGLang's scheduler was not built"
    return found


# -- hooks ----------------------------------------------------------------------------------


def decide(scheduler: Scheduler, running_batch: ScheduleBatch) -> None:
    """Before `Scheduler.get_new_batch_prefill`: what is to happen in this iteration."""
    deciding().decide(running_batch)


def order_waiting(_: Any, policy: Any, waiting_queue: list[Req], *args: Any, **kw: Any) -> Any:
    """After `SchedulePolicy.calc_priority`: those who may join first, in the policy's order, or
    in SGLang's where the policy has none of its own."""
    ours = deciding()
    last = len(ours.join)
    if ours.reorders:
        waiting_queue.sort(key=lambda req: ours.join.get(req, last))
    else:
        waiting_queue.sort(key=lambda req: req not in ours.join)
    return _


def may_join(req: Req) -> bool:
    """Whether the policy lets this waiting request join now."""
    return req in deciding().join


def rejoin(scheduler_or_checker: Any, *_: Any, **__: Any) -> None:
    """Before `Scheduler.process_input_requests` (and SGLang's check of a busy server): those who
    sat out are running requests like any other, for instance to be aborted."""
    deciding().bring_back()
