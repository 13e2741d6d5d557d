"""eLLM's mode: the server's own loop, elastic memory and page table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ellm_sgl.client.traces import IntArray
from ellm_sgl.engine import Arrival, Controller, Iteration
from ellm_sgl.eval.simulator.admission import Budget, Chunk
from ellm_sgl.eval.simulator.clock import VirtualClock
from ellm_sgl.eval.simulator.load import Load, Progress
from ellm_sgl.eval.simulator.modes import Grown, Mode, Moves, Span, missing_tokens
from ellm_sgl.memory import ElasticMemory, PageTable
from ellm_sgl.memory.shape import IntArray as Units
from ellm_sgl.policies.pausing.limits import LINK_SHARE


class Elastic(Mode):
    """Part of each request cached: the phases of `Iteration`, as SGLang's scheduler calls them.

    Args:
        controller: asks the policy.
        max_restored_tokens: rows that a step may recompute.
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
        save = _save if table.host.num_units else None
        self.elastic = ElasticMemory(table, max_restored_tokens, lambda tokens: 0, save)
        shape, model = table.shape, controller.limits.model
        self._unit_tokens = shape.block_tokens / shape.num_groups
        unit_bytes = model.kv_bytes_per_token * self._unit_tokens
        self.iteration = Iteration(controller, self.elastic, unit_bytes, clock)
        self._paused: Sequence[int] = ()
        """Who pauses for the coming step."""

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

    def decoded(self, ids: IntArray) -> None:
        self.iteration.in_step(self.progress.entry[ids], self.progress.kv_tokens[ids])
        self.iteration.report()

    def retracted(self, request: int) -> None:
        self.elastic.totals.retractions += 1
        tokens = int(self.load.prompt_tokens[request] + self.progress.generated[request])
        self.iteration.retracted(int(self.progress.entry[request]), tokens)

    def ended(self, request: int) -> None:
        self.iteration.requests.remove(int(self.progress.entry[request]))

    def decide(self, running: Sequence[int], waiting: IntArray) -> Moves:
        iteration, entry = self.iteration, self.progress.entry
        state = iteration.observe(entry[np.array(running, np.int64)], running, entry[waiting])
        decision = iteration.decide(state)
        # Named by their numbers in the load, as the simulator does.
        iteration.put_in_force(decision, running, running, waiting.tolist())
        return Moves(list(iteration.in_force.admit), iteration.in_force.pause)

    def closed(self, closed: bool, anybody_waits: bool) -> bool:
        return self.iteration.queue_closed(closed, anybody_waits)

    def refused(self, budget: Budget) -> None:
        self.iteration.refused(budget.eventually)

    def idle(self) -> None:
        self.iteration.idle()

    def budget(self) -> Budget:
        return Budget(*self.iteration.admission_tokens())

    def steps_that_fit(self, ids: IntArray, most: int) -> int:
        needed = int(self.new_blocks(ids, 1).sum())
        return most if self.iteration.make_room(needed, ids.tolist()) else 0

    def enter(self, chunk: Chunk) -> Span:
        table, blocks_for = self.table, self.table.shape.blocks_for
        blocks = self.elastic.allocate(blocks_for(chunk.end) - blocks_for(chunk.begin))
        if chunk.begin == 0:
            table.map(chunk.request, blocks, chunk.end)
            table.note_computed([chunk.request], [chunk.end])
            return Span()
        before = table.blocks_of(chunk.request)
        missing = np.count_nonzero(table.misses_units(before))
        table.extend(chunk.request, chunk.end, blocks)
        table.note_computed([chunk.request], [chunk.end - chunk.begin])
        return Span.of(np.array([missing * table.shape.block_tokens]))

    def grow(self, ids: IntArray, steps: int) -> Grown:
        requests = ids.tolist()
        self.iteration.bring_to_ratios(requests)
        begun = missing_tokens(self.table, ids)
        counts = self.new_blocks(ids, steps)
        self.iteration.make_room(int(counts.sum()), requests)
        blocks = self.elastic.allocate(int(counts.sum()))
        self.extend(ids, steps, blocks, counts)
        self.table.note_computed(requests, [steps] * len(requests))
        before = missing_tokens(self.table, ids)
        self.elastic.totals.recomputed_tokens += int(before.sum()) * steps
        if not self.elastic.restore(requests, self.table.missing_blocks(requests)):
            # Steps at once take their room at once; they would have taken it one by one.
            return Grown(Span.of(begun if steps > 1 else before), Span.of(before))
        return Grown(Span.of(before), Span.of(missing_tokens(self.table, ids)))

    def pause(self, requests: Sequence[int]) -> None:
        self._paused = requests
        self.iteration.bring_to_ratios(requests, paused=True)

    def fetch_ahead(self, decoding: int, step_s: float) -> float:
        if not self._paused:
            return 0.0
        units, _ = self.iteration.fetch_ahead(self._paused, decoding, LINK_SHARE * step_s)
        return len(units) * self._unit_tokens

    def forget(self, request: int) -> None:
        self.elastic.forget(request)


def _save(device: Units, host: Units) -> None:
    """Copying to the host tier takes no time here; the page table keeps the books."""
