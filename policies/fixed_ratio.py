"""The same uncached ratio for every running request."""

from __future__ import annotations

from collections.abc import Sequence

from ellm_sgl.policies.base import Policy, SystemState


class FixedRatio(Policy):
    """Every request keeps (1 - r) of its tokens cached. r = 0 caches all that fits.

    Args:
        ratio: r, at least 0 and below 1.
    """

    def __init__(self, ratio: float = 0.0) -> None:
        if not 0.0 <= ratio < 1.0:
            raise ValueError(f"ratio must be at least 0 and below 1, got {ratio}")
        self._ratio = ratio

    def ratio(self, state: SystemState) -> Sequence[float]:
        return [self._ratio] * len(state.requests)

    def joining_ratio(self, state: SystemState) -> float:
        return self._ratio
