"""What an attention kernel is told about the rows of one step.

These are named tuples: made in every step, per request or per group, in a fourth of a frozen
dataclass's time.
"""

from __future__ import annotations

from typing import NamedTuple

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


class AlikeGroups(NamedTuple):
    """All layer groups of a step, where they differ in nothing but units."""

    units: torch.Tensor
    """int64 [groups, blocks of all requests]: `GroupLayout.units` of each."""
    write_units: torch.Tensor
    """int64 [groups, w]: `GroupLayout.write_units` of each."""

    def layouts(
        self, rows: int, requests: tuple[RequestLayout, ...], write_offsets: torch.Tensor
    ) -> tuple[GroupLayout, ...]:
        """Each group's layout, in order; all rows are written."""
        every = slice(0, rows)
        return tuple(
            GroupLayout(rows, requests, units, every, targets, write_offsets, self, group)
            for group, (units, targets) in enumerate(
                zip(self.units.unbind(), self.write_units.unbind(), strict=True)
            )
        )


class GroupLayout(NamedTuple):
    """All requests of a step in the layers of one layer group.

    Rows are ordered: the new rows of every request, then the span rows. A kernel first writes
    k and v of `write_rows` to the pool, then attends: each row to all tokens of its request up
    to its own position, taking k and v of span rows from the step and the rest from the pool.
    """

    rows: int
    """Rows alive in these layers."""
    requests: tuple[RequestLayout, ...]
    units: torch.Tensor
    """int64 [blocks of all requests]: unit of each block; 0 where there is none."""
    write_rows: torch.Tensor | slice
    """int64 [w], or a slice when they are consecutive: rows whose k and v go to the pool."""
    write_units: torch.Tensor
    """int64 [w]."""
    write_offsets: torch.Tensor
    """int64 [w]: place in the unit, 0..block_tokens-1."""
    alike: AlikeGroups | None = None
    """Tells a kernel what it can prepare for all groups at once, from any one's layout; None where
    they are not alike. A changed copy of a layout has none."""
    group: int = 0
    """This group's row of `alike`."""
