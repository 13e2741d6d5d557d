"""Divides rows among FlashInfer's wrappers: arithmetic on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ellm_sgl.kernels.layout import RequestLayout

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Pages:
    """Pages of some ranges of rows, as FlashInfer takes them."""

    indptr: IntArray
    """[ranges + 1]: where each range's pages begin."""
    places: IntArray
    """[pages]: places in `GroupLayout.units`."""
    last_tokens: IntArray
    """[ranges]: tokens in each range's last page."""

    @staticmethod
    def before(ends: IntArray, first_blocks: IntArray, block_tokens: int) -> Pages:
        """Pages of ranges that attend to their request's tokens before `ends`, at least one.

        Args:
            ends: [ranges].
            first_blocks: [ranges], the place of the request's first block.
            block_tokens: tokens of a page.
        """
        counts = -(-ends // block_tokens)
        places = _consecutive(first_blocks, counts)
        return Pages(_indptr(counts), places, ends - (counts - 1) * block_tokens)


@dataclass(frozen=True)
class Division:
    """The rows of a layer group, divided among FlashInfer's wrappers."""

    decode_rows: IntArray
    """Rows that need only pages, their own token's included."""
    decode: Pages
    rows: IntArray
    """The other rows, range by range; those with pages come first."""
    row_indptr: IntArray
    """[ranges + 1]: where each range's rows begin. Each range also attends to itself, causally."""
    resident: Pages
    """Of what precedes the leading ranges; the others begin their request."""

    @property
    def resident_ranges(self) -> int:
        return len(self.resident.last_tokens)

    @property
    def resident_rows(self) -> int:
        """Leading `rows` that attend to pages."""
        return int(self.row_indptr[self.resident_ranges])


def divide(requests: Sequence[RequestLayout], block_tokens: int) -> Division:
    """Divide the rows of requests that recompute nothing.

    Raises:
        ValueError: a request has recomputed rows; those are the fused kernel's.
    """
    if any(request.spans for request in requests):
        raise ValueError("FlashInfer takes no rows that are recomputed; use the fused kernel")
    fields = [(*r.new, r.blocks.start, r.unstored_new) for r in requests]
    row, position, size, block, unstored = np.array(fields, np.int64).reshape(-1, 5).T
    decodes = (size == 1) & (unstored == 0)
    others = np.flatnonzero(~decodes)
    others = others[np.argsort(position[others] == 0, kind="stable")]
    resident = others[position[others] > 0]
    return Division(
        decode_rows=row[decodes],
        decode=Pages.before(position[decodes] + 1, block[decodes], block_tokens),
        rows=_consecutive(row[others], size[others]),
        row_indptr=_indptr(size[others]),
        resident=Pages.before(position[resident], block[resident], block_tokens),
    )


def _consecutive(firsts: IntArray, counts: IntArray) -> IntArray:
    """So many numbers from each of `firsts`, end to end."""
    indptr = _indptr(counts)
    return np.repeat(firsts - indptr[:-1], counts) + np.arange(indptr[-1])


def _indptr(counts: IntArray) -> IntArray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
