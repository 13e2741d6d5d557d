"""Cuts a step's attention into tiles for the fused kernel: arithmetic on the host, one upload."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ellm_sgl.kernels.layout import RequestLayout

IntArray = npt.NDArray[np.int32]

FIELDS = 12
"""int32 fields of a tile."""
RECOMPUTE_ROWS = 64
"""Rows of a K1 tile: what one warp group of a Hopper device multiplies at once."""
DECODE_CHUNK = 512
"""Tokens of one request that a K2 tile attends to at most."""
RECOMPUTE_CHUNK = 4096
"""The same for a K1 tile, where there are few of them."""
FEW_TILES = 32
"""K1 tiles below which each may be cut into chunks: otherwise there is enough to do at once, and
partial results of 64 rows are large."""
MAX_CHUNKS = 1 << 20
STEP = 64
"""Chunks begin at multiples of so many tokens, the kernel's step."""


@dataclass(frozen=True)
class TileSizes:
    """How many rows of a step, times query heads of a KV head, make a tile."""

    group: int
    """Query heads per KV head."""
    recompute: int
    """Rows of a K1 tile (token, query head); a power of 2, at least 16 and at least `group`."""
    decode: int
    """The same for K2."""

    @staticmethod
    def of(group: int) -> TileSizes:
        """K2's tiles as small as the tensor cores take them."""
        smallest = max(16, 1 << (group - 1).bit_length())
        return TileSizes(group, max(RECOMPUTE_ROWS, smallest), smallest)


@dataclass(frozen=True)
class Tiles:
    """Tiles of one layer group; the same for every KV head."""

    fields: IntArray
    """[tiles, 12], K1 first: first row, tokens, position of the first, KV tokens [start, end), the
    request's first block, position from which tokens are new, their first row, chunk, chunks,
    first partial row, number among the tiles of several chunks."""
    recompute: int
    """How many of them are K1's."""
    partial_rows: int
    """Rows of partial results, per KV head."""
    merged: int
    """Tiles whose chunks are merged."""

    @property
    def decode(self) -> int:
        return len(self.fields) - self.recompute


def cut(requests: tuple[RequestLayout, ...], sizes: TileSizes) -> Tiles:
    """The tiles of all rows: single rows are K2's, longer ranges K1's.

    What a tile attends to, and in which pieces, depends on the layout alone: neither δ nor the
    device has a say in any rounding.
    """
    ranges = np.array(
        [
            (rows.row, rows.size, rows.position, r.blocks.start, r.new.position, r.new.row)
            for r in requests
            for rows in (r.new, *r.spans)
        ],
        np.int64,
    ).reshape(-1, 6)
    single = ranges[:, 1] == 1
    recompute = _tiles(ranges[~single], sizes.recompute // sizes.group)
    recompute = recompute[np.argsort(-recompute[:, 4], kind="stable")]
    most = max(1, FEW_TILES // max(len(recompute), 1))
    k1, rows, merged = _chunks(recompute, RECOMPUTE_CHUNK, most, sizes.recompute, 0, 0)
    decode = _tiles(ranges[single], 1)
    k2, rows, merged = _chunks(decode, DECODE_CHUNK, MAX_CHUNKS, sizes.decode, rows, merged)
    return Tiles(np.concatenate([k1, k2]).astype(np.int32), len(k1), rows, merged)


def span_blocks(
    requests: tuple[RequestLayout, ...], block_tokens: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The blocks that the step computes: their places in `GroupLayout.units`, and -1 - first row.

    Raises:
        ValueError: a span begins inside a block.
    """
    spans = [(request.blocks.start, span) for request in requests for span in request.spans]
    if not spans:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    places, rows = [], []
    for first_block, span in spans:
        if span.position % block_tokens:
            raise ValueError(f"a span begins at token {span.position}, inside a block")
        blocks = np.arange(-(-span.size // block_tokens))
        places.append(first_block + span.position // block_tokens + blocks)
        rows.append(-1 - span.row - blocks * block_tokens)
    return np.concatenate(places), np.concatenate(rows)


def _tiles(ranges: npt.NDArray[np.int64], tokens: int) -> npt.NDArray[np.int64]:
    """The first eight fields of the tiles of these ranges, at most `tokens` rows each."""
    counts = -(-ranges[:, 1] // tokens)
    first = np.cumsum(counts) - counts
    of = np.repeat(np.arange(len(ranges)), counts)
    row, count, position, block, new_position, new_row = ranges[of].T
    skipped = (np.arange(len(of)) - first[of]) * tokens
    here = np.minimum(count - skipped, tokens)
    end = position + skipped + here
    columns = row + skipped, here, position + skipped, 0 * end, end, block, new_position, new_row
    return np.stack(columns, axis=1)


def _chunks(
    tiles: npt.NDArray[np.int64],
    tokens: int,
    most: int,
    tile_rows: int,
    partial_row: int,
    merged: int,
) -> tuple[npt.NDArray[np.int64], int, int]:
    """Cut each tile's KV into chunks of `tokens`, at most `most` of them. Returns all twelve
    fields, the first free partial row, and the tiles merged so far."""
    end = tiles[:, 4]
    wanted = np.minimum(-(-end // tokens), most)
    length = -(-end // (wanted * STEP)) * STEP
    chunks = -(-end // length)
    several = chunks > 1
    number = merged + np.cumsum(several) - several
    rows = np.where(several, chunks, 0) * tile_rows
    first_partial = partial_row + np.cumsum(rows) - rows
    of = np.repeat(np.arange(len(tiles)), chunks)
    chunk = np.arange(len(of)) - (np.cumsum(chunks) - chunks)[of]
    fields = np.concatenate(
        [tiles[of], np.stack([chunk, chunks[of], first_partial[of], number[of]], axis=1)], axis=1
    )
    fields[:, 3] = chunk * length[of]
    fields[:, 4] = np.minimum(fields[:, 3] + length[of], end[of])
    return fields, partial_row + int(rows.sum()), merged + int(several.sum())
