"""The loop on SGLang's scheduler: its requests to entries and back, and the hooks that observe,
decide and report once per iteration."""

from __future__ import annotations

import dataclasses
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ellm_sgl.engine import Arrival, Decision, Iteration
from ellm_sgl.engine.request_table import Entries, entries_array
from ellm_sgl.kernels.choose import choose_copy
from ellm_sgl.memory import NOTHING_UNDER_WAY, Resizer, UnderWay
from ellm_sgl.memory.resize import COMMIT_NICE, Submit
from ellm_sgl.memory.shape import IntArray
from ellm_sgl.sglang.context import context_of, row_of, rows_of
from ellm_sgl.sglang.growing import Growing
from ellm_sgl.sglang.metrics import Metrics
from ellm_sgl.sglang.paused import PausedRequests, counts_tokens
from ellm_sgl.sglang.ranks import Found, is_rank_0, least_of_ranks, of_rank_0, own_randomness
from ellm_sgl.sglang.slo import slo_seconds
from ellm_sgl.sglang.tree_blocks import prefixes_of
from ellm_sgl.worker import Worker

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler

_ENTRY = "_ellm_entry"
"""Attribute of a `Req`: its entry in the request table."""


@dataclasses.dataclass(frozen=True)
class Released:
    """The pool's memory has been released on request (`occupation.py`)."""

    units: int
    """That it is to have again,"""
    paused: bool
    """and whether generation is paused apart from that."""


