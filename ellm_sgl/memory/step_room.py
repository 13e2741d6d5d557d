"""Memory of one step beside the pools: what its activations take, and what there is for them.

```
 the machine's, or the container's ─┬─ others, weights, the pools' memory, used or promised
                                    ├─ MARGIN_BYTES
                                    └─ left to a step: new rows, logit rows, recomputed rows
```

A step's rows are decided before anything of it is taken: prompts are computed in smaller chunks,
and fewer tokens are left to be recomputed, where there is not enough. So a step has all of its
memory or does not begin (Alg. 1 of the paper on elastic memory), and no KV makes way for
activations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

MARGIN_BYTES = 64 << 20
"""θ of Alg. 1: left alone, for what is not measured (libc's own, Python's objects, sampling)."""


@dataclass(frozen=True)
class Activations:
    """Bytes that the tensors of one step take at its peak, on one rank."""

    row_bytes: float = 0.0
    """For each row, new or recomputed,"""
    logit_row_bytes: float = 0.0
    """and beyond that for each row whose logits are computed;"""
    step_bytes: float = 0.0
    """for any step."""

    @staticmethod
    def fit(measured: Sequence[tuple[int, int, int]]) -> Activations:
        """The line through what was measured, and raised until nothing lies above it.

        Args:
            measured: (rows, logit rows, bytes at the peak) of some steps, all positive.
        """
        rows, logit_rows, peaks = np.array(measured, float).T
        terms = np.stack([rows, logit_rows, np.ones(len(rows))], axis=1)
        found, _ = nnls(terms / peaks[:, None], np.ones(len(rows)))
        found *= max((peaks / (terms @ found)).max(), 1.0)
        return Activations(*found.tolist())

    def bytes_of(self, rows: int, logit_rows: int) -> int:
        """Of a step."""
        return math.ceil(self.bytes_of_rows(rows, logit_rows) + self.step_bytes)

    def bytes_of_rows(self, rows: int, logit_rows: int) -> float:
        """Of these rows in a step that has others."""
        return rows * self.row_bytes + logit_rows * self.logit_row_bytes


class StepRoom:
    """What steps may have of it. All ranks have the same.

    Args:
        activations: as measured; until then nothing is known to take memory.
        block_tokens: so many rows a step may always have beside those that decode: else nothing
            would go on.
    """

    def __init__(self, activations: Activations, block_tokens: int) -> None:
        self.activations = activations
        self.left_bytes = math.inf
        """For the coming step, as last agreed."""
        self.reserved_bytes, self.staged_units = 0, 0
        """By the step planned last: for its activations, and borrowed of the pool."""
        self.prompt_rows = 0
        """Of the step being prepared."""
        self.chunk_rows = 0
        """Of a prompt's whole chunk."""
        self.block_tokens = block_tokens
        self._rows = self._logit_rows = 0
        """Of the step planned last."""

    @property
    def chunk_bytes(self) -> int:
        """For the activations of a prompt's whole chunk; 0 where nothing is known of them."""
        return self.activations.bytes_of(self.chunk_rows, 1) if self.chunk_rows else 0

    @property
    def kept_bytes(self) -> int:
        """That a pool which grows leaves: for a step as the last one or a whole chunk beside its
        logits, since what grows for longer leaves prompts a block a step for good; and for a chunk
        more, which libc keeps once it is freed, and who looks takes for used."""
        rows, logit_rows = max(self._rows, self.chunk_rows), max(self._logit_rows, 1)
        return self.activations.bytes_of(rows, logit_rows) + self.chunk_bytes

    @property
    def short_bytes(self) -> float:
        """That the pool is to yield, once half of a whole chunk is missing: so much that what
        libc keeps, or others take for a moment, does not have it come and go."""
        if self.left_bytes >= self.chunk_bytes / 2:
            return 0.0
        return 2 * self.chunk_bytes - self.left_bytes

    def restorable(self, decoding: int) -> float:
        """Rows that the coming step can recompute beside its prompts and so many that decode."""
        prompts = self.activations.bytes_of_rows(self.prompt_rows, 0)
        return max(self.rows(self.for_prompts(decoding) - prompts), self.block_tokens)

    def for_prompts(self, decoding: int, recomputed: int = 0) -> float:
        """Bytes for the rows of prompts, beside so many requests that decode in the same step, and
        so many rows that are recomputed."""
        return self.left_bytes - self.activations.bytes_of(decoding + recomputed, decoding)

    def rows(self, nbytes: float, logits: bool = False) -> float:
        """So many rows have room in these bytes.

        Args:
            logits: each with its logits, as where a prompt's log-probabilities are asked for.
        """
        each = self.activations.bytes_of_rows(1, int(logits))
        if nbytes == math.inf or each == 0:
            return math.inf
        return max(nbytes // each, 0)

    def reserve(self, rows: int, logit_rows: int, staged_units: int) -> None:
        """A step of so many rows has been planned, which borrows so many units."""
        self._rows, self._logit_rows = rows, logit_rows
        self.reserved_bytes = self.activations.bytes_of(rows, logit_rows)
        self.staged_units = staged_units


@dataclass(frozen=True)
class BytesByOwner:
    """Memory of one rank; each byte has one owner."""

    kv: int
    """The device pool: what is committed, less"""
    staging: int
    """what the step planned last borrows of it, for KV that passes through from the host."""
    activations: int
    """Of the step planned last, as estimated."""
    hidden_states: int
    """Their pool, on the host or on the device."""
    host_tier: int
    """KV that left the device: its pool, in memory or in a file."""
    kv_store: int
    """The most that waits to be written to the store on disk, or has been read from it."""
    left: int | None
    """What nobody has, and a step's activations may: as last looked up, less a margin. None where
    nothing bounds it."""
