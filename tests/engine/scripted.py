"""A policy that answers as a test tells it, and the guard that asks it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ellm_sgl.engine.last_word import Answer
from ellm_sgl.engine.policy_guard import PolicyGuard
from ellm_sgl.latency import StepWork
from ellm_sgl.policies import Batch, FixedRatio, Policy, Ratios, SystemState, WorkSplit
from ellm_sgl.policies.testing.generate import make_state, requests

STATE = make_state(requests([100, 200]), requests([50, 60, 70]), device_tokens=1000)
LONG_S = 30.0


class Scripted(FixedRatio):
    """Fixed-ratio but for one answer, which is what the script returns or raises."""

    def __init__(
        self,
        batch: Callable[[], Batch] | None = None,
        ratio: Callable[[], Ratios] | None = None,
        threads: Callable[[], WorkSplit] | None = None,
    ) -> None:
        super().__init__(0.25)
        self.scripts = (batch, ratio, threads)
        self.plans: list[StepWork] = []

    def batch(self, state: SystemState) -> Batch:
        script = self.scripts[0]
        return script() if script else super().batch(state)

    def ratio(self, state: SystemState, batch: Batch) -> Ratios:
        script = self.scripts[1]
        return script() if script else super().ratio(state, batch)

    def split(self, state: SystemState, plan: StepWork) -> WorkSplit:
        self.plans.append(plan)
        script = self.scripts[2]
        return script() if script else super().split(state, plan)


class Prompt(Scripted):
    """Promises never to wait."""

    def never_waits(self) -> bool:
        return True


@contextmanager
def asking(policy: Policy, budget_s: float = LONG_S) -> Iterator[PolicyGuard]:
    safe = PolicyGuard(policy, budget_s)
    yield safe
    safe.close()


def is_safe(answer: Answer) -> bool:
    return (
        answer.batch == Batch(admit=(0, 1, 2))
        and not answer.ratios.running.any()
        and not answer.ratios.admitted.any()
        and len(answer.ratios.running) == 2
        and len(answer.ratios.admitted) == 3
    )


def raising(error: Exception) -> Callable[[], Batch]:
    def script() -> Batch:
        raise error

    return script


def hanging(release: threading.Event) -> Callable[[], Batch]:
    def script() -> Batch:
        release.wait(LONG_S)
        return Batch(admit=())

    return script
