"""What a client saw of one stream, and of a whole load."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

_COMPLETE = ("stop", "length")
"""Finish reasons of an answer that ended as it should."""


@dataclass(frozen=True)
class StreamRecord:
    """One stream that has ended. Times are in seconds on one clock."""

    topic: str
    text: str
    sent_s: float
    arrivals_s: tuple[float, ...]
    """When each piece of text arrived; a piece is one token, or some that came together."""
    prompt_tokens: int
    output_tokens: int
    finish: str

    @property
    def complete(self) -> bool:
        return self.finish in _COMPLETE

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return self.arrivals_s[0] - self.sent_s if self.arrivals_s else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first."""
        if not self.arrivals_s or self.output_tokens < 2:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.output_tokens - 1)

    @property
    def longest_pause_s(self) -> float | None:
        """Longest wait for the next token of a stream that had begun."""
        return max((b - a for a, b in itertools.pairwise(self.arrivals_s)), default=None)

    def same_output(self, other: StreamRecord) -> bool:
        """Whether both hold the same answer. The demo model's tokens are bytes, so equal texts
        of equally many tokens are equal tokens."""
        return (self.text, self.output_tokens, self.finish) == (
            other.text,
            other.output_tokens,
            other.finish,
        )


@dataclass(frozen=True)
class LoadStatistics:
    """A load as its clients saw it; None where no stream got far enough to tell."""

    seconds: float
    """From the first request to the last token."""
    output_tokens: int
    output_tokens_per_s: float
    ttft_mean_s: float | None
    ttft_p99_s: float | None
    tpot_mean_ms: float | None
    tpot_p99_ms: float | None
    longest_pause_s: float | None

    @classmethod
    def of(cls, records: Sequence[StreamRecord]) -> LoadStatistics:
        begin = min(record.sent_s for record in records)
        end = max((r.arrivals_s[-1] for r in records if r.arrivals_s), default=begin)
        tokens = sum(record.output_tokens for record in records)
        ttft = _known(record.ttft_s for record in records)
        tpot = 1e3 * _known(record.tpot_s for record in records)
        pauses = _known(record.longest_pause_s for record in records)
        return cls(
            seconds=end - begin,
            output_tokens=tokens,
            output_tokens_per_s=tokens / (end - begin) if end > begin else 0.0,
            ttft_mean_s=_mean(ttft),
            ttft_p99_s=_p99(ttft),
            tpot_mean_ms=_mean(tpot),
            tpot_p99_ms=_p99(tpot),
            longest_pause_s=float(pauses.max()) if pauses.size else None,
        )


Floats = np.ndarray[tuple[int], np.dtype[np.float64]]


def _known(values: Iterable[float | None]) -> Floats:
    return np.array([value for value in values if value is not None], dtype=np.float64)


def _mean(values: Floats) -> float | None:
    return float(values.mean()) if values.size else None


def _p99(values: Floats) -> float | None:
    return float(np.percentile(values, 99)) if values.size else None
