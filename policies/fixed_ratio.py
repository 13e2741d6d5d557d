"""The same uncached ratio for every request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ellm_sgl.config.ranges import SHARE, shown
from ellm_sgl.latency import StepWork
from ellm_sgl.policies.base import Batch, Policy, Ratios, SystemState, WorkSplit
from ellm_sgl.policies.work_split import CONFIGURATIONS, plan_split


class FixedRatio(Policy):
    """Every request keeps (1 - r) of its tokens cached; all that wait are admitted, as the
    server's own admission accounting allows.

    Args:
        ratio: r, at least 0 and below 1. 0 caches all that fits.
        layers: (l1, l2), the split between fetched and recomputed layers; planned for each
            step unless given.
    """

    def __init__(self, ratio: float = 0.0, layers: Sequence[int] | None = None) -> None:
        SHARE.check("ratio", ratio)
        if layers is not None and tuple(layers) not in CONFIGURATIONS:
            raise ValueError(f"layers must be one of {CONFIGURATIONS}, got {shown(layers)}")
        self._ratio = ratio
        self._layers = layers

    def idle_without_pressure(self) -> bool:
        return self._ratio == 0.0

    def never_waits(self) -> bool:
        return True

    def batch(self, state: SystemState) -> Batch:
        return Batch(admit=tuple(range(len(state.waiting))))

    def ratio(self, state: SystemState, batch: Batch) -> Ratios:
        return Ratios(
            running=np.full(len(state.running), self._ratio),
            admitted=np.full(len(batch.admit), self._ratio),
        )

    def split(self, state: SystemState, plan: StepWork) -> WorkSplit:
        planned = plan_split(state, plan)
        if self._layers is None:
            return planned
        return WorkSplit(self._layers[0], self._layers[1], planned.delta)
