"""An arena that tells of whoever touches what is not committed."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import torch

SPOILED = 0xFF
"""What bytes without memory hold: no number in any type of KV."""


def small_steps(nbytes: int) -> Any:
    """Patches what a step of a resizer does at once, and what is committed at once."""
    names = ("STEP_BYTES", "DECOMMIT_BYTES", "COMMIT_BYTES")
    sizes: dict[str, Any] = dict.fromkeys(names, nbytes)
    return patch.multiple("ellm_sgl.memory.resize", **sizes)


class FakeArena:
    """Host memory, in small granules, that is spoiled where an arena has none.

    `room`: bytes that the machine has; to commit beyond, but lazily, is a MemoryError.
    """

    def __init__(self, nbytes: int, granule: int = 64) -> None:
        self.nbytes, self.granule = nbytes, granule
        self.memory = memoryview(bytearray(nbytes))
        self.bytes = np.frombuffer(self.memory, np.uint8)
        self.bytes[:] = SPOILED
        self.committed = 0
        self.room = nbytes

    def tensor(self) -> torch.Tensor:
        return torch.frombuffer(self.memory, dtype=torch.uint8)

    def commit(self, low: int, high: int, lazily: bool = False) -> None:
        self._expect(low == self.committed < high, f"commit of [{low}, {high})")
        if high > self.room and not lazily:
            raise MemoryError(f"{high - low} bytes: no room in this test")
        self.check()
        self.committed = high

    def decommit(self, low: int, high: int) -> None:
        self._expect(low < high == self.committed, f"decommit of [{low}, {high})")
        self.check()
        self.bytes[low:high] = SPOILED
        self.committed = low

    def check(self) -> None:
        """Nobody has written to what is not committed."""
        touched = np.flatnonzero(self.bytes[self.committed :] != SPOILED)
        assert not len(touched), f"byte {self.committed + touched[0]} was written to"

    def _expect(self, holds: bool, what: str) -> None:
        whole = self.nbytes, *range(0, self.nbytes, self.granule)
        assert holds and self.committed in whole, f"{what}, {self.committed} are committed"
