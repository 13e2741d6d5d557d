"""What an attention kernel is told about the rows of one step, and how it is called.

The layouts are named tuples: made in every step, per request or per group, in a fourth of a frozen
dataclass's time.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch


class RowRange(NamedTuple):
    """Consecutive rows of a step that are consecutive tokens of one request."""

    row: int
    """First row in q, k and v."""
    position: int
    """Token position of that row."""
    size: int

    @property
    def end_row(self) -> int:
        return self.row + self.size

    @property
    def end_position(self) -> int:
        return self.position + self.size


class RequestLayout(NamedTuple):
    """One request in the layers of one layer group."""

    new: RowRange
    """The rows SGLang asked for: a token being decoded, or a chunk being prefilled."""
    spans: tuple[RowRange, ...]
    """Rows recomputed because their KV is missing; all their positions lie before `new`."""
    blocks: slice
    """This request's token blocks in `GroupLayout.units`."""
    unstored_new: bool
    """Some of the `new` rows have no unit: take their KV from k and v, not from the pool."""


class StackedLayout(NamedTuple):
    """Layer groups of a step that differ in nothing but units: mostly all of them.

    Rows are ordered: the new rows of every request, then the recomputed rows. A kernel first writes
    k and v of `write_rows` to the pool, then attends: each row to all tokens of its request up
    to its own position, taking k and v of recomputed rows from the step and the rest from the pool.
    """

    rows: int
    """Rows alive in the layers of these groups."""
    requests: tuple[RequestLayout, ...]
    units: torch.Tensor
    """int64 [groups, blocks of all requests]: unit of each block; 0 where there is none."""
    write_rows: torch.Tensor | slice
    """int64 [w], or a slice when they are consecutive: rows whose k and v go to the pool."""
    write_units: torch.Tensor
    """int64 [groups, w]."""
    write_offsets: torch.Tensor
    """int64 [w]: place in the unit, 0..block_tokens-1."""

    def layouts(self) -> tuple[GroupLayout, ...]:
        """Each group's layout, in order."""
        return tuple(GroupLayout(self, group) for group in range(len(self.units)))


class GroupLayout(NamedTuple):
    """All requests of a step in the layers of one layer group: one of a `StackedLayout`'s."""

    stacked: StackedLayout
    """What a kernel may prepare for all groups at once, from any one's layout."""
    group: int
    """This group's place among them."""

    @staticmethod
    def of(
        rows: int,
        requests: tuple[RequestLayout, ...],
        units: torch.Tensor,
        write_rows: torch.Tensor | slice,
        write_units: torch.Tensor,
        write_offsets: torch.Tensor,
    ) -> GroupLayout:
        """The layout of a group that no other is like. `units`: [blocks], `write_units`: [w]."""
        alone = units[None], write_rows, write_units[None], write_offsets
        return GroupLayout(StackedLayout(rows, requests, *alone), 0)

    @property
    def rows(self) -> int:
        return self.stacked.rows

    @property
    def requests(self) -> tuple[RequestLayout, ...]:
        return self.stacked.requests

    @property
    def units(self) -> torch.Tensor:
        """int64 [blocks of all requests]."""
        return self.stacked.units[self.group]

    @property
    def write_rows(self) -> torch.Tensor | slice:
        return self.stacked.write_rows

    @property
    def write_units(self) -> torch.Tensor:
        """int64 [w]."""
        return self.stacked.write_units[self.group]

    @property
    def write_offsets(self) -> torch.Tensor:
        return self.stacked.write_offsets


class MixedAttention(Protocol):
    """An attention kernel; `reference.mixed_attention` defines what it does.

    `delta` is the share of the processor, 0..1, that begins with recomputation (K1). It shows in
    the time alone; a kernel that does one thing after the other has no use for it.
    """

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        layout: GroupLayout,
        scale: float,
        out_rows: int | None = None,
        delta: float = 0.5,
    ) -> torch.Tensor: ...


def packed_heads(x: torch.Tensor) -> torch.Tensor:
    """Rows [n, heads, head_dim] as kernels take them: they may lie apart (they are cut from one
    QKV tensor); a row's heads may not."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
