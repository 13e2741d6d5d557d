"""How much longer decode steps take than they are predicted to."""

from __future__ import annotations

from collections import deque

import numpy as np

from ellm_sgl.latency import StepWork

WINDOW_STEPS, WINDOWS = 64, 16
FEWEST_WINDOWS = 2
QUANTILE = 0.8
CLIP = 8.0
"""A step that takes longer counts as so many times what was predicted: the machine stood still."""


class Pace:
    """Time of decode steps over what was predicted, as a quantile of means over `WINDOW_STEPS`: an
    SLO on the mean time per token is missed by a slow spell, not by a slow step."""

    def __init__(self) -> None:
        self.ratio = 1.0
        self._ratios: deque[float] = deque(maxlen=WINDOWS)
        self._begin()

    def note(self, work: StepWork, seconds: float, predicted_s: float, steps: int = 1) -> None:
        """So many equal steps took so long; each was predicted to take `predicted_s`."""
        if not work.decode_rows or work.prefill_rows:
            return
        self._spent_s += min(seconds, CLIP * predicted_s * steps)
        self._predicted_s += predicted_s * steps
        self._steps += steps
        if self._steps >= WINDOW_STEPS:
            self._ratios.append(self._spent_s / self._predicted_s)
            if len(self._ratios) >= FEWEST_WINDOWS:
                self.ratio = float(np.quantile(self._ratios, QUANTILE))
            self._begin()

    def _begin(self) -> None:
        self._spent_s = self._predicted_s = 0.0
        self._steps = 0
