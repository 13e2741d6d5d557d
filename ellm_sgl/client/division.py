"""Memory that two servers of the demo model divide: all of it for each, which no machine has twice,
half of it, or a budget that both share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ellm_sgl.client.process import DEMO_ARGUMENTS

ALONE, HALVES, SHARED = "all memory, each alone", "a static half each", "a shared budget"
BLOCK_TOKENS = 16
"""A pool holds whole blocks (`--ellm-block-tokens`)."""
FLOOR = 1 / 8
"""Of the memory, that a server always keeps: enough to begin a burst with while the other still
gives back what it has."""
ROOM, GRANULES = 1.1, 3
"""The memory, of what a burst needs, and so much more, for each has whole granules and a prompt may
be a token or two longer than was asked for: what is left beside the other's floor holds the
burst, and nobody has to pause."""


@dataclass(frozen=True)
class Division:
    """What there is, in tokens of the demo model's KV.

    Args:
        tokens: that both servers have together.
        token_bytes: of one token's KV.
    """

    tokens: int
    token_bytes: int

    @staticmethod
    def of(tokens: int, token_bytes: int) -> Division:
        """Of so much memory, in whole blocks."""
        return Division(max(_blocks(tokens), 4 * BLOCK_TOKENS), token_bytes)

    @staticmethod
    def for_bursts(tokens: int, token_bytes: int, granule: int) -> Division:
        """With room for bursts of so many tokens on one server at a time.

        Args:
            granule: bytes in which a pool grows.
        """
        return Division.of(int(ROOM * tokens) + GRANULES * granule // token_bytes, token_bytes)

    @property
    def floor(self) -> int:
        return _blocks(int(self.tokens * FLOOR))

    @property
    def half(self) -> int:
        return _blocks(self.tokens // 2)

    @property
    def nbytes(self) -> int:
        return self.tokens * self.token_bytes

    def fixed(self, tokens: int) -> Sequence[str]:
        """Arguments of a server that always has so many tokens' memory,"""
        return [*DEMO_ARGUMENTS, "--ellm-policy", "fcfs", "--ellm-device-kv-tokens", str(tokens)]

    def shared(self, budget: str) -> Sequence[str]:
        """and of one that shares all of it with the other."""
        return [
            *self.fixed(self.half),
            *("--ellm-memory-budget", f"{budget}:{self.nbytes}"),
            *("--ellm-min-device-kv-tokens", str(self.floor)),
            *("--ellm-max-device-kv-tokens", str(self.tokens)),
        ]


def _blocks(tokens: int) -> int:
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS
