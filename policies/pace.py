"""How much longer decoding takes than its steps are predicted to, prompts between them included."""

from __future__ import annotations

from collections import deque

import numpy as np

from ellm_sgl.policies.base import StepReport

SLO_SHARE = 0.95
"""Of an SLO on the time per token, that is planned with: a request may meet slower steps than the
mean one."""
WINDOW_STEPS, WINDOWS = 32, 32
FEWEST_WINDOWS = 4
QUANTILE = 0.8


class Pace:
    """Time from token to token over the predicted time of a decode step, as a quantile of means
    over `WINDOW_STEPS`: an SLO on the mean time per token is missed by a slow spell, not by a slow
    step."""

    def __init__(self) -> None:
        self.ratio = 1.0
        self._ratios: deque[float] = deque(maxlen=WINDOWS)
        self._last: StepReport | None = None
        self._begin()

    def note(self, report: StepReport | None) -> None:
        """The last measured step; the same one may be told several times."""
        if report is None or report is self._last:
            return
        self._last = report
        self._spent_s += report.seconds
        if not report.work.decode_rows:
            return
        self._predicted_s += report.predicted_s
        self._steps += 1
        if self._steps == WINDOW_STEPS:
            self._ratios.append(self._spent_s / self._predicted_s)
            if len(self._ratios) >= FEWEST_WINDOWS:
                self.ratio = float(np.quantile(self._ratios, QUANTILE))
            self._begin()

    def _begin(self) -> None:
        self._spent_s = self._predicted_s = 0.0
        self._steps = 0
