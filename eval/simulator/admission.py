"""SGLang's admission accounting (`PrefillAdder`, `NewTokenRatioTracker`), on numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ellm_sgl.client.traces import IntArray

CLIP_NEW_TOKENS = 4096
INIT_RATIO, LEAST_RATIO_FACTOR, DECAY_STEPS = 0.7, 0.14, 600
RETRACT_STEPS = 20
"""SGLang's defaults, of the names SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION, _INIT_NEW_TOKEN_RATIO,
_MIN_NEW_TOKEN_RATIO_FACTOR, _NEW_TOKEN_RATIO_DECAY_STEPS, _RETRACT_DECODE_STEPS."""


@dataclass
class NewTokenRatio:
    """Share of its `max_new_tokens` that SGLang expects a running request to still generate."""

    initial: float
    current: float

    @classmethod
    def of(cls, conservativeness: float) -> NewTokenRatio:
        """As `--schedule-conservativeness` sets it."""
        ratio = min(INIT_RATIO * conservativeness, 1.0)
        return cls(ratio, ratio)

    def decay(self, steps: int) -> None:
        """So many decode steps went well."""
        least = min(self.initial * LEAST_RATIO_FACTOR, 1.0)
        self.current = max(self.current - steps * (self.initial - least) / DECAY_STEPS, least)

    def retracted(self, generated: int, max_new_tokens: int, requests: int) -> None:
        """Requests were retracted; the sums are of those that remain."""
        self.current = min(1.0, (generated + RETRACT_STEPS * requests) / (max_new_tokens + 1))


@dataclass(frozen=True)
class Candidate:
    """A waiting request, as admission sees it."""

    request: int
    tokens: int
    """To prefill: prompt, and output so far."""
    max_new_tokens: int
    generated: int


@dataclass(frozen=True)
class Chunk:
    """Part of a request that one prefill step computes."""

    request: int
    begin: int
    end: int
    last: bool


@dataclass(frozen=True)
class UnderWay:
    """A request whose prompt is prefilled in chunks, and not yet to its end."""

    request: int
    begin: int
    """Tokens prefilled."""
    tokens: int
    """To prefill in all."""
    max_new_tokens: int


@dataclass(frozen=True)
class Admitted:
    """What one iteration admits."""

    chunks: tuple[Chunk, ...]
    full: bool
    """Memory or places ran out before the queue did."""


@dataclass(frozen=True)
class Budget:
    """Tokens that there is room for."""

    now: int
    eventually: int


@dataclass(frozen=True)
class PrefillLimits:
    """Settings of one server."""

    block_tokens: int
    chunk_tokens: int


def admit(
    budget: Budget,
    limits: PrefillLimits,
    reserved: float,
    places: int,
    alone: bool,
    under_way: UnderWay | None,
    candidates: Iterable[Candidate],
) -> Admitted:
    """The prefill batch of one iteration.

    Args:
        budget: memory before anything is admitted.
        reserved: tokens that running requests are expected to need.
        places: requests that may be admitted.
        alone: nothing runs; the first request may then be larger than the budget.
        under_way: a prompt that is not finished; it goes first, whatever memory says.
        candidates: waiting requests in the order of their turn.
    """
    block = limits.block_tokens
    chunks: list[Chunk] = []
    left = limits.chunk_tokens
    now, eventually = float(budget.now), budget.eventually - reserved
    if under_way is not None:
        end = min(under_way.tokens, under_way.begin + left)
        last = end == under_way.tokens
        chunks.append(Chunk(under_way.request, under_way.begin, end, last))
        if not last:
            return Admitted(tuple(chunks), full=False)
        rows = end - under_way.begin
        left -= rows
        now -= rows + block
        eventually -= rows + min(under_way.max_new_tokens, CLIP_NEW_TOKENS) + block
        alone = False
    for candidate in candidates:
        if len(chunks) >= places or left <= 0:
            return Admitted(tuple(chunks), full=len(chunks) >= places)
        remaining = max(candidate.max_new_tokens - candidate.generated, 0)
        total = candidate.tokens + min(remaining, CLIP_NEW_TOKENS) + block
        unlimited = alone and not chunks
        if total >= eventually and not unlimited:
            return Admitted(tuple(chunks), full=True)
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
        now -= rows + block
        eventually -= charged + block
        if not last:
            break
        if now <= 0 or eventually <= 0:
            return Admitted(tuple(chunks), full=True)
    return Admitted(tuple(chunks), full=False)


def reserved_tokens(remaining: IntArray, ratio: float) -> float:
    """Tokens that running requests are expected to need yet.

    Args:
        remaining: tokens that each may still generate.
        ratio: `NewTokenRatio.current`.
    """
    return float(np.minimum(remaining, CLIP_NEW_TOKENS).sum() * ratio)
