"""What the prompts of a step may take of the device while other requests decode.

A prompt never takes KV from those who decode: each evicted block would be computed again in every
step to come. It takes free units, then cached prefixes that nobody uses; a chunk of a prompt that
is under way gets smaller, down to a block; and where there is no room for a block, prompts wait
while the others decode. These end, each after at most the tokens that it may have; and where nobody
decodes nothing is kept from a prompt. So each prompt goes on.

Nor does it take slots, which blocks have with or without memory behind them, that those who decode
beside it begin blocks in.

Nor does it take more than a step's activations may (`step_room.py`): then, too, its chunk gets
smaller, down to a block.

Of a prompt the policy admits at an uncached ratio, so large a share needs no room: its KV exists
while the step computes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ellm_sgl.memory.page_table import PageTable
from ellm_sgl.memory.step_room import Activations, StepRoom

GROWING = 4
"""Of so many requests that decode, one is left a block to grow by."""


class PromptRoom:
    """Of one step.

    Args:
        blocks: free, or of cached prefixes that nobody uses; inf where nobody decodes.
        growth: of them, those that a prompt under way leaves to those who decode.
        block_tokens: of a block.
        step: what activations may take, and
        nbytes: what is left of it for prompts; inf where nothing bounds it.
        slots: blocks that prompts may have, whether or not there is memory behind them.
    """

    def __init__(
        self,
        blocks: float,
        growth: int,
        block_tokens: int,
        step: StepRoom | None = None,
        nbytes: float = math.inf,
        slots: float = math.inf,
    ) -> None:
        self._blocks, self._growth, self._block_tokens = blocks, growth, block_tokens
        self._slots = slots
        self._step = step or StepRoom(Activations(), block_tokens)
        self._nbytes, self._computes = nbytes, False

    @classmethod
    def of(
        cls,
        table: PageTable,
        decoding: int,
        reclaimable: int,
        step: StepRoom | None = None,
        nbytes: float = math.inf,
        slots: float = math.inf,
    ) -> PromptRoom:
        """As it is now, where so many requests decode.

        Args:
            reclaimable: device tokens of cached prefixes that nobody uses.
            step, nbytes, slots: as of the class.
        """
        shape = table.shape
        blocks = math.inf
        if decoding:
            free = max(table.free_units, 0) // shape.num_groups
            blocks = free + reclaimable // shape.block_tokens
        return cls(blocks, -(-decoding // GROWING), shape.block_tokens, step, nbytes, slots)

    def rows(self, logits: bool = False) -> float:
        """Rows of a prompt that the step can still compute: whole blocks, and one at least if it
        has none yet.

        Args:
            logits: of all of them, too.
        """
        rows = self._step.rows(self._nbytes, logits)
        if rows == math.inf:
            return rows
        least = 0 if self._computes else self._block_tokens
        return max(rows // self._block_tokens * self._block_tokens, least)

    def compute(self, rows: int, logits: bool = False) -> None:
        """They are part of the step."""
        self._computes = True
        self._nbytes -= self._step.activations.bytes_of_rows(rows, rows if logits else 1)

    def has(self, tokens: int, ratio: float, prefix: int = 0) -> bool:
        """Whether a prompt may begin with so many tokens.

        Args:
            ratio: uncached, that the policy admits it at.
            prefix: tokens that it finds cached, and nobody has used: they cease to be room.
        """
        if self._needed(tokens, 0.0, prefix) > self._slots:
            return False
        return self._needed(tokens, ratio, prefix) <= self._blocks

    def take(self, tokens: int, ratio: float, prefix: int = 0) -> None:
        """It begins."""
        self._blocks -= self._needed(tokens, ratio, prefix)
        self._slots -= self._needed(tokens, 0.0, prefix)

    def further(self, begin: int, tokens: int, own: int) -> int:
        """By how many of the next `tokens` a prompt goes on that has come to `begin`; 0: it waits.

        Args:
            own: blocks of it that may still be without units, at its ratio.
        """
        blocks = min(max(self._blocks - self._growth, 0) + own, self._slots)
        if blocks < 1:
            return 0
        tokens = int(min(tokens, blocks * self._block_tokens + -begin % self._block_tokens))
        begun = -(-tokens // self._block_tokens)
        self._blocks -= max(begun - own, 0)
        self._slots -= begun
        return tokens

    def _needed(self, tokens: int, ratio: float, prefix: int) -> int:
        blocks = -(-tokens // self._block_tokens)
        return blocks - int(ratio * blocks) + math.ceil(prefix / self._block_tokens)


@dataclass(frozen=True)
class UnderWay:
    """A prompt that has been computed in part."""

    own: int
    """Blocks of it that may still be without units, at the ratio that it was admitted at."""
    coming: int
    """Blocks for which it will take units."""
    missing: int
    """Blocks of it that have been computed, and lack units."""
    left: int = 0
    """Tokens that have yet to be computed."""

    @property
    def uncached_blocks(self) -> int:
        """Blocks of the whole prompt that will lack units when it decodes, at its ratio."""
        return self.own + self.missing

    @staticmethod
    def of(table: PageTable, seq_id: int, tokens: int, ratio: float) -> UnderWay:
        """A prompt of so many tokens in all, that was admitted at this ratio."""
        there = table.blocks_of(seq_id)
        blocks = table.shape.blocks_for(tokens)
        missing = int(np.count_nonzero(table.misses_units(there)))
        own = max(int(ratio * blocks) - missing, 0)
        own = min(own, max(blocks - len(there), 0))
        left = max(tokens - table.length_of(seq_id), 0)
        return UnderWay(own, max(blocks - len(there) - own, 0), missing, left)


NOTHING_UNDER_WAY = UnderWay(0, 0, 0)
