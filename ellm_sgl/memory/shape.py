"""The vocabulary of the pool: token blocks, layer groups and units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
"""Ids and counts of blocks and units."""

NO_BLOCKS: Final[IntArray] = np.empty(0, np.int32)

NONE: Final = -1
"""Unit id of a (block, group) that has no unit there."""


@dataclass(frozen=True)
class PoolShape:
    """How tokens and layers are cut into units.

    A token block is `block_tokens` consecutive tokens of one request; a layer group is
    `layer_group` consecutive layers (the last one may be shorter); a unit is the KV of one
    token block for one layer group.
    """

    num_layers: int
    layer_group: int
    block_tokens: int

    def __post_init__(self) -> None:
        for name in ("num_layers", "layer_group", "block_tokens"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    @property
    def num_groups(self) -> int:
        return -(-self.num_layers // self.layer_group)

    def group_of(self, layer: int) -> int:
        """Layer group of `layer`."""
        return layer // self.layer_group

    def ends_group(self, layer: int) -> bool:
        """Whether `layer` is the last of its group."""
        return layer == self.num_layers - 1 or (layer + 1) % self.layer_group == 0

    def tokens_in(self, units: int) -> int:
        """Tokens, whole blocks, whose KV so many units hold."""
        return units // self.num_groups * self.block_tokens

    def blocks_for(self, tokens: int) -> int:
        """Token blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_tokens)


@dataclass(frozen=True)
class PoolStatistics:
    """Occupancy of the pool. All figures are instantaneous counts, none is an estimate."""

    units_committed: int
    """Units that have memory."""
    units_total: int
    """Units that may be in use (the current limit)."""
    units_free: int
    """Units that can be given out now; never negative."""
    blocks_total: int
    blocks_free: int
    missing_units: int
    """(block, group) pairs of allocated blocks that have no unit on the device."""
    host_units_total: int
    host_units_free: int
    sequences: int
    mapped_tokens: int
    """Tokens of all sequences; a shared prefix counts once per sequence."""
    uncached_tokens: int
    """Mapped tokens in blocks that lack at least one unit."""
    cached_ratio_mean: float
    """Share of its tokens that a sequence has cached, 0..1, in the mean; 1 without sequences."""
    occupancy: float
    """Units in use / units total, 0..1; above 1 while a lowered limit is exceeded."""
    fragmentation: float
    """Share of token places in the mapped blocks that hold no token (tail blocks), 0..1."""


def read_only(array: IntArray) -> IntArray:
    """A view of `array` that its readers cannot write to."""
    view = array.view()
    view.flags.writeable = False
    return view
