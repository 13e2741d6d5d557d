"""What a life comes by, counted: so that lives which no longer come by something are noticed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

from ellm_sgl.policies import SystemState
from ellm_sgl.sglang.scheduler import scheduler_of
from tests.simulation.plane import Plane
from tests.simulation.scheduler import SimulatedScheduler

ELASTIC = (
    "evicted_units",
    "saved_units",
    "restored_units",
    "relocated_units",
    "recomputed_tokens",
    "fetched_units",
    "fetched_ahead_units",
    "borrowed_units",
    "projected_units",
    "retractions",
    "pauses",
)
"""Of `elastic.Totals`."""

EVERYTHING = (
    *ELASTIC,
    "turns",
    "steps: prefill",
    "steps: decode",
    "steps: mixed",
    "steps: a chunk that is not the last",
    "steps: with a request that has ended",
    "steps: with the host full",
    "steps: on a device behind the host",
    "aborted: waiting",
    "aborted: between chunks",
    "aborted: decoding",
    "aborted: paused",
    "units adopted by the tree",
    "prefixes cut where units were lost",
    "prefix tokens found in the tree",
    "shared blocks",
    "pauses: in_place",
    "pauses: retract",
    "flushes",
    "flushes refused",
    "resized",
    "resizes: applied",
    "resizes: floor",
    "resizes: ceiling",
    "steps: of as many rows as there is memory for",
    "steps: while the pool grows",
    "steps: with more units than at the start",
    "turns in which the pool yields to others",
    "policy failures",
    "samples of one prompt",
    "answers stopped",
    "blocks stored",
    "blocks read from the store",
    "turns in which a prompt's prefix is being read",
    "turns in which a policy is told of a prompt under way",
    "turns in which blocks of requests that have ended are to be stored",
)


class Exercised:
    """Counts what one rank does.

    Args:
        counts: to add to.
    """

    def __init__(self, counts: Counter[str], plane: Plane, scheduler: SimulatedScheduler) -> None:
        self._counts = counts
        self._plane, self._scheduler = plane, scheduler
        self._resizer = scheduler_of(scheduler).resizer
        self._outcome = self._resizer.outcome
        self._spy(plane.table, "adopt", "units adopted by the tree", int)
        self._spy(scheduler, "flush_cache", "flushes", int)
        iteration = plane.context.iteration
        assert iteration is not None
        yields = "turns in which the pool yields to others"
        resizer = self._resizer
        self._spy(resizer, "_begin_to_yield", yields, lambda _: resizer._yields_to is not None)
        told = "turns in which a policy is told of a prompt under way"
        self._spy(iteration.controller, "state", told, self._prefilling)
        if hasattr(plane.tree, "_drop_beyond"):
            self._spy(plane.tree, "_drop_beyond", "prefixes cut where units were lost", lambda _: 1)

    def _spy(self, owner: Any, name: str, count: str, how_many: Callable[[Any], int]) -> None:
        original = getattr(owner, name)

        def spied(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._counts[count] += how_many(result)
            return result

        setattr(owner, name, spied)

    def _prefilling(self, state: SystemState) -> int:
        told, chunked = state.prefilling.priority.tolist(), self._scheduler.chunked_req
        assert told == ([] if chunked is None else [chunked.priority])
        return len(told)

    def step(self, batch: ScheduleBatch) -> None:
        """A step is about to run."""
        counts, mode = self._counts, batch.forward_mode
        kind = "mixed" if mode.is_mixed() else "decode" if mode.is_decode() else "prefill"
        counts[f"steps: {kind}"] += 1
        counts["steps: a chunk that is not the last"] += any(
            req.inflight_middle_chunks > 0 for req in batch.reqs
        )
        counts["steps: on a device behind the host"] += self._plane.device is not None
        counts["steps: while the pool grows"] += self._resizer._growth is not None
        rows = self._plane.configuration.step_rows
        if rows is not None and not mode.is_decode():
            block = self._plane.table.shape.block_tokens
            name = "steps: of as many rows as there is memory for"
            counts[name] += batch.extend_num_tokens > rows - block
        table = self._plane.table
        beyond = table.highest_unit > self._resizer.start_units
        counts["steps: with more units than at the start"] += beyond
        full = table.host.num_units > 0 and table.host.free_units == 0
        counts["steps: with the host full"] += full
        if not mode.is_decode():
            counts["prefix tokens found in the tree"] += sum(batch.prefix_lens)
            blocks = [table.blocks_of(req.req_pool_idx) for req in batch.reqs]
            counts["shared blocks"] += sum(int((table.references(b) > 2).sum()) for b in blocks)

    def turn(self) -> None:
        """A turn of the loop is over."""
        reading = bool(scheduler_of(self._scheduler).fetching)
        self._counts["turns in which a prompt's prefix is being read"] += reading
        if (stored := self._plane.context.stored) is not None:
            name = "turns in which blocks of requests that have ended are to be stored"
            self._counts[name] += bool(stored._ended)
        if (outcome := self._resizer.outcome) is not self._outcome:
            self._outcome = outcome
            self._counts[f"resizes: {outcome}"] += 1
        in_flight = self._scheduler.last_batch if self._scheduler.enable_overlap else None
        if in_flight is not None:
            ended = any(req.finished() for req in in_flight.reqs)
            self._counts["steps: with a request that has ended"] += ended

    def request(self, request: Any) -> None:
        """Somebody asks the server for something."""
        counts = self._counts
        match type(request).__name__:
            case "AbortReq":
                self._abort(request)
            case "PauseGenerationReqInput":
                counts[f"pauses: {request.mode}"] += 1
            case "SetInternalStateReq":
                counts["resized"] += 1
            case "FlushCacheReqInput":
                counts["flushes refused"] += not self._scheduler.is_fully_idle()

    def _abort(self, request: AbortReq) -> None:
        scheduler = self._scheduler
        for req in scheduler.reqs.values():
            if not req.finished() and (request.abort_all or req.rid.startswith(request.rid)):
                self._counts[f"aborted: {self._state_of(req)}"] += 1

    def _state_of(self, req: Req) -> str:
        scheduler = scheduler_of(self._scheduler)
        if req is self._scheduler.chunked_req:
            return "between chunks"
        if req.req_pool_idx is None:
            return "waiting"
        return "paused" if scheduler.is_paused(req) else "decoding"

    def end(self) -> None:
        """The life has ended."""
        if (stored := self._plane.context.stored) is not None:
            self._counts["blocks stored"] += stored.store.totals.stored_blocks
            self._counts["blocks read from the store"] += stored.store.totals.read_blocks
        totals = self._plane.elastic.totals
        for name in ELASTIC:
            self._counts[name] += getattr(totals, name)
        iteration = self._plane.context.iteration
        assert iteration is not None
        failures = iteration.controller.guard.failures
        self._counts["policy failures"] += sum(failures.values())
        self._counts["turns"] += self._scheduler.forward_ct
