"""SGLang's admission accounting (`PrefillAdder`, `NewTokenRatioTracker`), on numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ellm_sgl.client.traces import IntArray
from ellm_sgl.memory import AdmissionRoom

CLIP_NEW_TOKENS = 4096
INIT_RATIO, LEAST_RATIO_FACTOR, DECAY_STEPS = 0.7, 0.14, 600
RETRACT_STEPS = 20
"""SGLang's defaults, of the names SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION, _INIT_NEW_TOKEN_RATIO,
_MIN_NEW_TOKEN_RATIO_FACTOR, _NEW_TOKEN_RATIO_DECAY_STEPS, _RETRACT_DECODE_STEPS."""


class NewTokenRatio:
    """Share of its `max_new_tokens` that SGLang expects a running request to still generate.

    Args:
        conservativeness: SGLang's `--schedule-conservativeness`.
    """

    def __init__(self, conservativeness: float) -> None:
        self.current = min(INIT_RATIO * conservativeness, 1.0)
        self._initial = self.current

    def decay(self, steps: int) -> None:
        """So many decode steps went well."""
        least = min(self._initial * LEAST_RATIO_FACTOR, 1.0)
        self.current = max(self.current - steps * (self._initial - least) / DECAY_STEPS, least)

    def retracted(self, generated: int, max_new_tokens: int, requests: int) -> None:
        """Requests were retracted; the sums are of those that remain."""
        self.current = min(1.0, (generated + RETRACT_STEPS * requests) / (max_new_tokens + 1))

    def reserved_tokens(self, remaining: IntArray) -> float:
        """What running requests are expected to need, each of which may generate so much more."""
        return float(np.minimum(remaining, CLIP_NEW_TOKENS).sum() * self.current)


@dataclass(frozen=True)
class Candidate:
    """A waiting request, as admission sees it."""

    request: int
    tokens: int
    """To prefill: prompt, and output so far."""
    max_new_tokens: int
    generated: int
    begin: int = 0
    """Tokens prefilled, of a prompt that is prefilled in chunks and not yet to its end."""
    ratio: float = 0.0
    """The uncached ratio that it will come to."""


@dataclass(frozen=True)
class Chunk:
    """Part of a request that one prefill step computes."""

    request: int
    begin: int
    end: int
    last: bool


@dataclass(frozen=True)
class Admitted:
    """What one iteration admits."""

    chunks: tuple[Chunk, ...]
    full: bool
    """Memory or places ran out before the queue did."""
    ratio: float = 0.0
    """That of the candidate considered last."""


def admit(
    room: AdmissionRoom,
    candidates: Iterable[Candidate],
    under_way: Candidate | None,
    *,
    block_tokens: int,
    chunk_tokens: int,
    reserved: float,
    places: int,
    alone: bool,
) -> Admitted:
    """The prefill batch of one iteration.

    Args:
        room: before anything is admitted.
        candidates: waiting requests in the order of their turn.
        under_way: a prompt that is not finished; it goes first, whatever memory says.
        chunk_tokens: that one step may prefill.
        reserved: tokens that running requests are expected to need.
        places: requests that may be admitted.
        alone: nothing runs; the first request may then be larger than the room.
    """
    block, left = block_tokens, chunk_tokens
    chunks: list[Chunk] = []
    taken, others, ratio = 0, reserved, 0.0
    if under_way is not None:
        end = min(under_way.tokens, under_way.begin + left)
        last = end == under_way.tokens
        chunks.append(Chunk(under_way.request, under_way.begin, end, last))
        if not last:
            return Admitted(tuple(chunks), full=False)
        rows = end - under_way.begin
        left -= rows
        taken += rows + block
        others += rows + min(under_way.max_new_tokens, CLIP_NEW_TOKENS) + block
    for candidate in candidates:
        ratio = candidate.ratio
        if len(chunks) >= places or left <= 0:
            return Admitted(tuple(chunks), len(chunks) >= places, ratio)
        now, eventually = room.offer(ratio, others)
        remaining = max(candidate.max_new_tokens - candidate.generated, 0)
        total = candidate.tokens + min(remaining, CLIP_NEW_TOKENS) + block
        unlimited = alone and not chunks
        if total >= eventually and not unlimited:
            return Admitted(tuple(chunks), True, ratio)
        rows = -(-candidate.tokens // block) * block
        if rows <= left:
            end, charged = candidate.tokens, rows + min(candidate.max_new_tokens, CLIP_NEW_TOKENS)
        else:
            end = left // block * block
            if end == 0:
                break
            rows = charged = end
        last = end == candidate.tokens
        chunks.append(Chunk(candidate.request, 0, end, last))
        left -= rows
        taken += rows + block
        room.take(ratio, charged + block)
        if not last:
            break
        if now <= taken or eventually <= charged + block:
            return Admitted(tuple(chunks), True, ratio)
    return Admitted(tuple(chunks), False, ratio)
