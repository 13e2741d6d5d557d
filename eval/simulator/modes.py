"""What a server does about memory: what all modes share, and the baselines, where all of a
request's KV is on the device, or none of it is.

When a decode step finds no room, whole requests lose their place. Who is admitted, who goes in mode
`recompute`, and where it waits, is SGLang's or vLLM's way (`admission`):

- `recompute`: the KV is discarded, and prompt and output so far are prefilled again. Kept of
  SGLang's retraction: who goes, that it waits at the end of the queue, SGLang's defaults; of vLLM's
  preemption: that the last goes, and waits at the front. Not modelled: the prefix cache, which
  keeps what it has room for.
- `swap`: as vLLM's swapping, and the server's mode `swap` (`policies.baselines.whole_requests`).
  The request that came last goes to host memory; when all of its KV fits beside a further block of
  everybody's it is fetched, before anybody new is admitted; decoding waits for the fetch. What host
  memory has no room for is discarded as in mode `recompute`. Kept: who goes, who comes back first
  and when, that a transfer blocks. Left out: copying out (taken to be hidden), and the block being
  filled, which the server's keeps.
- `hcache`: as `swap`, but restored as HCache (EuroSys'25) does, partly from hidden states, which
  also take less of host memory. Kept: the split of layers that balances link and projection. Left
  out: HCache's chunk storage, and the saving of hidden states while decoding (taken to be hidden,
  and to take its room when a request goes).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ellm_sgl.client.traces import IntArray
from ellm_sgl.eval.simulator.load import Load, Progress
from ellm_sgl.memory import AdmissionRoom, PageTable, PromptRoom
from ellm_sgl.memory.shape import IntArray as Ids


@dataclass(frozen=True)
class Moves:
    """What one iteration may do. Requests are named by their number in the load."""

    admit: Sequence[int]
    """Waiting requests that may be admitted, in this order."""
    pause: frozenset[int] = frozenset()
    """Running requests that pause for this step."""
    back: Sequence[int] = ()
    """Waiting requests whose whole KV comes back from host memory first."""


@dataclass(frozen=True)
class Chunk:
    """Part of a request that one prefill step computes, or a fetch brings back."""

    request: int
    begin: int
    end: int
    last: bool


@dataclass(frozen=True)
class HostStore:
    """Host memory for the KV of whole requests that have lost their place."""

    seconds: Callable[[int], float]
    """Time to restore a request of so many tokens."""
    tokens: float
    """That there is room for, in whole blocks; inf: any number."""


@dataclass(frozen=True)
class Span:
    """What a step restores, as `StepWork` counts it."""

    rows: float = 0.0
    squares: float = 0.0
    lost: float = 0.0
    """Of the rows, those that host memory does not have: they can only be computed again."""

    @staticmethod
    def of(tokens: IntArray, lost: float = 0.0) -> Span:
        n = tokens.astype(np.float64)
        return Span(float(n.sum()), float(n @ n), lost)


class Mode:
    """Memory of one simulated server: a baseline's; `Elastic` is eLLM's. Sequence numbers of the
    page table are request numbers.

    Args:
        host: keeps the KV of requests that lose their place, while it has room. None: their KV is
            discarded.
    """

    def __init__(
        self,
        table: PageTable,
        load: Load,
        progress: Progress,
        host: HostStore | None = None,
    ) -> None:
        self.table = table
        self.load = load
        self.progress = progress
        self.host = host
        self.under_way: tuple[int, float] | None = None
        """The prompt that is not prefilled to its end, and the ratio that it was admitted at."""
        self._refused_at = 0

    def arrived(self, request: int) -> None:
        """A request has come."""

    def idle(self) -> None:
        """Nothing is done until the next request arrives."""

    def decide(self, running: Sequence[int], waiting: IntArray) -> Moves:
        """Asked once per iteration."""
        swapped = self.progress.on_host[waiting]
        out = waiting[swapped].tolist()
        back = self._coming_back(len(running), out)
        admit = waiting[~swapped].tolist() if len(back) == len(out) else ()
        if len(admit) == 0:
            self._refused_at = -1
        return Moves(admit=admit, back=back)

    def _coming_back(self, running: int, out: Sequence[int]) -> Sequence[int]:
        """The first of those in host memory, while they fit beside a block more of everybody's."""
        free = self.spare_blocks
        for count, request in enumerate(out):
            free -= self.table.shape.blocks_for(self.prefill_tokens(request))
            together = running + count
            if together and free < together + 1:
                return out[:count]
        return out

    # -- admission --------------------------------------------------------------------------

    def closed(self, closed: bool, anybody_waits: bool) -> bool:
        """Whether SGLang looks at nobody who waits, as `closed` says it has until now. A server
        that swaps asks a policy, and looks again once there is more room: `Iteration`'s way."""
        return closed and not (
            self.host is not None and self.admission_room().tokens(0.0)[1] > self._refused_at
        )

    def admission_room(self) -> AdmissionRoom:
        """Room for those who wait."""
        return AdmissionRoom(self.free_blocks * self.table.shape.block_tokens)

    def prompt_room(self, decoding: int) -> PromptRoom:
        """Room for the prompts of a step, while so many requests decode."""
        return PromptRoom(math.inf, 0, self.table.shape.block_tokens)

    def own_blocks(self) -> int:
        """Blocks of the prompt under way that may be without units."""
        return 0

    def admitted_ratio(self, request: int) -> float:
        """The uncached ratio that a waiting request will come to."""
        return 0.0

    def refused(self, eventually: int, request: int | None) -> None:
        """Memory (of so many tokens of `admission_room`) or places ran out before the queue did.

        Args:
            request: considered last; None: nobody was.
        """
        self._refused_at = eventually

    def prefill_tokens(self, request: int) -> int:
        """What has to be computed, or fetched, before a waiting request can decode."""
        # Of what was swapped out, the KV of the latest token is computed by the next decode step.
        tokens = self.load.prompt_tokens[request] + self.progress.generated[request]
        return int(tokens - self.progress.on_host[request])

    def enter(self, chunk: Chunk) -> Span:
        """Memory for a chunk of a prompt. Returns what its step restores."""
        blocks_for = self.table.shape.blocks_for
        blocks = self.allocate_prompt(blocks_for(chunk.end) - blocks_for(chunk.begin))
        if chunk.begin == 0:
            self.table.map(chunk.request, blocks, chunk.end)
        else:
            self.table.extend(chunk.request, chunk.end, blocks)
        return Span()

    def prefills(self, chunks: Sequence[Chunk]) -> None:
        """A step computes these chunks, which all have their memory."""

    def computed_into_host(self, request: int) -> bool:
        """Whether the KV of a prompt, now computed to its end, went to host memory."""
        return False

    # -- decoding ---------------------------------------------------------------------------

    def pause(self, requests: Sequence[int]) -> None:
        """These running requests take no part in the coming step."""

    def steps_that_fit(self, ids: IntArray, most: int) -> int:
        """Decode steps, at most so many, whose new tokens find room; 0: somebody has to go."""
        free = self.spare_blocks
        while most > 0 and int(self.new_blocks(ids, most).sum()) > free:
            most -= 1
        return most

    def grow(self, ids: IntArray, steps: int) -> tuple[Span, Span]:
        """Memory for the next tokens of each of these requests. Returns what the first of the
        steps restores, and the last; between them it grows or falls evenly."""
        counts = self.new_blocks(ids, steps)
        blocks, end = self.allocate(int(counts.sum())), 0
        lengths = (self.progress.kv_tokens[ids] + steps).tolist()
        for request, length, count in zip(ids.tolist(), lengths, counts.tolist(), strict=True):
            self.table.extend(request, length, blocks[end : end + count])
            end += count
        return Span(), Span()

    def fetch_ahead(self, paused: Sequence[int], decoding: int, step_s: float) -> float:
        """Bring back KV of those who are paused for the step, beside it. `grow` comes before.

        Args:
            decoding: requests that take part.
            step_s: about how long the step takes.

        Returns:
            Tokens of KV fetched.
        """
        return 0.0

    def decoded(self, ids: IntArray, steps: int) -> None:
        """These requests have just got so many tokens each, one in each step."""

    def leave(self, request: int, retracted: bool) -> None:
        """A request has ended, or waits again: its memory is free."""
        blocks = self.table.blocks_of(request).copy()
        self.forget(request)
        self.table.release(blocks)
        self.progress.on_host[request] = retracted and self._host_takes(len(blocks))

    def _host_takes(self, blocks: int) -> bool:
        """Whether there is room for so many more in host memory."""
        if self.host is None:
            return False
        held = self._on_host_blocks()
        return (held + blocks) * self.table.shape.block_tokens <= self.host.tokens

    def _on_host_blocks(self) -> int:
        there = map(self.prefill_tokens, np.flatnonzero(self.progress.on_host).tolist())
        return sum(map(self.table.shape.blocks_for, there))

    def close(self) -> None:
        """All requests have ended."""

    # -- blocks -----------------------------------------------------------------------------

    def forget(self, request: int) -> None:
        self.table.unmap(request)

    def allocate(self, count: int) -> Ids:
        """Blocks that are in device memory."""
        blocks = self.table.allocate(count)
        self.table.place(blocks)
        return blocks

    def allocate_prompt(self, count: int) -> Ids:
        """Likewise, for a prompt whose chunk `prefills` is called with next."""
        return self.allocate(count)

    def new_blocks(self, ids: IntArray, steps: int) -> IntArray:
        """Blocks that each of these requests begins within so many steps."""
        block = self.table.shape.block_tokens
        tokens = self.progress.kv_tokens[ids]
        return -(-(tokens + steps) // block) + -tokens // block

    @property
    def free_blocks(self) -> int:
        return self.table.free_units // self.table.shape.num_groups

    @property
    def spare_blocks(self) -> int:
        """Free blocks that requests which decode, or come back to, may have."""
        return self.free_blocks
