"""The baselines: all of a request's KV is on the device, or none of it is.

Admission is SGLang's. When a decode step finds no room, whole requests lose their place:

- `recompute`: SGLang's retraction. The KV is discarded, the request goes to the end of the queue,
  and prompt and output so far are prefilled again. Kept of the original: all of the above, with
  SGLang's defaults. Not modelled: the prefix cache, which keeps what it has room for.
- `swap`: as vLLM's swapping, and the server's mode `swap` (`policies.baselines.whole_requests`).
  The request that came last goes to host memory; when all of its KV fits beside a further block of
  everybody's it is fetched, before anybody new is admitted; decoding waits for the fetch. Kept: who
  goes, who comes back first and when, that a transfer blocks. Left out: copying out (taken to be
  hidden), vLLM's own admission, and that the server's admits in the very step that brings requests
  back, when it does not count their KV yet.
- `hcache`: as `swap`, but restored as HCache (EuroSys'25) does, partly from hidden states. Kept:
  the split of layers that balances link and projection. Left out: HCache's chunk storage, and the
  saving of hidden states while decoding (taken to be hidden).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ellm_sgl.client.traces import IntArray
from ellm_sgl.eval.simulator.admission import Budget, Chunk
from ellm_sgl.eval.simulator.load import Load, Progress
from ellm_sgl.eval.simulator.modes import Grown, Mode, Moves, Span
from ellm_sgl.memory import PageTable


class WholeRequestMode(Mode):
    """Recomputation of whole requests, or fetching them.

    Args:
        fetch: seconds to restore a request of so many tokens from host memory; None: its KV is
            discarded and computed again.
    """

    def __init__(
        self,
        table: PageTable,
        load: Load,
        progress: Progress,
        fetch: Callable[[int], float] | None,
    ) -> None:
        super().__init__(table, load, progress)
        self._fetch = fetch
        self.swaps = fetch is not None

    def decide(self, running: Sequence[int], waiting: IntArray) -> Moves:
        out = int(self.progress.on_host[waiting].sum())
        back = self._coming_back(len(running), waiting[:out].tolist())
        admit = waiting[out:].tolist() if len(back) == out else ()
        return Moves(admit=admit, back=back)

    def _coming_back(self, running: int, out: Sequence[int]) -> Sequence[int]:
        """The first of those in host memory, while they fit beside a block more of everybody's."""
        free = self._free_blocks()
        for count, request in enumerate(out):
            free -= self.table.shape.blocks_for(self.prefill_tokens(request))
            together = running + count
            if together and free < together + 1:
                return out[:count]
        return out

    def budget(self) -> Budget:
        free = self._free_blocks() * self.table.shape.block_tokens
        return Budget(free, free)

    def steps_that_fit(self, ids: IntArray, most: int) -> int:
        free = self._free_blocks()
        while most > 0 and int(self.new_blocks(ids, most).sum()) > free:
            most -= 1
        return most

    def enter(self, chunk: Chunk) -> Span:
        blocks_for = self.table.shape.blocks_for
        blocks = self.table.allocate(blocks_for(chunk.end) - blocks_for(chunk.begin))
        self.table.place(blocks)
        if chunk.begin == 0:
            self.table.map(chunk.request, blocks, chunk.end)
        else:
            self.table.extend(chunk.request, chunk.end, blocks)
        return Span()

    def grow(self, ids: IntArray, steps: int) -> Grown:
        counts = self.new_blocks(ids, steps)
        blocks = self.table.allocate(int(counts.sum()))
        self.table.place(blocks)
        self.extend(ids, steps, blocks, counts)
        return Grown(Span(), Span())

    def victim(self, running: Sequence[int]) -> int:
        return max(running) if self.swaps else super().victim(running)

    def leave(self, request: int) -> None:
        self.progress.on_host[request] = self.swaps
        super().leave(request)

    def prefill_tokens(self, request: int) -> int:
        # The KV of the latest token is computed by the next decode step.
        return super().prefill_tokens(request) - int(self.progress.on_host[request])

    def fetch_seconds(self, tokens: int) -> float:
        return self._fetch(tokens) if self._fetch is not None else super().fetch_seconds(tokens)

    def _free_blocks(self) -> int:
        return self.table.free_units // self.table.shape.num_groups
