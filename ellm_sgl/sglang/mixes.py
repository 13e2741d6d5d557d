"""Made-up steps that calibration measures."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from ellm_sgl.latency import StepWork


@dataclass(frozen=True)
class Mix:
    """A step of equal requests."""

    requests: int
    tokens: int
    """Of each request, those computed now included."""
    new: int = 1
    """Tokens computed: 1 while decoding, else the end of a prompt."""
    uncached: int = 0
    """Tokens from the first on that are restored."""

    @property
    def kind(self) -> tuple[bool, ...]:
        """Steps of one kind run the same kernels."""
        return self.new > 1, self.uncached > 0, self.tokens > self.new > 1

    def in_blocks(self, block_tokens: int) -> Self:
        """What is restored comes in whole blocks."""
        return replace(self, uncached=-(-self.uncached // block_tokens) * block_tokens)

    def fits(self, context: int) -> bool:
        """Whether there can be such requests: restored is only what had been computed."""
        return self.uncached + self.new <= self.tokens <= context

    @property
    def rows(self) -> int:
        return self.requests * (self.new + self.uncached)

    @property
    def work(self) -> StepWork:
        b, new, n = self.requests, self.new, self.uncached
        spans = {"restored_tokens": b * n, "restored_squares": b * n**2}
        if new == 1:
            return StepWork(decode_rows=b, decode_tokens=b * self.tokens, **spans)
        pairs = b * (new * (self.tokens - new) + new * (new + 1) // 2)
        return StepWork(0, 0, prefill_rows=b * new, prefill_pairs=pairs, **spans)


MIXES = (
    *(Mix(requests, 64) for requests in (1, 2, 4, 8, 16, 32)),
    Mix(1, 1024),
    Mix(4, 512),
    Mix(8, 256),
    Mix(4, 1024),
    Mix(16, 256),
    Mix(1, 64, uncached=32),
    Mix(4, 128, uncached=32),
    Mix(8, 256, uncached=32),
    Mix(8, 256, uncached=128),
    Mix(1, 1024, uncached=512),
    Mix(1, 64, new=64),
    Mix(4, 64, new=64),
    Mix(1, 256, new=256),
    Mix(1, 1024, new=1024),
    Mix(1, 1024, new=128),
)
"""Steps that tell the profile's fields apart; those that are affordable run."""


FEW_ROWS = (Mix(1, 64), Mix(1, 16, new=16))
"""Steps whose memory is measured however large the model: they tell a row from the rest."""
MEASURED_BYTES = (
    Mix(16, 64),
    Mix(4, 128, uncached=32),
    Mix(1, 64, new=64),
    Mix(1, 256, new=256),
    Mix(1, 1024, uncached=512),
    Mix(1, 1024, new=1024),
)
"""And others, of those that are affordable."""
