"""Memory that two servers of the demo model divide: all of it for each, which no machine has twice,
half of it, or a budget that both share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ellm_sgl.client.process import DEMO_ARGUMENTS

ALONE, HALVES, SHARED = "all memory, each alone", "a static half each", "a shared budget"
BLOCK_TOKENS = 16
"""A pool holds whole blocks (`--ellm-block-tokens`)."""
FLOOR = 1 / 8
"""Of the memory, that a server always keeps: enough to begin a burst with while the other still
gives back what it has."""
GRANULES = 3
"""More than a burst and the floor take: what a pool has and what it keeps are whole granules, and
one more is being handed over while a burst begins."""


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
    def for_bursts(requests: int, longest: int, token_bytes: int, granule: int) -> Division:
        """With room for a burst beside the other's floor, so that nobody has to pause.

        Args:
            requests: of a burst, which one server at a time has.
            longest: tokens of each, prompt and output; it may have a few more, at most a block.
            granule: bytes in which a pool grows.
        """
        burst = requests * (_blocks(longest + BLOCK_TOKENS - 1) + BLOCK_TOKENS)
        spare = GRANULES * granule / token_bytes
        tokens = math.ceil((burst + spare) / (1 - FLOOR))
        return Division.of(tokens + BLOCK_TOKENS, token_bytes)

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