class EllmScheduler:
    """eLLM's side of one SGLang scheduler.

    Args:
        iteration: the loop that it drives.
        scheduler: SGLang's.
        submit: commits memory while steps run; a thread of its own unless given.
    """

    def __init__(
        self, iteration: Iteration, scheduler: Scheduler, submit: Submit | None = None
    ) -> None:
        self.iteration = iteration
        self.scheduler = scheduler
        self.paused = PausedRequests(scheduler)
        self.resizer = Resizer(
            iteration.elastic,
            context_of(scheduler).pool,
            choose_copy(),
            submit or Worker("ellm-commit", COMMIT_NICE).submit,
            self.least_of_ranks,
            context_of(scheduler).memory.for_growth,
            tries_again=context_of(scheduler).sizing is None,
        )
        context_of(scheduler).memory.backed_units = lambda: self.resizer.backed_units
        self.prefilling: Sequence[int] = ()
        """`seq_id` of the prompts in the step being prepared: what decodes beside them is mixed
        in."""
        self.metrics: Metrics | None = None
        """Where SGLang tells its own."""
        self.growing = Growing(self)
        self.fetching: frozenset[Req] = frozenset()
        """Waiting requests whose prefix is being read from the store; admitted once it is there."""
        self.released: Released | None = None
        self.prompt_ratio = 0.0
        """Uncached ratio that the prompt which SGLang computes in chunks was admitted at."""
        self._gone: deque[int] = deque()
        """Entries of requests that SGLang knows no longer. Whichever thread collects garbage finds
        them; the scheduler's takes note."""

    # -- requests ---------------------------------------------------------------------------

    def entries(self, reqs: Sequence[Req]) -> Entries:
        """Entries of these requests in the request table, those of new ones made first."""
        try:
            return entries_array([r._ellm_entry for r in reqs])
        except AttributeError:
            for req in reqs:
                if not hasattr(req, _ENTRY):
                    self._enter(req)
            return entries_array([r._ellm_entry for r in reqs])

    def _enter(self, req: Req) -> None:
        self.note_gone()
        now, requests = self.iteration.clock(), self.iteration.requests
        tpot, ttft = slo_seconds(req.sampling_params.custom_params)
        entry = requests.add(
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
        setattr(req, _ENTRY, entry)
        weakref.finalize(req, self._gone.append, entry).atexit = False

    def note_gone(self) -> None:
        """Take note of requests that SGLang knows no longer."""
        while self._gone:
            self.iteration.left(self._gone.popleft())

    def _urgency(self, req: Req) -> int:
        """SGLang's priority, turned so that larger is more urgent."""
        if req.priority is None or abs(req.priority) >= 2**62:  # SGLang's "none given"
            return 0
        return self.turned(int(req.priority))

    def turned(self, priority: int) -> int:
        """A request's priority as it came, of its urgency; and the other way round."""
        return -priority if self.scheduler.schedule_low_priority_values_first else priority

    def rank(self, req: Req) -> int | None:
        """Place of a waiting request among those that may be admitted; None: it may not."""
        if req in self.fetching:
            return None
        return self.iteration.in_force.admit.get(getattr(req, _ENTRY, -1))

    def is_paused(self, req: Req) -> bool:
        """Whether the decision pauses this running request."""
        return getattr(req, _ENTRY, -1) in self.iteration.in_force.pause

    def ended(self, req: Req) -> None:
        """SGLang has finished with a request that ran."""
        if (entry := getattr(req, _ENTRY, None)) is not None:
            aborted = req.finished_reason.to_json()["type"] == "abort"
            self.iteration.ended(entry, len(req.output_ids), aborted)

    def retracted(self, reqs: Sequence[Req]) -> None:
        """SGLang has sent these requests back to the queue."""
        for req, entry in zip(reqs, self.entries(reqs), strict=True):
            self.iteration.retracted(int(entry), len(req.origin_input_ids) + len(req.output_ids))

    def fetching_ahead(self) -> list[int]:
        """`seq_id` of the requests paused for the step in flight whose KV can be fetched beside it.
        Hidden states are projected by the step that needs them."""
        executor, paused = context_of(self.scheduler).executor, self.paused.batch
        if paused is None or executor.streamer is None or executor.hidden is not None:
            return []
        return rows_of(paused.reqs)

    def stepping(self, batch: ScheduleBatch, indices: Sequence[int]) -> list[int]:
        """Those of these requests of `batch` that take part in its next step: all but the paused,
        unless that leaves nobody.

        Nobody is paused while some request has penalties: SGLang's penalizers count tokens per
        batch and cannot be taken apart and put together again.
        """
        if not self.iteration.in_force.pause:
            return list(indices)
        stay = [i for i in indices if not self.is_paused(batch.reqs[i])]
        return list(indices) if not stay or counts_tokens(batch) else stay

    def evict_paused(self, batch: ScheduleBatch) -> None:
        """Those who sit its next step out lose what the decision asks for."""
        if not self.iteration.in_force.pause:
            return
        stay = set(self.stepping(batch, range(len(batch.reqs))))
        if paused := [r for i, r in enumerate(batch.reqs) if i not in stay]:
            self.iteration.bring_to_ratios(rows_of(paused), paused=True)

    # -- one iteration ----------------------------------------------------------------------

    def decide(self, batch: ScheduleBatch) -> None:
        """Report the step before, observe, decide, and put the decision in force."""
        self.prefilling, self.iteration.elastic.room.prompt_rows = (), 0
        self.iteration.report()
        self.note_gone()
        self.tell(batch)
        self.paused.end_aborted(batch)
        context_of(self.scheduler).may_evict = not batch.reqs
        self.iteration.elastic.under_way = self.under_way()
        running = [r for r in batch.reqs if not r.finished()]
        if (sizing := context_of(self.scheduler).sizing) is not None and self.asks:
            sizing.observe(self.scheduler, self.resizer, running)
        self.fetching = frozenset()
        if not self.scheduler.waiting_queue:
            self.growing.over()
        if (stored := context_of(self.scheduler).stored) is not None:
            stored.keep_computed(batch.reqs)
        if self._decision_stands(running):
            return
        entries = self.entries(running)
        order = np.argsort(self.iteration.requests.request_ids(entries), kind="stable")
        running, entries = [running[i] for i in order], entries[order]
        # On every rank: the order of entry is the order of ids.
        waiting = self.entries(self.scheduler.waiting_queue)
        if not running and not len(waiting):
            self.iteration.decide_nothing()
            if self.scheduler.chunked_req is None:
                self.iteration.idle()
                self.tell(batch, idle=True)
            else:
                left = context_of(self.scheduler).memory.left
                self.iteration.elastic.room.left_bytes = self._of_rank_0(left)
            return
        seq_ids = rows_of(running)
        decision = self._agreed(entries, seq_ids, waiting)
        # An aborted request ends with the token it decodes next.
        pause = frozenset(p for p in decision.pause if not running[p].to_finish)
        decision = dataclasses.replace(decision, pause=pause)
        if pause and counts_tokens(batch):
            decision = decision.without_pauses()
        numbers = entries.tolist(), seq_ids, waiting.tolist()
        self.iteration.put_in_force(decision, *numbers, self._cached_of_admitted)
        if stored is not None and decision.admit:
            computing = len(running) + (self.scheduler.chunked_req is not None)
            self.fetching = stored.fetch(self._admitted(), computing, self.growing.soon)
        # SGLang stops looking at its queue once a batch is full; only then does room matter here.
        room = self.reclaimable_on_device() if batch.batch_is_full else 0
        batch.batch_is_full = self.iteration.queue_closed(
            batch.batch_is_full, bool(self.scheduler.waiting_queue), room
        )

    def tell(self, batch: ScheduleBatch, idle: bool = False) -> None:
        if self.metrics is not None:
            waiting, chunked = len(self.scheduler.waiting_queue), self.scheduler.chunked_req
            counts = len(batch.reqs), int(chunked is not None), waiting
            self.metrics.update(*counts, self.iteration.clock(), idle)

    def _admitted(self) -> list[Req]:
        """Waiting requests that may be admitted, in order."""
        admitted = [
            (r, req) for req in self.scheduler.waiting_queue if (r := self.rank(req)) is not None
        ]
        return [req for _, req in sorted(admitted, key=lambda pair: pair[0])]

    def _cached_of_admitted(self) -> IntArray:
        """Blocks that the prefix cache has of those who may be admitted."""
        return prefixes_of(self.scheduler.tree_cache, self._admitted())

    def under_way(self) -> UnderWay:
        """The prompt that SGLang computes in chunks, as far as it has come."""
        req = self.scheduler.chunked_req
        if req is None:
            return NOTHING_UNDER_WAY
        tokens = len(req.origin_input_ids) + len(req.output_ids)
        table = self.iteration.elastic.table
        return UnderWay.of(table, row_of(req), tokens, self.prompt_ratio)

    def _decision_stands(self, running: Sequence[Req]) -> bool:
        return (
            not self.scheduler.waiting_queue
            and self.scheduler.chunked_req is None
            and len(running) > 0
            and self.iteration.decision_stands(rows_of(running))
        )

    @property
    def asks(self) -> bool:
        """Whether this rank's policy is the one that is asked."""
        return is_rank_0(self.scheduler)

    def _agreed(self, running: Entries, seq_ids: Sequence[int], waiting: Entries) -> Decision:
        """The decision of rank 0. Only that has the policy at all, since what it promises, and
        whether it can be made, may differ as well."""
        iteration, chunked = self.iteration, self.scheduler.chunked_req
        prefilling = self.entries([] if chunked is None else [chunked])

        def decided() -> Decision:
            if (sizing := context_of(self.scheduler).sizing) is not None:
                iteration.growth = sizing.growth(self.resizer, iteration.elastic.table.shape)
            room = self.reclaimable_on_device()
            state = iteration.observe(running, seq_ids, waiting, prefilling, room)
            left = context_of(self.scheduler).memory.left()
            with own_randomness(self.scheduler):
                decision = iteration.decide(state)
            return dataclasses.replace(decision, step_bytes=left)

        return self._of_rank_0(decided)

    def _of_rank_0(self, found: Callable[[], Found]) -> Found:
        return of_rank_0(self.scheduler, found)

    def resize(self, units: int | None = None) -> None:
        """Go on shrinking or growing the pool, or begin to: to so many units."""
        if units is None:
            self.resizer.step(self.idle())
        else:
            self.resizer.ask(units, self.idle())

    def at_once(self, units: int) -> int:
        """Of these units, those that all ranks may ask for now: no more than has been debited."""
        sizing = context_of(self.scheduler).sizing
        if sizing is None:
            return units
        return self._of_rank_0(lambda: min(units, sizing.at_once(self.resizer)))

    def idle(self) -> bool:
        """Whether no request is in SGLang's hands: those whose prompt the last step has computed,
        or one of its chunks, are not among the running ones yet."""
        scheduler, last = self.scheduler, self.scheduler.last_batch
        running = scheduler.running_batch.reqs or (last is not None and last.reqs)
        return not (running or scheduler.waiting_queue or scheduler.chunked_req is not None)

    def unfinished(self) -> list[Req]:
        """Requests that decode, and those whose prompt the last step has computed."""
        batches = self.scheduler.running_batch, self.scheduler.last_batch
        reqs = {id(r): r for batch in batches if batch is not None for r in batch.reqs}
        return [r for r in reqs.values() if not r.finished()]

    def least_of_ranks(self, numbers: list[int]) -> list[int]:
        return least_of_ranks(self.scheduler, numbers)

    def reclaimable(self) -> int:
        """Tokens of cached prefixes that nobody uses: slots, whether or not the device has them."""
        return int(self.scheduler.tree_cache.evictable_size())

    def reclaimable_on_device(self) -> int:
        """Device tokens that these prefixes would make room for."""
        table = self.iteration.elastic.table
        return table.shape.tokens_in(table.idle_units(self.reclaimable()))


def scheduler_of(owner: Any) -> EllmScheduler:
    """eLLM's side of the scheduler, from whatever `context_of` takes; hooks call it only once the
    scheduler exists."""
    found = context_of(owner).scheduler
    assert isinstance(found, EllmScheduler), "eLLM is enabled, but no scheduler was built"
    return found


def note_end(cache: Any, req: Req) -> None:
    """A request that leaves its row without having finished was retracted."""
    if req.finished():
        scheduler_of(cache).ended(req)


# -- hooks ----------------------------------------------------------------------------------


def decide(scheduler: Scheduler, running_batch: ScheduleBatch) -> None:
    """Before `Scheduler.get_new_batch_prefill`: what is to happen in this iteration."""
    scheduler_of(scheduler).decide(running_batch)


def order_waiting(_: Any, policy: Any, waiting_queue: list[Req], *args: Any, **kw: Any) -> Any:
    """After `SchedulePolicy.calc_priority`: those who may be admitted first, in the policy's order,
    or in SGLang's where the policy has none of its own."""
    ours = scheduler_of(policy.tree_cache)
    if ours.iteration.in_force.reorders:
        last = len(ours.iteration.in_force.admit)
        waiting_queue.sort(key=lambda req: last if (r := ours.rank(req)) is None else r)
    else:
        waiting_queue.sort(key=lambda req: ours.rank(req) is None)
    return _


def resume_paused(scheduler_or_checker: Any, *_: Any, **__: Any) -> None:
    """Before the scheduler takes requests (and SGLang's check of a busy server): those who were
    paused are running requests like any other, for instance to be aborted."""
    scheduler_of(scheduler_or_checker).paused.bring_back()


def count_waiting_chunk(sizes: tuple[int, int], checker: Any) -> tuple[int, int] | None:
    """After `SchedulerInvariantChecker._get_total_uncached_sizes`, of tokens that requests have and
    the prefix cache has not: SGLang looks at the requests of the last step and at those that
    decode. A prompt whose next chunk waits for memory is in neither, and its last page may be
    begun."""
    scheduler = scheduler_of(checker).scheduler
    req, last = scheduler.chunked_req, scheduler.last_batch
    if req is None or req.kv is None or (last is not None and any(r is req for r in last.reqs)):
        return None
    allocated = -(-req.kv.kv_allocated_len // checker.page_size) * checker.page_size
    return sizes[0] + allocated - req.cache_protected_len, sizes[1]


def resize(scheduler: Scheduler, requests: Sequence[Any] = (), *_: Any, **__: Any) -> None:
    """Before `Scheduler.process_input_requests`: a pool that shrinks or grows goes on with it, also
    while generation is paused."""
    ours, sizing = scheduler_of(scheduler), context_of(scheduler).sizing
    ours.resize()
    if sizing is not None and not requests:
        sizing.trim(ours)
    if scheduler._engine_paused:  # nothing is decided, but requests and memory change
        ours.tell(scheduler.running_batch)
        if sizing is not None and ours.asks:
            sizing.observe(scheduler, ours.resizer, ours.unfinished())
