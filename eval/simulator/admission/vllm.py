"""vLLM's admission, and vLLM's with the cap that the eLLM paper gives its baselines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ellm_sgl.client.traces import IntArray
from ellm_sgl.eval.simulator.admission.base import (
    Admission,
    first_chunk,
    next_chunk,
    whole_blocks,
)
from ellm_sgl.eval.simulator.load import VirtualClock
from ellm_sgl.eval.simulator.modes import Chunk, Mode
from ellm_sgl.latency import LatencyModel, StepWork

WATERMARK = 0.01
"""Share of all blocks that admission leaves free: vLLM's default."""


class VllmAdmission(Admission):
    """As vLLM's scheduler and block manager: first come, first served, while the blocks of what has
    to be prefilled are free beside the watermark. Nothing is set aside for outputs, and the queue
    is looked at in every iteration. When a decode step finds no room, the request that arrived
    last goes back to the front of the queue.

    Not kept: vLLM never admits a prompt that does not fit beside the watermark; here it may have
    all blocks while nobody else runs.
    """

    def _admit(
        self, running: Sequence[int], wanted: Sequence[int], anybody_waits: bool
    ) -> tuple[Chunk, ...]:
        shape = self.mode.table.shape
        free, left = self.mode.free_blocks, self._rows(running)
        chunks: list[Chunk] = []
        if (begun := self.under_way) is not None:
            tokens = self.mode.prefill_tokens(begun.request)
            chunk = next_chunk(begun.request, begun.end, tokens, left)
            chunks.append(chunk)
            if not chunk.last:
                return tuple(chunks)
            free -= shape.blocks_for(tokens) - shape.blocks_for(begun.end)
            left -= chunk.end - chunk.begin
        for request in wanted:
            tokens = self.mode.prefill_tokens(request)
            free -= shape.blocks_for(tokens)
            first = first_chunk(request, tokens, left, shape.block_tokens)
            if first is None or len(running) + len(chunks) >= self.max_running:
                break
            joining = [*(chunk.request for chunk in chunks), request]
            alone = not running and not chunks
            if not alone and not (free >= self._watermark and self._in_time(running, joining)):
                break
            chunks.append(first)
            left -= whole_blocks(first.end, shape.block_tokens)
            if not first.last:
                break
        return tuple(chunks)

    def _rows(self, running: Sequence[int]) -> int:
        """That prompts may have in this step."""
        return self.chunk_tokens

    @property
    def _watermark(self) -> int:
        return int(WATERMARK * self.mode.table.num_blocks)

    def _in_time(self, running: Sequence[int], joining: Sequence[int]) -> bool:
        """Whether a step of those that run and those that join is short enough."""
        return True

    def victim(self, running: Sequence[int]) -> int:
        return max(running)

    def queue_again(self, request: int, waiting: IntArray, running: Sequence[int]) -> IntArray:
        return np.insert(waiting, 0, request)

    def rested(self) -> None:
        """Nothing that it remembers changes."""

    def decode_begins(self) -> None:
        """Nothing: who has ended is gone."""

    def stepped(self, decode_steps: int, ended: Sequence[int]) -> None:
        """Nothing: the next iteration looks at memory alone."""


class MixedAdmission(VllmAdmission):
    """vLLM's with chunked prefill: those that decode share the step, and count among its rows."""

    def _rows(self, running: Sequence[int]) -> int:
        return self.chunk_tokens - len(running)


class PaperAdmission(VllmAdmission):
    """vLLM's, capped as the eLLM paper caps its baselines (§6.1, Metrics): "we integrated Eq. (5)
    (r = 0) into" them, "allowing them to update the estimated batch size for maximum requests while
    maintaining SLO requirements for TPOT".

    How that is read: the "maximum requests" are the largest b that meets the constraints of Eq. (1)
    at r = 0, nothing restored. So a request joins while T(b, 0) + WT_max <= SLO for all that run
    and all that join. T is a decode step's, by the policy's latency model at the present lengths;
    WT_max the longest time since a running request's last token, as the built-in policies read it;
    the SLO the least of the server's and the requests' own. Memory is vLLM's own rule. The cap
    bounds who joins, as vLLM's max_num_seqs does: it takes nobody's place as requests grow, who was
    swapped out comes back whatever it says, and a request that would be alone always joins.

    Args:
        latency: the policy's model; it learns nothing here.
        tpot_slo_s: the server's, in seconds.
    """

    def __init__(
        self,
        mode: Mode,
        chunk_tokens: int,
        max_running: int,
        latency: LatencyModel,
        tpot_slo_s: float,
        clock: VirtualClock,
    ) -> None:
        super().__init__(mode, chunk_tokens, max_running)
        self._latency = latency
        self._tpot_slo_s = tpot_slo_s
        self._clock = clock

    def _in_time(self, running: Sequence[int], joining: Sequence[int]) -> bool:
        load, progress = self.mode.load, self.mode.progress
        batch = np.array([*running, *joining])
        tokens = load.prompt_tokens[batch] + progress.generated[batch]
        step = StepWork(decode_rows=len(batch), decode_tokens=float(tokens.sum()))
        last_s = progress.last_s[list(running)]
        waited_s = float((self._clock.now_s - last_s).max(initial=0.0))
        slo_s = min(self._tpot_slo_s, float(load.tpot_slo_s[batch].min()))
        return float(self._latency.step_seconds(step)) + waited_s <= slo_s
