"""What a decision carries from the rank that asks to all others."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from ellm_sgl.engine import Controller, ServerLimits, StepLog
from ellm_sgl.latency import RooflineLatencyModel
from ellm_sgl.policies import Batch, Fcfs, FixedRatio, Policy, Stock, SystemState
from ellm_sgl.policies.testing.generate import make_state, requests
from tests.latency.machines import GPU, TINY

STATE = make_state(requests([100, 200]), requests([]), device_tokens=1000)


class Pauses(Stock):
    """Promises to keep all, and lets a request pause."""

    def batch(self, state: SystemState) -> Batch:
        return Batch(admit=(), pause=(0,))


class Raises(Stock):
    def idle_without_pressure(self) -> bool:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("make", "stands"),
    [
        (Stock, True),
        (Fcfs, True),
        (lambda: FixedRatio(0.0), True),
        (lambda: FixedRatio(0.25), False),
        (Pauses, False),
        (Raises, False),
    ],
)
def test_a_decision_settles_where_all_is_kept_and_the_policy_promises_to_leave_it_so(
    make: Callable[[], Policy], stands: bool
) -> None:
    limits = ServerLimits(TINY, GPU, 8, math.inf, 4096)
    loop = Controller(make(), 30.0, StepLog(RooflineLatencyModel(TINY, GPU)), limits)
    assert loop.decide(STATE).stands == stands
    loop.guard.close()
