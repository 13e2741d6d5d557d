"""What happens in a simulation, while it happens."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from ellm_sgl.client.traces import FloatArray, IntArray
from ellm_sgl.latency import StepWork


@dataclass(frozen=True)
class Sample:
    """One iteration, for time series."""

    at_s: float
    running: int
    waiting: int
    uncached_share: float
    """Restored tokens over all tokens that decoding read."""


@dataclass
class Record:
    """Counters and series of one simulation. Times are in seconds of its clock."""

    ended: int = 0
    retractions: int = 0
    decode_steps: int = 0
    decode_s: float = 0.0
    prefill_rows: int = 0
    """Prompt tokens computed, those computed again after a retraction included."""
    restored_tokens: float = 0.0
    """Tokens restored, summed over decode steps."""
    decoded_tokens: float = 0.0
    """Σ s_i over decode steps: what `restored_tokens` is a share of."""
    rows_s: float = 0.0
    """Running requests times seconds, over decode steps."""
    rows: int = 0
    """Running requests, summed over decode steps: the tokens that these gave."""
    running_most: int = 0
    """Requests that decoded together, at the most."""
    held_tokens: float = 0.0
    """Tokens whose KV decoding requests have, summed over iterations."""
    held_places: float = 0.0
    """Token places of their blocks, likewise."""
    wall_s: float = 0.0
    """Time that simulating took."""
    samples: list[Sample] = field(default_factory=list)
    _steps: list[tuple[float, bool]] = field(default_factory=list)
    """When each step ended, and whether it decoded; (nan, False) for a rest between them."""
    _gaps: list[FloatArray] = field(default_factory=list)
    _token_ends: list[FloatArray] = field(default_factory=list)
    """When tokens came."""
    _token_counts: list[IntArray] = field(default_factory=list)
    """How many came then."""

    def rest(self) -> None:
        """The server had nothing to do."""
        self._steps.append((math.nan, False))

    def prefill(self, now_s: float, rows: int) -> None:
        self._steps.append((now_s, False))
        self.prefill_rows += rows

    def decode(
        self, ends: FloatArray, seconds: float, rows: int, waiting: int, work: StepWork
    ) -> None:
        """Decode steps that ended at these times, and took so long together."""
        steps = len(ends)
        self._steps += [(end, True) for end in ends.tolist()]
        self.decode_s += seconds
        self.rows_s += rows * seconds
        self.rows += rows * steps
        self.running_most = max(self.running_most, rows)
        restored, read = float(np.sum(work.restored_tokens)), float(np.sum(work.decode_tokens))
        self.decode_steps += steps
        self.restored_tokens += restored
        self.decoded_tokens += read
        self.samples.append(Sample(float(ends[-1]), rows, waiting, restored / read))

    def blocks(self, tokens: IntArray, block_tokens: int) -> None:
        """What decoding requests hold, in tokens of each."""
        self.held_tokens += float(tokens.sum())
        self.held_places += float((-(-tokens // block_tokens)).sum() * block_tokens)

    def tokens(self, ends: FloatArray, last_s: FloatArray, fresh: int) -> None:
        """Requests got a token at each of these times.

        Args:
            last_s: when each had got its latest one before.
            fresh: further requests, which had none yet.
        """
        self._token_ends.append(ends)
        self._token_counts.append(np.full(len(ends), len(last_s) + fresh))
        self._gaps.append(ends[0] - last_s)
        if len(ends) > 1:
            self._gaps.append(np.repeat(np.diff(ends), len(last_s) + fresh))

    def one_step_late(self, times_s: FloatArray) -> FloatArray:
        """When results of steps that ended at `times_s` come out, if SGLang's overlap scheduling
        processes them after the next step and launching that step is computing it (a CPU).

        They come at once before a rest, and of one prefill before another.
        """
        ends, decoded = map(np.array, zip(*self._steps, strict=True))
        next_end, next_decoded = np.append(ends[1:], math.nan), np.append(decoded[1:], False)
        late = ~np.isnan(next_end) & (decoded | next_decoded)
        out = np.where(late, next_end, ends)
        order = np.argsort(ends)  # nan last
        places = np.searchsorted(ends[order], times_s)
        return np.where(np.isnan(times_s), times_s, out[order][np.minimum(places, len(ends) - 1)])

    @property
    def gaps_s(self) -> FloatArray:
        """Times between tokens of one request, over all tokens."""
        return np.concatenate(self._gaps) if self._gaps else np.zeros(0)

    def tokens_by(self, end_s: float, late: bool) -> int:
        """Tokens that had come by then.

        Args:
            late: they come out as `one_step_late` has it.
        """
        if not self._token_ends:
            return 0
        ends = np.concatenate(self._token_ends)
        came = (self.one_step_late(ends) if late else ends) <= end_s
        return int(np.concatenate(self._token_counts)[came].sum())
