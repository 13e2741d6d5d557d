"""Whether the pool is about to have more room: what a prompt has in the KV store is then read in a
moment, and not computed meanwhile."""

from __future__ import annotations

import time
from typing import Any

from ellm_sgl.memory import Outcome
from ellm_sgl.sglang.context import context_of
from ellm_sgl.sglang.ranks import of_rank_0

PATIENCE_S = 1.0
"""For so long without any more room it counts as growing."""
PAUSE_S = 0.002
"""Between two looks of who has nothing else to do."""


class Growing:
    """Asked by every rank in the same turn, and answered alike on all.

    Args:
        ours: the `EllmScheduler`.
    """

    def __init__(self, ours: Any) -> None:
        self._ours = ours
        self._limit_units: int | None = None
        """Since when it is as large as this; None: it does not grow."""
        self._since_s = 0.0

    def soon(self) -> bool:
        """Whether more room is coming, or is about to be asked for."""
        return of_rank_0(self._ours.scheduler, self._soon)

    def over(self) -> None:
        """Nobody waits: who comes next may wait as long again."""
        self._limit_units = None

    def _soon(self) -> bool:
        ours = self._ours
        resizer, sizing = ours.resizer, context_of(ours.scheduler).sizing
        limit = resizer.limit_units
        grows = resizer.outcome is Outcome.UNDER_WAY and resizer.coming_units > limit
        if sizing is not None and not grows:
            grows = sizing.wants_more(resizer, ours.iteration.elastic.table.shape)
        if not grows:
            self._limit_units = None
            return False
        if self._limit_units != limit:
            self._limit_units, self._since_s = limit, time.monotonic()
        if time.monotonic() >= self._since_s + PATIENCE_S:
            return False
        if not ours.scheduler.running_batch.reqs:
            time.sleep(PAUSE_S)
        return True
