"""What a server does about memory: the interface, and what all modes share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ellm_sgl.client.traces import IntArray
from ellm_sgl.eval.simulator.admission import Budget, Chunk
from ellm_sgl.eval.simulator.load import Load, Progress
from ellm_sgl.memory import PageTable
from ellm_sgl.memory.page_table import Blocks


@dataclass(frozen=True)
class Moves:
    """What one iteration may do. Requests are named by their number in the load."""

    admit: Sequence[int]
    """Waiting requests that may be admitted, in this order."""
    pause: frozenset[int] = frozenset()
    """Running requests that pause for this step."""
    back: Sequence[int] = ()
    """Requests at the front of the queue whose whole KV comes back from host memory first."""


@dataclass(frozen=True)
class Span:
    """What a step restores, as `StepWork` counts it."""

    rows: float = 0.0
    squares: float = 0.0

    @staticmethod
    def of(tokens: IntArray) -> Span:
        n = tokens.astype(np.float64)
        return Span(float(n.sum()), float(n @ n))


@dataclass(frozen=True)
class Grown:
    """What decode steps that run at once restore: the first, and the last; between them it grows
    or falls evenly."""

    first: Span
    last: Span


class Mode(ABC):
    """Memory of one simulated server. Sequence numbers of the page table are request numbers."""

    swaps: bool = False
    """Requests that lose their place keep their KV in host memory, and wait at the front of the
    queue; SGLang's accounting does not hear of it. Else they are retracted as in SGLang."""

    def __init__(self, table: PageTable, load: Load, progress: Progress) -> None:
        self.table = table
        self.load = load
        self.progress = progress

    def arrived(self, request: int) -> None:  # noqa: B027 (optional)
        """A request has come. Not every mode keeps a request table."""

    def decoded(self, ids: IntArray) -> None:  # noqa: B027 (optional)
        """These requests have just got a token each."""

    def retracted(self, request: int) -> None:  # noqa: B027 (optional)
        """A running request waits again; `leave` comes before."""

    def ended(self, request: int) -> None:  # noqa: B027 (optional)
        """A request has all its tokens; `leave` comes before."""

    @abstractmethod
    def decide(self, running: Sequence[int], waiting: IntArray) -> Moves:
        """Asked once per iteration."""

    def closed(self, closed: bool, anybody_waits: bool) -> bool:
        """Whether SGLang looks at nobody who waits, as `closed` says it has until now."""
        return closed

    def refused(self, budget: Budget) -> None:  # noqa: B027 (optional)
        """Memory or places ran out before the queue did."""

    def idle(self) -> None:  # noqa: B027 (optional)
        """Nothing is done until the next request arrives."""

    @abstractmethod
    def budget(self) -> Budget:
        """Room for those admitted."""

    @abstractmethod
    def steps_that_fit(self, ids: IntArray, most: int) -> int:
        """Decode steps, at most so many, whose new tokens find room; 0: somebody has to go."""

    @abstractmethod
    def enter(self, chunk: Chunk) -> Span:
        """Memory for a chunk of a prompt. Returns what its step restores."""

    @abstractmethod
    def grow(self, ids: IntArray, steps: int) -> Grown:
        """Memory for the next tokens of each of these requests."""

    def pause(self, requests: Sequence[int]) -> None:  # noqa: B027 (optional)
        """These running requests take no part in the coming step."""

    def fetch_ahead(self, decoding: int, step_s: float) -> float:
        """Bring back KV of those who sit the step out, beside it. `grow` comes before.

        Args:
            decoding: requests that take part.
            step_s: about how long the step takes.

        Returns:
            Tokens of KV fetched.
        """
        return 0.0

    def victim(self, running: Sequence[int]) -> int:
        """Who goes when memory is short. As SGLang: who has generated least, of these the one
        with the longest prompt, of these the latest."""
        generated, prompt = self.progress.generated, self.load.prompt_tokens
        return min(running, key=lambda i: (generated[i], -prompt[i], -i))

    def leave(self, request: int) -> None:
        """A request has ended, or was retracted: its memory is free again."""
        blocks = self.table.blocks_of(request).copy()
        self.forget(request)
        self.table.release(blocks)

    def forget(self, request: int) -> None:
        self.table.unmap(request)

    def prefill_tokens(self, request: int) -> int:
        """What has to be computed, or fetched, before a waiting request can decode."""
        return int(self.load.prompt_tokens[request] + self.progress.generated[request])

    def fetch_seconds(self, tokens: int) -> float:
        """Time to bring back the whole KV of a request from host memory."""
        raise NotImplementedError(f"{type(self).__name__} keeps no whole requests on the host")

    def new_blocks(self, ids: IntArray, steps: int) -> IntArray:
        """Blocks that each of these requests begins within so many steps."""
        block = self.table.shape.block_tokens
        tokens = self.progress.kv_tokens[ids]
        return -(-(tokens + steps) // block) + -tokens // block

    def extend(self, ids: IntArray, steps: int, blocks: Blocks, counts: IntArray) -> None:
        """Map new blocks, so many for each request."""
        table, end = self.table, 0
        lengths = (self.progress.kv_tokens[ids] + steps).tolist()
        for request, length, count in zip(ids.tolist(), lengths, counts.tolist(), strict=True):
            table.extend(request, length, blocks[end : end + count])
            end += count


def missing_tokens(table: PageTable, ids: IntArray) -> IntArray:
    """Tokens of each request in blocks that lack a unit; as `PageTable.uncached_tokens`, for many
    requests at once (a tail block counts as full)."""
    if table.missing_units == 0 or len(ids) == 0:
        return np.zeros(len(ids), np.int64)
    blocks = [table.blocks_of(i) for i in ids.tolist()]
    lacking = table.misses_units(np.concatenate(blocks))
    starts = np.cumsum([0, *map(len, blocks[:-1])])
    counts = np.add.reduceat(lacking.astype(np.int64), starts)
    return np.asarray(counts * table.shape.block_tokens, np.int64)
