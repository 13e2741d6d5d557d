"""What a client saw of one stream, and of a whole load."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass
class ChatStream:
    """One chat, filled in while it is streamed. Times are monotonic, in seconds."""

    topic: str
    text: str = ""
    sent_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)
    """When each piece of text arrived; a piece is one token, or some that came together."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    """As the server counts them; known at the end."""
    finish: str | None = None
    """The server's finish reason, or the error that ended the chat; None while it goes on."""

    @property
    def complete(self) -> bool:
        """Whether the answer ended as it should."""
        return self.finish in ("stop", "length")

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

    def same_output(self, other: ChatStream) -> bool:
        """Whether both hold the same answer. The demo model's tokens are bytes, so equal texts
        of equally many tokens are equal tokens."""
        ours, theirs = ((s.text, s.output_tokens, s.finish) for s in (self, other))
        return ours == theirs


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
    def of(cls, streams: Sequence[ChatStream]) -> LoadStatistics:
        begin = min(s.sent_s for s in streams)
        end = max((s.arrivals_s[-1] for s in streams if s.arrivals_s), default=begin)
        tokens = sum(s.output_tokens for s in streams)
        ttft_mean, ttft_p99, _ = _mean_p99_max(s.ttft_s for s in streams)
        tpot_mean, tpot_p99, _ = _mean_p99_max(s.tpot_s and 1e3 * s.tpot_s for s in streams)
        _, _, longest_pause = _mean_p99_max(s.longest_pause_s for s in streams)
        return cls(
            seconds=end - begin,
            output_tokens=tokens,
            output_tokens_per_s=tokens / (end - begin) if end > begin else 0.0,
            ttft_mean_s=ttft_mean,
            ttft_p99_s=ttft_p99,
            tpot_mean_ms=tpot_mean,
            tpot_p99_ms=tpot_p99,
            longest_pause_s=longest_pause,
        )


def _mean_p99_max(
    values: Iterable[float | None],
) -> tuple[float, float, float] | tuple[None, None, None]:
    known = np.array([value for value in values if value is not None])
    if not known.size:
        return None, None, None
    return float(known.mean()), float(np.percentile(known, 99)), float(known.max())
