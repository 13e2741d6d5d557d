"""The host tier: copies in host memory, so that what left the device can come back.

```
 block 12, group 0:   device unit 3     host NONE     resident, never evicted
 block 31, group 0:   device unit 17    host 8        resident; leaves the device for free
 block 31, group 1:   device NONE       host 9        streamed in when a step needs it
 block  5, group 1:   device NONE       host NONE     recomputed when a step needs it
```

A full block never changes, so one copy serves for the block's whole life. Only numbers live
here; the copies are in a `KVPool` of the same shape on the host.

Of the lowest `hidden_groups` layer groups the host keeps hidden states instead of KV, in a
`HiddenPool`. KV is copied when a block leaves the device; hidden states exist only while rows go
through the layers, so they are captured then. A block being filled takes its room with its first
token and counts as a copy once it is full:

```
 begin_hidden ──▶ filling[block]: room for all hidden groups ──▶ finish_hidden ──▶ units[block, :H]
```
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ellm_sgl.memory.ids import FreeList
from ellm_sgl.memory.shape import NONE, IntArray, read_only

_AT_ONCE = 64
"""Blocks that are looked through for copies to drop."""

Has = Callable[[IntArray], npt.NDArray[np.bool_]]
"""Of each of these blocks, whether it has what is short."""


class HostTier:
    """Which (block, group) has a copy in which host unit.

    Args:
        num_blocks: logical blocks of the page table.
        num_groups: layer groups.
        num_units: host units, of both kinds; 0 is no host tier.
        hidden_groups: H, the groups whose hidden states are kept: 0 to H-1.
    """

    def __init__(
        self, num_blocks: int, num_groups: int, num_units: int, hidden_groups: int = 0
    ) -> None:
        self.hidden_groups = hidden_groups
        self._units: IntArray = np.full((num_blocks + 1, num_groups), NONE, np.int32)
        self.units: IntArray = read_only(self._units)
        """Of a hidden group, units of the `HiddenPool`; of the others, of the `KVPool`."""
        self.filling: IntArray = np.full(num_blocks + 1, NONE, np.int32)
        """Slot of the `HiddenPool` that each block's hidden states are captured in."""
        # A full host is asked at each eviction: looking through all of it takes too long.
        self._suspects: npt.NDArray[np.bool_] = np.zeros(num_blocks + 1, np.bool_)
        """Blocks of which KV may be on the device and here; of no others is it."""
        self.make_way: Callable[[Has, Callable[[], bool]], None] = lambda has, enough: None
        """Has blocks released of which only the host `has` something, and which nobody uses, until
        `enough`."""
        slots = num_units // num_groups if hidden_groups else 0
        self._slots = FreeList(slots)
        self._free = FreeList(num_units - slots * hidden_groups)

    @property
    def kv_units(self) -> int:
        """Those of `num_units` that hold KV."""
        return self._free.capacity

    @property
    def num_units(self) -> int:
        return self._free.capacity + self._slots.capacity * self.hidden_groups

    @property
    def free_units(self) -> int:
        return len(self._free) + len(self._slots) * self.hidden_groups

    def spare_units(self, device: IntArray) -> int:
        """Units for KV: free ones, and those of copies of what is on the device, too.

        Args:
            device: the page table's `units`.
        """
        suspects = np.flatnonzero(self._suspects)
        both = self._duplicates(suspects, device)
        self._suspects[suspects[~both.any(axis=1)]] = False
        return len(self._free) + int(np.count_nonzero(both))

    # -- KV ---------------------------------------------------------------------------------

    def keep(self, blocks: IntArray, groups: IntArray, device: IntArray) -> IntArray:
        """Take host units for the KV of (block, group) pairs, as far as there are any.

        When none is free, copies of what is on the device too make way, then those that nobody
        uses.

        Args:
            device: the page table's `units`: device units of every (block, group).

        Returns:
            The groups of the leading pairs that got a unit, to be filled by the caller. Groups
            that have a copy already, and hidden groups, must not be among `groups`.
        """
        if len(groups) > len(self._free):
            self._drop_duplicates(len(groups) - len(self._free), blocks, device)
        if len(groups) > len(self._free):
            self.make_way(self._has_kv, lambda: len(groups) <= len(self._free))
        kept = groups[: len(self._free)]
        self._units[blocks[: len(kept)], kept] = self._free.take(len(kept))
        self._suspects[blocks] = True
        return kept

    def came_back(self, blocks: IntArray | int) -> None:
        """These blocks got device units: what is here of them is on the device, too."""
        self._suspects[blocks] = True

    # -- hidden states ----------------------------------------------------------------------

    def begin_hidden(self, blocks: IntArray) -> None:
        """Take room for the hidden states of these blocks, in order, while there is any: then that
        of copies that nobody uses.

        The caller captures each block's tokens from the first on. Blocks that have room or a copy
        are passed over; `blocks` names each once.
        """
        new = blocks[(self.filling[blocks] == NONE) & (self.units[blocks, 0] == NONE)]
        if len(new) > len(self._slots):
            self.make_way(self._has_slot, lambda: len(new) <= len(self._slots))
        new = new[: len(self._slots)]
        self.filling[new] = self._slots.take(len(new))

    def finish_hidden(self, blocks: IntArray) -> None:
        """These blocks are full and captured as a whole: from now on they are copies."""
        groups = np.arange(self.hidden_groups)
        slots = self.filling[blocks][:, None]
        self._units[blocks, : self.hidden_groups] = slots * self.hidden_groups + groups
        self.filling[blocks] = NONE

    # -- both -------------------------------------------------------------------------------

    def drop(self, blocks: IntArray) -> None:
        """Forget the copies of these blocks, also those being captured."""
        units = self.units[blocks, self.hidden_groups :]
        self._free.give(units[units != NONE])
        slots = self._slots_of(blocks)
        self._slots.give(slots[slots != NONE])
        self._units[blocks] = NONE
        self.filling[blocks] = NONE

    def clear(self) -> None:
        self._units[:] = NONE
        self.filling[:] = NONE
        self._suspects[:] = False
        self._free = FreeList(self._free.capacity)
        self._slots = FreeList(self._slots.capacity)

    def contradiction(self, allocated: npt.NDArray[np.bool_], device: IntArray) -> str | None:
        """What is wrong, if anything: units lost or owned twice, copies of free blocks.

        Args:
            device: the page table's `units`.
        """
        hidden, kv = np.split(self.units, [self.hidden_groups], axis=1)
        if not _all_there(kv[kv != NONE], self._free):
            return "host units: some unit is lost, or owned more than once"
        slots = self._slots_of(np.arange(len(self.units), dtype=np.int32))
        if not _all_there(slots[slots != NONE], self._slots):
            return "host units: some room for hidden states is lost, or owned more than once"
        expected = hidden[:, :1] + np.arange(self.hidden_groups)
        if np.any(np.where(hidden[:, :1] == NONE, NONE, expected) != hidden):
            return "host units: a block's hidden states are kept for some groups only"
        if np.any(self.units[~allocated] != NONE) or np.any(self.filling[~allocated] != NONE):
            return "host units: a free block still has copies"
        if np.any(self._duplicates(np.flatnonzero(~self._suspects), device)):
            return "host units: copies of what is on the device would not be found"
        return None

    def _has_kv(self, blocks: IntArray) -> npt.NDArray[np.bool_]:
        has: npt.NDArray[np.bool_] = (self.units[blocks, self.hidden_groups :] != NONE).any(axis=1)
        return has

    def _has_slot(self, blocks: IntArray) -> npt.NDArray[np.bool_]:
        return np.asarray(self._slots_of(blocks) != NONE)

    def _slots_of(self, blocks: IntArray) -> IntArray:
        """The slot in which a block's hidden states are, or are being captured."""
        if not self.hidden_groups:
            return self.filling[blocks]
        kept = self.units[blocks, 0]
        slots: IntArray = np.where(kept == NONE, self.filling[blocks], kept // self.hidden_groups)
        return slots

    def _drop_duplicates(self, count: int, leaving: IntArray, device: IntArray) -> None:
        """Drop so many copies of what is on the device, too; but not of blocks that leave it: soon
        they are all that there is of them."""
        staying = self._suspects.copy()
        staying[leaving] = False
        suspects = np.flatnonzero(staying)
        for first in range(0, len(suspects), _AT_ONCE):
            some = suspects[first : first + _AT_ONCE]
            both = self._duplicates(some, device)
            self._suspects[some[~both.any(axis=1)]] = False
            rows, groups = np.nonzero(both)
            blocks, groups = some[rows[:count]], groups[:count]
            self._free.give(self.units[blocks, groups])
            self._units[blocks, groups] = NONE
            count -= len(blocks)
            if count == 0:
                return

    def _duplicates(self, blocks: npt.NDArray[np.int64], device: IntArray) -> npt.NDArray[np.bool_]:
        """Of each of these blocks and each group, whether its KV is here and on the device."""
        both: npt.NDArray[np.bool_] = (self.units[blocks] != NONE) & (device[blocks] != NONE)
        both[:, : self.hidden_groups] = False  # what is dropped could not be captured again
        return both


def _all_there(owned: IntArray, free: FreeList) -> bool:
    accounted = np.sort(np.concatenate([owned, free.ids]))
    return len(free.ids) == len(free) and np.array_equal(accounted, np.arange(1, free.capacity + 1))
