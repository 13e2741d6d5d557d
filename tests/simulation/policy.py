"""The policy of a life: it answers what the events say, or fails."""

from __future__ import annotations

import numpy as np

from ellm_sgl.latency import StepWork
from ellm_sgl.policies import Batch, Policy, Ratios, SystemState, WorkSplit
from tests.simulation.events import Step

CLIMB = 0.999
"""The largest ratio there is: all that may be given up."""


class Scripted(Policy):
    """Answers by `step`. Requests go by their priority, which is their name."""

    def __init__(self) -> None:
        self.step = Step()
        self.failure: str | None = None
        """How the next answer fails."""

    def batch(self, state: SystemState) -> Batch:
        running, waiting = state.running.priority, state.waiting.priority
        pause = np.flatnonzero(np.isin(running, self.step.pause)).tolist()
        if self.failure == "stall" and len(running):
            return Batch(admit=(), pause=tuple(range(len(running))))
        if len(pause) == len(running):
            pause = pause[1:]
        admit = list(range(len(waiting)))
        if self.step.reverse:
            admit.reverse()
        if self.step.admit is not None:
            idle = len(running) == 0 and len(state.prefilling) == 0
            admit = admit[: max(self.step.admit, idle)]
        return Batch(tuple(admit), tuple(pause))

    def ratio(self, state: SystemState, batch: Batch) -> Ratios:
        failure, self.failure = self.failure, None
        if failure == "raises":
            raise RuntimeError("the policy fails")
        running = np.full(len(state.running), min(self.step.ratio, CLIMB))
        running[list(batch.pause)] = min(self.step.resting, CLIMB)
        if failure == "nan":
            running += np.nan
        if failure == "range":
            running += 1.0
        return Ratios(running, np.full(len(batch.admit), min(self.step.admitted, 0.95)))

    def split(self, state: SystemState, plan: StepWork) -> WorkSplit:
        recompute = min(self.step.recompute, 2)
        return WorkSplit(1, recompute, 512)
