"""SGLang's admission accounting (`PrefillAdder`, `NewTokenRatioTracker`), on numbers; who is
retracted, and where it then waits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ellm_sgl.client.traces import IntArray
from ellm_sgl.eval.simulator.admission.base import (
    Admission,
    first_chunk,
    next_chunk,
    whole_blocks,
)
from ellm_sgl.eval.simulator.modes import Chunk, Mode
from ellm_sgl.memory import AdmissionRoom, PromptRoom

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

    def reset(self) -> None:
        """A server with nothing to do expects what it did at first."""
        self.current = self._initial

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
class Admitted:
    """What one iteration admits."""

    chunks: tuple[Chunk, ...]
    full: bool
    """Memory or places ran out before the queue did."""
    ratio: float = 0.0
    """That of the candidate considered last."""
    considered: int | None = None
    """The last one for which there was room to look at it; None: there was for none."""


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
    slots: float = math.inf,
    prompts: PromptRoom | None = None,
    own: int = 0,
) -> Admitted:
    """The prefill batch of one iteration.

    Args:
        room: before anything is admitted.
        candidates: waiting requests in the order of their turn.
        under_way: a prompt that is not finished; it goes first.
        chunk_tokens: that one step may prefill.
        reserved: tokens that running requests are expected to need.
        places: requests that may be admitted.
        alone: nothing runs; the first request may then be larger than the room.
        slots: tokens that there are addresses for, with memory behind them or without.
        prompts: room for what the step computes of prompts; None: nothing is kept from them.
        own: blocks of `under_way` that may be without units.
    """
    block, left = block_tokens, chunk_tokens
    prompts = prompts or PromptRoom(math.inf, 0, block)
    chunks: list[Chunk] = []
    taken, others, promised, ratio = 0, reserved, 0, 0.0
    considered: int | None = None
    if under_way is not None:
        rest = under_way.tokens - under_way.begin
        if (further := prompts.further(under_way.begin, min(rest, left), own)) == 0:
            return Admitted((), full=False)
        left = left if further == rest else further
        chunk = next_chunk(under_way.request, under_way.begin, under_way.tokens, left)
        chunks.append(chunk)
        if not chunk.last:
            return Admitted(tuple(chunks), full=False)
        rows = chunk.end - chunk.begin
        left -= rows
        taken += rows + block
        others += rows + min(under_way.max_new_tokens, CLIP_NEW_TOKENS) + block
    for candidate in candidates:
        ratio = candidate.ratio
        if len(chunks) >= places or left <= 0:
            return Admitted(tuple(chunks), len(chunks) >= places, ratio, considered)
        needs = min(candidate.tokens, left), ratio
        if not prompts.has(*needs):
            break
        considered = candidate.request
        fits, in_the_long_run = room.offer(ratio, others)
        now, eventually = min(fits, slots), min(in_the_long_run, slots - others - promised)
        remaining = max(candidate.max_new_tokens - candidate.generated, 0)
        total = candidate.tokens + min(remaining, CLIP_NEW_TOKENS) + block
        unlimited = alone and not chunks
        if total >= eventually and not unlimited:
            return Admitted(tuple(chunks), True, ratio, considered)
        first = first_chunk(candidate.request, candidate.tokens, left, block)
        if first is None:
            break
        chunks.append(first)
        prompts.take(*needs)
        if not first.last:
            break
        rows = whole_blocks(first.end, block)
        left -= rows
        taken += rows + block
        charged = rows + min(candidate.max_new_tokens, CLIP_NEW_TOKENS) + block
        room.take(ratio, charged)
        promised += charged
        if now <= taken or eventually <= charged:
            return Admitted(tuple(chunks), True, ratio, considered)
    return Admitted(tuple(chunks), False, ratio)


class SglangAdmission(Admission):
    """As SGLang's scheduler: `admit`, unless its batch is full.

    Args:
        conservativeness: SGLang's `--schedule-conservativeness`.
        pool_tokens: what the pool could hold: SGLang cuts `max_new_tokens` to it. inf in mode ellm.
    """

    def __init__(
        self,
        mode: Mode,
        chunk_tokens: int,
        max_running: int,
        conservativeness: float,
        pool_tokens: float,
    ) -> None:
        super().__init__(mode, chunk_tokens, max_running)
        self._ratio = NewTokenRatio(conservativeness)
        self._pool_tokens = pool_tokens
        self._full = False
        """SGLang's `batch_is_full`: nobody is considered until somebody has left and the next
        decode step has been prepared, or a batch has joined an empty one."""

    def _admit(
        self, running: Sequence[int], wanted: Sequence[int], anybody_waits: bool
    ) -> tuple[Chunk, ...]:
        self._full = self.mode.closed(self._full, anybody_waits)
        if self._full:
            wanted = ()
        begun = self.under_way
        if not wanted and begun is None:
            return ()
        room = self.mode.admission_room()
        batch = np.array([*running, *self.lingering], np.int64)
        remaining = self.mode.load.max_new_tokens[batch] - self.mode.progress.generated[batch]
        alone = not len(batch)
        admitted = admit(
            room,
            (self._candidate(i, ratio=self.mode.admitted_ratio(i)) for i in wanted),
            None if begun is None else self._candidate(begun.request, begun.end),
            block_tokens=self.mode.table.shape.block_tokens,
            chunk_tokens=self.chunk_tokens,
            reserved=self._ratio.reserved_tokens(remaining),
            places=self.max_running - len(batch),
            alone=alone,
            slots=self.mode.table.free_blocks * self.mode.table.shape.block_tokens,
            prompts=self.mode.prompt_room(len(batch)),
            own=self.mode.own_blocks(),
        )
        if admitted.full:
            self._full = True
            self.mode.refused(room.tokens(admitted.ratio)[1], admitted.considered)
        if admitted.chunks and (alone or not admitted.chunks[-1].last):
            self._full = False
        if admitted.chunks:
            last = admitted.chunks[-1]
            if last.last:
                self.mode.under_way = None
            elif last.begin == 0:
                self.mode.under_way = last.request, admitted.ratio
        return admitted.chunks

    def _candidate(self, request: int, begin: int = 0, ratio: float = 0.0) -> Candidate:
        load, progress = self.mode.load, self.mode.progress
        room = self._pool_tokens - int(load.prompt_tokens[request])
        most = max(room - 2 * self.mode.table.shape.block_tokens, 0)
        return Candidate(
            request=request,
            tokens=self.mode.prefill_tokens(request),
            max_new_tokens=int(min(load.max_new_tokens[request], most)),
            generated=int(progress.generated[request]),
            begin=begin,
            ratio=ratio,
        )

    def victim(self, running: Sequence[int]) -> int:
        """Who goes to host memory: the latest. Else as SGLang: who has generated least, of these
        the one with the longest prompt, of these the latest."""
        if self.mode.host is not None:
            return max(running)
        generated, prompt = self.mode.progress.generated, self.mode.load.prompt_tokens
        return min(running, key=lambda i: (generated[i], -prompt[i], -i))

    def queue_again(self, request: int, waiting: IntArray, running: Sequence[int]) -> IntArray:
        """What went to host memory waits at the front, and SGLang's accounting does not hear of it;
        what was retracted, at the end."""
        self._full = False
        load, progress = self.mode.load, self.mode.progress
        if progress.on_host[request]:
            return np.insert(waiting, 0, request)
        remaining = np.array(running, np.int64)
        self._ratio.retracted(
            int(progress.generated[remaining].sum()),
            int(load.max_new_tokens[remaining].sum()),
            len(remaining),
        )
        return np.append(waiting, request)

    def rested(self) -> None:
        self._ratio.reset()

    def decode_begins(self) -> None:
        """Who has ended leaves SGLang's batch."""
        if self.lingering:
            self.lingering, self._full = (), False

    def stepped(self, decode_steps: int, ended: Sequence[int]) -> None:
        if decode_steps:
            self._ratio.decay(decode_steps)
            self.lingering = ended
        elif ended:
            self._full = False
