"""What every way to admit has in common, and how a prompt is cut into chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ellm_sgl.client.traces import IntArray
from ellm_sgl.eval.simulator.modes import Chunk, Mode


class Admission(ABC):
    """Asked by the engine in every iteration, and told what has become of the batch.

    Args:
        mode: of the server; knows its memory and its requests.
        chunk_tokens: that one step may prefill.
        max_running: requests that may run at once.
    """

    def __init__(self, mode: Mode, chunk_tokens: int, max_running: int) -> None:
        self.mode = mode
        self.chunk_tokens = chunk_tokens
        self.max_running = max_running
        self.under_way: Chunk | None = None
        """The latest chunk of a prompt that is not prefilled to its end."""
        self.lingering: Sequence[int] = ()
        """Requests that have ended and still count as running."""

    def admit(
        self, running: Sequence[int], wanted: Sequence[int], anybody_waits: bool
    ) -> tuple[Chunk, ...]:
        """The prefill batch of one iteration; empty: none.

        Args:
            wanted: those that the mode lets join, in the order of their turn.
            anybody_waits: whether there is a queue, which may be longer than `wanted`.
        """
        chunks = self._admit(running, wanted, anybody_waits)
        if chunks:
            self.under_way = None if chunks[-1].last else chunks[-1]
        return chunks

    @abstractmethod
    def _admit(
        self, running: Sequence[int], wanted: Sequence[int], anybody_waits: bool
    ) -> tuple[Chunk, ...]:
        """As `admit`. A prompt that is under way goes first; while it finds no room, nobody."""

    @abstractmethod
    def victim(self, running: Sequence[int]) -> int:
        """Which of them loses its place, since a decode step finds no room."""

    @abstractmethod
    def queue_again(self, request: int, waiting: IntArray, running: Sequence[int]) -> IntArray:
        """The queue with a request that has lost its place; `running` are those that remain."""

    @abstractmethod
    def rested(self) -> None:
        """There was nothing to do."""

    @abstractmethod
    def decode_begins(self) -> None:
        """A decode step is about to be prepared, or would be if anybody ran."""

    @abstractmethod
    def stepped(self, decode_steps: int, ended: Sequence[int]) -> None:
        """So many decode steps were run (0: a prefill step), and these requests ended with it."""


def first_chunk(request: int, tokens: int, left: int, block_tokens: int) -> Chunk | None:
    """As many of a request's tokens, in whole blocks, as `left` has room for; None: not a block."""
    end = (
        tokens
        if whole_blocks(tokens, block_tokens) <= left
        else left // block_tokens * block_tokens
    )
    return Chunk(request, 0, end, end == tokens) if end > 0 else None


def next_chunk(request: int, begin: int, tokens: int, left: int) -> Chunk:
    """What follows on the first `begin` of a request's tokens."""
    end = min(tokens, begin + left)
    return Chunk(request, begin, end, end == tokens)


def whole_blocks(tokens: int, block_tokens: int) -> int:
    """Tokens, rounded up to blocks."""
    return -(-tokens // block_tokens) * block_tokens
