"""Who pauses for whom, and who is admitted at whose expense, where requests rotate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ellm_sgl.policies.base import IntArray, SystemState


@dataclass(frozen=True, eq=False)
class Urgency:
    """Levels: those of a higher one are less urgent, and pause first. Nobody pauses for anyone less
    urgent, and whoever is more urgent than some that run is admitted at their expense."""

    running: IntArray
    """int64 [running]."""
    waiting: IntArray
    """int64 [waiting]."""

    @classmethod
    def alike(cls, state: SystemState) -> Urgency:
        """Of requests that are all as urgent."""
        running, waiting = len(state.running), len(state.waiting)
        return cls(np.zeros(running, np.int64), np.zeros(waiting, np.int64))

    def in_line(self, most: int, places: int) -> int:
        """How many of the waiting requests may be admitted together: those as urgent as the first.

        Args:
            most: so many may if they are not more urgent than all that run;
            places: otherwise.
        """
        if not len(self.waiting):
            return 0
        first = int(self.waiting[0])
        alike = int(np.logical_and.accumulate(self.waiting == first).sum())
        return max(min(places if self.overtakes(first) else most, alike), 0)

    def overtakes(self, level: int) -> bool:
        """Whether some that run are less urgent."""
        return level < int(self.running.max(initial=0))
