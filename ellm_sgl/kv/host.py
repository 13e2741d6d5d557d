"""The host tier: copies of units in host memory, so that what left the device can come back.

```
 block 12, group 0:   device unit 3     host NONE     resident, never evicted
 block 31, group 0:   device unit 17    host 8        resident; leaves the device for free
 block 31, group 1:   device NONE       host 9        streamed in when a step needs it
 block  5, group 1:   device NONE       host NONE     recomputed when a step needs it
```

A full block never changes, so one copy serves for the block's whole life. Only numbers live
here; the copies are in a `KVPool` of the same shape on the host.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ellm_sgl.kv.free_list import FreeList
from ellm_sgl.kv.shape import NONE, IntArray


class HostTier:
    """Which (block, group) has a copy in which host unit.

    Args:
        num_blocks: logical blocks of the page table.
        num_groups: layer groups.
        num_units: host units; 0 is no host tier.
    """

    def __init__(self, num_blocks: int, num_groups: int, num_units: int) -> None:
        self.units: IntArray = np.full((num_blocks + 1, num_groups), NONE, np.int32)
        self._free = FreeList(num_units)

    @property
    def num_units(self) -> int:
        return self._free.capacity

    @property
    def free_units(self) -> int:
        return len(self._free)

    def keep(self, block: int, groups: IntArray, device: IntArray) -> IntArray:
        """Take host units for `groups` of one block, as far as there are any.

        When none is free, copies of what is on the device too make way.

        Args:
            device: the page table's `units`: device units of every (block, group).

        Returns:
            The leading groups that got a unit, to be filled by the caller. Groups that have a
            copy already must not be among `groups`.
        """
        if len(groups) > len(self._free):
            self._drop_duplicates(len(groups) - len(self._free), device)
        kept = groups[: len(self._free)]
        self.units[block, kept] = self._free.take(len(kept))
        return kept

    def drop(self, blocks: IntArray) -> None:
        """Forget the copies of these blocks."""
        units = self.units[blocks]
        self._free.give(units[units != NONE])
        self.units[blocks] = NONE

    def clear(self) -> None:
        self.units[:] = NONE
        self._free = FreeList(self.num_units)

    def contradiction(self, allocated: npt.NDArray[np.bool_]) -> str | None:
        """What is wrong, if anything: units lost or owned twice, copies of free blocks."""
        owned = self.units[self.units != NONE]
        accounted = np.sort(np.concatenate([owned, self._free.ids]))
        if not np.array_equal(accounted, np.arange(1, self.num_units + 1)):
            return "host units: some unit is lost, or owned more than once"
        if np.any(self.units[~allocated] != NONE):
            return "host units: a free block still has copies"
        return None

    def _drop_duplicates(self, count: int, device: IntArray) -> None:
        blocks, groups = np.nonzero((self.units != NONE) & (device != NONE))
        blocks, groups = blocks[:count], groups[:count]
        self._free.give(self.units[blocks, groups])
        self.units[blocks, groups] = NONE
