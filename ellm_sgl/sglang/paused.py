"""Running requests that sit a step out: taken out of SGLang's running batch for it, and brought
back before anything can abort or count them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ellm_sgl.sglang.versions import adapter

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler


@dataclass
class PausedRequests:
    """Of one scheduler."""

    scheduler: Scheduler
    batch: ScheduleBatch | None = None
    """Those paused for the step in flight."""
    before: frozenset[Req] = frozenset()
    """Those who were paused in the step before."""

    def take_out(self, batch: ScheduleBatch, stay: Sequence[int]) -> None:
        """Keep these requests in `batch` for its next step; the others are left out."""
        if len(stay) == len(batch.reqs):
            return
        paused = copy.copy(batch)
        paused.sampling_info = copy.copy(batch.sampling_info)
        # None of them has penalties (`counts_tokens`), but who joins them later may: penalizers
        # count the rows of one batch, by a weak reference to it.
        theirs = batch.sampling_info.penalizer_orchestrator
        paused.sampling_info.penalizer_orchestrator = type(theirs)(
            theirs.vocab_size, paused, set(theirs.penalizers)
        )
        staying = set(stay)
        paused.filter_batch(keep_indices=[i for i in range(len(batch.reqs)) if i not in staying])
        batch.filter_batch(keep_indices=sorted(staying))
        self.batch = paused

    def bring_back(self) -> None:
        """Those who are paused are running requests like any other."""
        paused, self.batch = self.batch, None
        if paused is None:
            return
        self.before = frozenset(paused.reqs)
        running = self.scheduler.running_batch
        if running.is_empty():  # the others have gone into a mixed step
            paused.batch_is_full = running.batch_is_full
            self.scheduler.running_batch = paused
        else:
            running.merge_batch(paused)

    def end_aborted(self, batch: ScheduleBatch) -> None:
        """End requests that were aborted while paused: to be ended by SGLang they would have
        to be restored first and decode a token that nobody reads.

        Their last step has been accounted for, also with overlap scheduling: they had no part in
        the one that may be in flight.
        """
        before, self.before = self.before, frozenset()
        aborted = [r for r in batch.reqs if r in before and r.to_finish is not None]
        for req in aborted:
            req.update_finish_state()
            adapter().release(req, self.scheduler.tree_cache)
            req.time_stats.set_completion_time()
            self.scheduler.output_streamer.stream_output([req], req.return_logprob)
        if aborted:
            batch.filter_batch()
            batch.batch_is_full = False


def counts_tokens(batch: ScheduleBatch) -> bool:
    """Whether SGLang counts tokens for penalties of requests of this batch."""
    return bool(batch.sampling_info.penalizer_orchestrator.is_required)
