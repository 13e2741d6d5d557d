"""A stack of free ids."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class FreeList:
    """Ids 1..capacity; the last given back is the first taken, so memory stays warm."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._stack = np.arange(capacity, 0, -1, dtype=np.int32)
        self._count = capacity

    def __len__(self) -> int:
        return self._count

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """The free ids, in no particular order (a view)."""
        return self._stack[: self._count]

    def take(self, count: int) -> npt.NDArray[np.int32]:
        """Take `count` ids; the caller has made sure that there are as many."""
        assert 0 <= count <= self._count
        self._count -= count
        return self._stack[self._count : self._count + count][::-1].copy()

    def give(self, ids: npt.NDArray[np.int32]) -> None:
        """Give ids back. Giving back what was not taken corrupts the list (see
        `PageTable.check_integrity`)."""
        self._stack[self._count : self._count + len(ids)] = ids
        self._count += len(ids)
