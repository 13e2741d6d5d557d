"""How a step restores what is missing: which layers of which blocks it computes again, and which
units it fetches from the host, and where to.

```
 a missing block    group 0    group 1    group 2    group 3
                    recompute  recompute  fetch      fetch       depth 2: its rows go through
                    └ rows of the step ┘  └ streamed from host ┘ groups 0 and 1, no further
```

Of the lowest groups the host may keep hidden states instead of KV: these are fetched like units
of KV, and projected to KV as they arrive (`ellm_sgl.step.hidden`).

Fetched units go to the block's own unit if it has been given one again, otherwise to a unit
borrowed for the step. Borrowed units form a ring over the layer groups: with `slots` groups in
flight, group g uses those that group g - slots has finished with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ellm_sgl.memory import NONE, PageTable
from ellm_sgl.memory.shape import IntArray

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class GroupTransfer:
    """What the layers of one group need from the host."""

    sources: torch.Tensor
    """int64 [n]: host units, of KV or, with `positions`, of hidden states.
    All three are on the host."""
    targets: torch.Tensor
    """int64 [n]: device units."""
    positions: torch.Tensor | None = None
    """int64 [n, block_tokens]: of the tokens whose hidden states are to be projected."""

    @staticmethod
    def of(sources: IntArray, targets: IntArray) -> GroupTransfer:
        return GroupTransfer(_index(sources), _index(targets))


@dataclass(frozen=True)
class Missing:
    """Blocks that lacked device units when the step was planned, before any was placed."""

    blocks: IntArray
    """[n], ascending, each once."""
    groups: BoolArray
    """[n, groups]: which units lacked."""

    @staticmethod
    def of(table: PageTable, seq_ids: Sequence[int]) -> Missing:
        blocks = table.missing_blocks(seq_ids)
        return Missing(blocks, np.asarray(table.units[blocks] == NONE))


@dataclass(frozen=True)
class Restoration:
    """The restoration of one step."""

    blocks: IntArray
    """[n], ascending: the blocks restored."""
    depths: IntArray
    """[n]: groups, from the lowest, that each block's rows go through; 0 is none."""
    staged: IntArray
    """[n, groups]: borrowed device unit from which a group reads the block, or `NONE`."""
    transfers: tuple[GroupTransfer, ...]
    """One per layer group; none at all if nothing is fetched."""
    borrowed: IntArray
    """Device units to return after the step."""

    @property
    def fetched_units(self) -> int:
        return sum(len(t.sources) for t in self.transfers)

    @property
    def projected_units(self) -> int:
        """Those of the fetched units that come as hidden states."""
        return sum(len(t.sources) for t in self.transfers if t.positions is not None)

    def depths_of(self, blocks: IntArray) -> IntArray:
        """The depth of each of these blocks; 0 for those not restored."""
        return self._look_up(blocks, self.depths, 0)

    def covers(self, blocks: IntArray) -> IntArray:
        """1 for each of these blocks that is restored, 0 for the others."""
        return self._look_up(blocks, np.ones(len(self.blocks), np.int32), 0)

    def staged_units(self, blocks: IntArray) -> IntArray:
        """[blocks, groups]: borrowed unit of each of these blocks, or `NONE`."""
        return self._look_up(blocks, self.staged, NONE)

    def _look_up(self, blocks: IntArray, values: IntArray, other: int) -> IntArray:
        found = np.full((len(blocks), *values.shape[1:]), other, np.int32)
        if len(self.blocks):
            at = np.minimum(np.searchsorted(self.blocks, blocks), len(self.blocks) - 1)
            known = self.blocks[at] == blocks
            found[known] = values[at[known]]
        return found


def plan_restoration(
    table: PageTable, missing: Missing, recompute_share: float, slots: int
) -> Restoration:
    """Choose, per missing block, the layers to compute again; fetch the rest. Borrows units.

    Args:
        table: with the blocks placed for good that this step is to fill.
        missing: as before these were placed.
        recompute_share: φ, the share of the layers to compute again where the host has a copy;
            without one, blocks are computed again as far as needed.
        slots: layer groups in flight.
    """
    groups = np.arange(table.shape.num_groups)
    on_host = np.asarray(table.host.units[missing.blocks] != NONE)
    recompute = missing.groups & ~on_host
    recompute |= missing.groups & (groups < round(recompute_share * table.shape.num_groups))
    fetch = missing.groups & (groups >= _depth(recompute)[:, None])

    unplaced = fetch & np.asarray(table.units[missing.blocks] == NONE)
    per_slot = max(table.free_units, 0) // slots
    # Room goes first to those of which all is fetched: without it they were rows of the step.
    order = np.argsort(recompute.any(axis=1), kind="stable")
    no_room = np.zeros(len(order), np.bool_)
    no_room[order] = (np.cumsum(unplaced[order], axis=0) > per_slot).any(axis=1)
    recompute |= missing.groups & no_room[:, None]
    depths = _depth(recompute)
    fetch = missing.groups & (groups >= depths[:, None])
    unplaced &= fetch

    staged = np.full(fetch.shape, NONE, np.int32)
    borrowed = table.borrow_units(slots * int(unplaced.sum(axis=0).max(initial=0)))
    for group, ring in zip(groups, _ring(borrowed, slots, len(groups)), strict=True):
        rows = np.flatnonzero(unplaced[:, group])
        staged[rows, group] = ring[: len(rows)]
    targets = np.where(staged != NONE, staged, table.units[missing.blocks])
    return Restoration(
        blocks=missing.blocks,
        depths=depths,
        staged=staged,
        transfers=_transfers(table, missing.blocks, targets, fetch),
        borrowed=borrowed,
    )


def _depth(recompute: BoolArray) -> IntArray:
    """1 + the highest group to recompute, 0 where there is none: the layers below it have to be
    gone through as well."""
    highest = recompute.shape[1] - np.argmax(recompute[:, ::-1], axis=1)
    return np.where(recompute.any(axis=1), highest, 0).astype(np.int32)


def _ring(borrowed: IntArray, slots: int, groups: int) -> list[IntArray]:
    """The borrowed units of each layer group: `slots` sets in turn."""
    sets = borrowed.reshape(slots, -1)
    return [sets[group % slots] for group in range(groups)]


def _transfers(
    table: PageTable, blocks: IntArray, targets: IntArray, fetch: BoolArray
) -> tuple[GroupTransfer, ...]:
    if not fetch.any():
        return ()
    sources = table.host.units[blocks]
    places = np.arange(table.shape.block_tokens, dtype=np.int32)
    positions = table.starts_of(blocks)[:, None] + places
    return tuple(
        GroupTransfer(
            _index(sources[wanted, g]),
            _index(targets[wanted, g]),
            _index(positions[wanted]) if g < table.host.hidden_groups else None,
        )
        for g, wanted in enumerate(fetch.T)
    )


def _index(units: IntArray) -> torch.Tensor:
    return torch.from_numpy(units.astype(np.int64))
