"""eLLM's mode: the server's own control loop, elastic memory and page table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ellm_sgl.client.traces import IntArray
from ellm_sgl.engine import Arrival, ControlLoop, RequestBook
from ellm_sgl.eval.simulator.admission import Budget, Chunk
from ellm_sgl.eval.simulator.load import Load, Progress
from ellm_sgl.eval.simulator.modes import Grown, Mode, Span, Turn, missing_tokens
from ellm_sgl.memory import ElasticMemory, PageTable
from ellm_sgl.memory.shape import IntArray as Units
from ellm_sgl.policies.pausing.limits import LINK_SHARE


class Elastic(Mode):
    """Part of each request cached, as `ellm_sgl.sglang.deciding` and `.scheduling` have it.

    Args:
        loop: asks the policy.
        transient_tokens: rows that a step may recompute.
    """

    def __init__(
        self,
        table: PageTable,
        load: Load,
        progress: Progress,
        loop: ControlLoop,
        transient_tokens: int,
    ) -> None:
        super().__init__(table, load, progress)
        self.loop = loop
        save = _save if table.host.num_units else None
        self.elastic = ElasticMemory(table, transient_tokens, lambda tokens: 0, save)
        self.book = RequestBook()
        self._ratios: dict[int, float] = {}
        self._joining_ratio = 0.0
        self._resting: Sequence[int] = ()
        """Who sits out the coming step."""

    def arrived(self, request: int, now_s: float) -> None:
        load = self.load
        self.progress.slot[request] = self.book.add(
            Arrival(
                tokens=int(load.prompt_tokens[request]),
                prompt_tokens=int(load.prompt_tokens[request]),
                max_new_tokens=int(load.max_new_tokens[request]),
                arrival_s=float(load.at_s[request]),
                priority=int(load.priority[request]),
                tpot_slo_s=float(load.tpot_slo_s[request]),
                ttft_slo_s=float(load.ttft_slo_s[request]),
            ),
            now_s,
        )

    def decoded(self, ids: IntArray, now_s: float) -> None:
        self.book.decoded(self.progress.slot[ids], self.progress.kv_tokens[ids], now_s)

    def retracted(self, request: int, now_s: float) -> None:
        self.elastic.totals.retractions += 1
        tokens = int(self.load.prompt_tokens[request] + self.progress.generated[request])
        self.book.wait_again(int(self.progress.slot[request]), tokens, now_s)

    def ended(self, request: int) -> None:
        self.book.remove(int(self.progress.slot[request]))

    def turn(self, now_s: float, running: Sequence[int], waiting: IntArray) -> Turn:
        slot, ids = self.progress.slot, np.array(running, np.int64)
        state = self.loop.state(
            now_s,
            self.book.running(
                slot[ids],
                self.progress.kv_tokens[ids],
                np.zeros(len(ids), np.int64),
                missing_tokens(self.table, ids),
                now_s,
            ),
            self.book.waiting(slot[waiting], now_s),
            self.elastic.memory_state(running),
        )
        decision = self.loop.decide(state)
        self._ratios = dict(zip(running, decision.ratios, strict=True))
        self._joining_ratio = decision.joining_ratio
        return Turn(
            waiting[list(decision.join)].tolist(), frozenset(running[p] for p in decision.pause)
        )

    def budget(self) -> Budget:
        return Budget(*self.elastic.admission_tokens(0, self._joining_ratio))

    def steps_that_fit(self, ids: IntArray, most: int) -> int:
        needed = int(self.new_blocks(ids, 1).sum()) * self.table.shape.num_groups
        requests = ids.tolist()
        fits = self.elastic.make_room_for_step(needed, requests)
        return most if fits and self.elastic.fits_transient(requests) else 0

    def enter(self, chunk: Chunk) -> Span:
        table, blocks_for = self.table, self.table.shape.blocks_for
        blocks = table.allocate(blocks_for(chunk.end) - blocks_for(chunk.begin))
        if chunk.begin == 0:
            self.elastic.place(blocks)
            table.map(chunk.request, blocks, chunk.end)
            table.note_computed([chunk.request], [chunk.end])
            return Span()
        self.elastic.place(blocks)
        before = table.blocks_of(chunk.request)
        missing = np.count_nonzero(table.lacks_units(before))
        table.extend(chunk.request, chunk.end, blocks)
        table.note_computed([chunk.request], [chunk.end - chunk.begin])
        return Span.of(np.array([missing * table.shape.block_tokens]))

    def grow(self, ids: IntArray, steps: int) -> Grown:
        requests = ids.tolist()
        self.elastic.apply_targets(requests, [self._ratios.get(i, 0.0) for i in requests])
        begun = missing_tokens(self.table, ids)
        counts = self.new_blocks(ids, steps)
        blocks = self.table.allocate(int(counts.sum()))
        self.elastic.make_room_for_step(len(blocks) * self.table.shape.num_groups, requests)
        self.elastic.place(blocks)
        self.extend(ids, steps, blocks, counts)
        self.table.note_computed(requests, [steps] * len(requests))
        before = missing_tokens(self.table, ids)
        self.elastic.totals.recomputed_tokens += int(before.sum()) * steps
        if not self.elastic.restore(requests, self.table.missing_blocks(requests)):
            # Steps at once take their room at once; they would have taken it one by one.
            return Grown(Span.of(begun if steps > 1 else before), Span.of(before))
        return Grown(Span.of(before), Span.of(missing_tokens(self.table, ids)))

    def sit_out(self, requests: Sequence[int]) -> None:
        self._resting = requests
        ratios = [self._ratios.get(i, 0.0) for i in requests]
        self.elastic.apply_targets(requests, ratios, sitting_out=True)

    def fetch_ahead(self, decoding: int, step_s: float) -> float:
        if not self._resting:
            return 0.0
        shape, limits = self.table.shape, self.loop.limits
        unit_tokens = shape.block_tokens / shape.num_groups
        token_s = limits.model.kv_bytes_per_token / limits.hardware.link_bytes_per_s
        most = int(LINK_SHARE * step_s / (token_s * unit_tokens))
        units, _ = self.elastic.fetch_ahead(self._resting, decoding, most)
        return len(units) * unit_tokens

    def forget(self, request: int) -> None:
        self.elastic.forget(request)
        self._ratios.pop(request, None)


def _save(device: Units, host: Units) -> None:
    """Copying to the host tier takes no time here; the page table keeps the books."""
