"""Measures steps: what each was to do, how long it took, and what the model had expected."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable

from ellm_sgl.engine.pace import Pace
from ellm_sgl.latency import FetchingLatencyModel, LatencyModel, StepWork
from ellm_sgl.policies import StepReport

KEPT_STEPS = 2000
"""Reports kept for `GET /ellm/steps`."""


class PhaseChanges:
    """Notes where steps turn from prompts to decoding, or back; a pause changes nothing."""

    def __init__(self) -> None:
        self._prefilled: bool | None = None

    def of(self, prefills: bool) -> int:
        """`StepWork.phase_changes` of the next step, which computes prompts or does not; 0 for the
        very first."""
        before, self._prefilled = self._prefilled, prefills
        return int(before is not None and before != prefills)


class StepLog:
    """Times steps from start to start, so that scheduling between them counts too.

    Args:
        model: predicts each step and learns from it.
        clock: monotonic seconds.
    """

    def __init__(self, model: LatencyModel, clock: Callable[[], float] = time.perf_counter) -> None:
        self.model = model
        self.reports: deque[StepReport] = deque(maxlen=KEPT_STEPS)
        self.last_decode: StepReport | None = None
        """Of those in which no prompt was computed."""
        self.steps = 0
        self.pace = Pace()
        self.shown: FetchingLatencyModel | None = None
        """What policies were last given to predict steps with; None: `model`."""
        self._clock = clock
        self._ended_busy_s = 0.0
        """Of the steps that have ended."""
        self._started: tuple[StepWork, float, float, float, int] | None = None
        self._stall_s = 0.0
        self._phase_changes = PhaseChanges()

    @property
    def last(self) -> StepReport | None:
        return self.reports[-1] if self.reports else None

    @property
    def in_flight(self) -> StepWork | None:
        """Work of the step that has begun and is not among the reports."""
        return None if self._started is None else self._started[0]

    @property
    def busy_s(self) -> float:
        """Seconds from the starts of steps to those of the next, the one in flight included. While
        nothing runs it stands still."""
        if self._started is None:
            return self._ended_busy_s
        return self._ended_busy_s + self._clock() - self._started[1]

    def recent(self, seconds: float) -> list[StepReport]:
        """Steps that ended in the last `seconds`, the latest first; while one is in flight, in
        those before it, and the last one in any case."""
        found: list[StepReport] = []
        since = (self._clock() if self._started is None else self._started[1]) - seconds
        for report in reversed(self.reports):
            alone = self._started is not None and not found
            if report.ended_s < since and not alone:
                break
            found.append(report)
        return found

    def start(self, work: StepWork, steps: int = 1) -> None:
        """A step begins, or so many alike; the one before, if there was no pause between, has
        ended."""
        now = self._clock()
        self._finish(now)
        if phase_changes := self._phase_changes.of(bool(work.prefill_rows)):
            work = dataclasses.replace(work, phase_changes=phase_changes)
        foreseen = self._foreseen_s(work)
        predicted = float(self.model.step_seconds(work))  # last: it is the next to be observed
        self._started = (work, now, predicted, min(foreseen, predicted), steps)

    def _foreseen_s(self, work: StepWork) -> float:
        """What the step takes as policies were shown it: they foresee what the host had of what is
        missing, and that it keeps what is evicted then, but not what others took of its room since,
        nor KV that was never there. inf where the model sees the same."""
        if self.shown is None or not work.restored_tokens:
            return math.inf
        return float(self.shown.step_seconds(work))

    def stalled(self, seconds: float) -> None:
        """The step in flight has waited so long for a transfer."""
        self._stall_s += seconds

    def idle(self) -> None:
        """Nothing runs: the time until the next step is nobody's."""
        self._finish(self._clock())

    def _finish(self, now: float) -> None:
        if self._started is None:
            return
        work, began, predicted, foreseen, steps = self._started
        report = StepReport(work, (now - began) / steps, predicted, self._stall_s / steps, now)
        self._started, self._stall_s = None, 0.0
        self._ended_busy_s += now - began
        self.reports.append(report)
        if work.decode_rows and not work.prefill_rows:
            self.last_decode = report
        self.pace.note(work, now - began, foreseen, steps)
        self.steps += steps
        # Waiting for the link says nothing about how long reading and computing take.
        self.model.observe(work, report.computing_s)
