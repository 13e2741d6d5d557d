"""eLLM's mode: the server's own loop, elastic memory and page table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ellm_sgl.client.traces import IntArray
from ellm_sgl.engine import Arrival, Controller, Iteration
from ellm_sgl.eval.simulator.load import Load, Progress, VirtualClock
from ellm_sgl.eval.simulator.modes import Chunk, Mode, Moves, Span
from ellm_sgl.memory import (
    NOTHING_UNDER_WAY,
    AdmissionRoom,
    ElasticMemory,
    PageTable,
    PromptRoom,
    UnderWay,
)
from ellm_sgl.memory.shape import IntArray as Ids
from ellm_sgl.policies.pausing.limits import LINK_SHARE


class Elastic(Mode):
    """Part of each request cached: the phases of `Iteration`, as SGLang's scheduler calls them.

    Args:
        controller: asks the policy.
        max_restored_tokens: most tokens that a step can recompute.
    """

    def __init__(
        self,
        table: PageTable,
        load: Load,
        progress: Progress,
        controller: Controller,
        max_restored_tokens: int,
        clock: VirtualClock,
    ) -> None:
        super().__init__(table, load, progress)
        # Copying to the host tier takes no time here; the page table keeps the books.
        save = (lambda device, host: None) if table.host.num_units else None
        self.elastic = ElasticMemory(table, max_restored_tokens, lambda tokens: 0, save)
        self._unit_tokens = table.shape.block_tokens / table.shape.num_groups
        unit_bytes = controller.limits.model.kv_bytes_per_token * self._unit_tokens
        self.iteration = Iteration(controller, self.elastic, unit_bytes, clock)
        self._anybody_decodes = False
        self._new: list[Ids] = []
        """Blocks of the prompts of the step being prepared."""

    def arrived(self, request: int) -> None:
        load, iteration = self.load, self.iteration
        self.progress.entry[request] = iteration.requests.add(
            Arrival(
                tokens=int(load.prompt_tokens[request]),
                prompt_tokens=int(load.prompt_tokens[request]),
                max_new_tokens=int(load.max_new_tokens[request]),
                arrival_s=float(load.at_s[request]),
                priority=int(load.priority[request]),
                tpot_slo_s=float(load.tpot_slo_s[request]),
                ttft_slo_s=float(load.ttft_slo_s[request]),
            ),
            iteration.clock(),
        )

    def idle(self) -> None:
        self.iteration.idle()

    def decide(self, running: Sequence[int], waiting: IntArray) -> Moves:
        iteration, entry = self.iteration, self.progress.entry
        self.elastic.under_way = self._under_way()
        prefilling = [] if self.under_way is None else [self.under_way[0]]
        decoding, coming = (entry[np.array(who, np.int64)] for who in (running, prefilling))
        state = iteration.observe(decoding, running, entry[waiting], coming)
        decision = iteration.decide(state)
        # Named by their numbers in the load, as the simulator does.
        iteration.put_in_force(decision, running, running, waiting.tolist())
        return Moves(list(iteration.in_force.admit), iteration.in_force.pause)

    def closed(self, closed: bool, anybody_waits: bool) -> bool:
        return self.iteration.queue_closed(closed, anybody_waits)

    def admission_room(self) -> AdmissionRoom:
        return self.elastic.admission_room(reclaimable=0)

    def prompt_room(self, decoding: int) -> PromptRoom:
        self._anybody_decodes = decoding > 0
        return PromptRoom.of(self.table, decoding, reclaimable=0)

    def own_blocks(self) -> int:
        return self._under_way().own

    def _under_way(self) -> UnderWay:
        if self.under_way is None:
            return NOTHING_UNDER_WAY
        request, ratio = self.under_way
        return UnderWay.of(self.table, request, self.prefill_tokens(request), ratio)

    def admitted_ratio(self, request: int) -> float:
        in_force = self.iteration.in_force
        return in_force.admitted_ratios[in_force.admit[request]]

    def refused(self, eventually: int, request: int | None) -> None:
        self.iteration.refused(eventually, request)

    def enter(self, chunk: Chunk) -> Span:
        super().enter(chunk)
        before = self.table.blocks_of(chunk.request)[: self.table.shape.blocks_for(chunk.begin)]
        missing = before[self.table.misses_units(before)]
        each = self.table.shape.block_tokens
        return Span.of(np.array([len(missing) * each]), self._lost(missing))

    def prefills(self, chunks: Sequence[Chunk]) -> None:
        self.elastic.place_new(np.concatenate(self._new), evict=not self._anybody_decodes)
        self._new.clear()
        counts = [chunk.end - chunk.begin for chunk in chunks]
        self.table.note_computed([chunk.request for chunk in chunks], counts)

    def pause(self, requests: Sequence[int]) -> None:
        self.iteration.bring_to_ratios(requests, paused=True)

    def steps_that_fit(self, ids: IntArray, most: int) -> int:
        needed = int(self.new_blocks(ids, 1).sum())
        requests = ids.tolist()
        if needed > self.table.free_blocks or not self.iteration.make_room(needed, requests):
            return 0
        # What comes back does so in the first step; the others do not restore it.
        once = self.elastic.comes_back(requests)
        return 1 if once or self.new_blocks(ids, most).sum() > self.table.free_blocks else most

    def grow(self, ids: IntArray, steps: int) -> tuple[Span, Span]:
        requests = ids.tolist()
        self.iteration.bring_to_ratios(requests)
        begun = self._missing(requests)
        self.iteration.make_room(int(self.new_blocks(ids, steps).sum()), requests)
        super().grow(ids, steps)
        self.table.note_computed(requests, [steps] * len(requests))
        before = self._missing(requests)
        self.elastic.totals.recomputed_tokens += int(before.rows) * steps
        if not self.elastic.restore(requests, self.table.missing_blocks(requests)):
            # Steps at once take their room at once; they would have taken it one by one.
            return begun if steps > 1 else before, before
        return before, self._missing(requests)

    def fetch_ahead(self, paused: Sequence[int], decoding: int, step_s: float) -> float:
        if not paused:
            return 0.0
        units, _ = self.iteration.fetch_ahead(paused, decoding, LINK_SHARE * step_s)
        return len(units) * self._unit_tokens

    def decoded(self, ids: IntArray, steps: int) -> None:
        self.iteration.in_step(self.progress.entry[ids], self.progress.kv_tokens[ids])
        self.iteration.report()

    def leave(self, request: int, retracted: bool) -> None:
        super().leave(request, retracted)
        entry = int(self.progress.entry[request])
        if retracted:
            self.elastic.totals.retractions += 1
            self.iteration.retracted(entry, self.prefill_tokens(request))
        else:
            self.iteration.ended(entry, int(self.progress.generated[request]), aborted=False)
            self.iteration.left(entry)

    def close(self) -> None:
        self.iteration.controller.guard.close()

    def forget(self, request: int) -> None:
        self.elastic.forget(request)

    def allocate(self, count: int) -> Ids:
        return self.elastic.allocate(count)

    def allocate_prompt(self, count: int) -> Ids:
        """As SGLang: those of all prompts of a step find room together."""
        self._new.append(self.table.allocate(count))
        return self._new[-1]

    def _missing(self, requests: Sequence[int]) -> Span:
        """What a step with these requests restores: their blocks that lack a unit. As
        `PageTable.uncached_tokens`, but for a tail block, which counts as full."""
        tokens = self.table.lacking_blocks(requests) * self.table.shape.block_tokens
        return Span.of(tokens, self._lost(self.table.missing_of_each(requests)))

    def _lost(self, missing: Ids) -> float:
        """Tokens of those of these blocks that host memory has not, either."""
        return float(np.count_nonzero(self.table.lost(missing)) * self.table.shape.block_tokens)
