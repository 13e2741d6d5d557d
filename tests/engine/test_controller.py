"""What a decision carries from the rank that asks to all others."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable

import numpy as np
import pytest

from ellm_sgl.engine import Controller, ServerLimits, StepLog
from ellm_sgl.engine.decision import FETCH_ALL, Decision
from ellm_sgl.latency import RooflineLatencyModel, StepWork
from ellm_sgl.policies import Batch, Fcfs, FixedRatio, Policy, Stock, SystemState, WorkSplit
from ellm_sgl.policies.pausing.limits import LINK_SHARE
from ellm_sgl.policies.testing.generate import make_state, requests
from tests.latency.machines import GPU, TINY

STATE = make_state(requests([100, 200]), requests([]), device_tokens=1000)


class Pauses(Stock):
    """Promises to keep all, and lets a request pause."""

    def batch(self, state: SystemState) -> Batch:
        return Batch(admit=(), pause=(0,))


class Numpy(Stock):
    def split(self, state: SystemState, plan: StepWork) -> WorkSplit:
        one, half = np.int64(1), np.int64(512)
        # Not what is annotated, but what policies that reckon with arrays have, and may answer.
        return WorkSplit(one, one, half)  # type: ignore[arg-type]


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
    assert decided(make()).stands == stands


def test_a_split_of_numpys_integers_can_be_told_in_json() -> None:
    split = decided(Numpy()).split
    assert json.loads(json.dumps(dataclasses.asdict(split))) == {
        "swap_layers": 1, "recompute_layers": 1, "delta": 512,
    }  # fmt: skip


def test_without_pauses_who_would_have_paused_keeps_what_is_cached() -> None:
    decision = Decision((), frozenset({1}), (0.2, 0.9, 0.3), (), FETCH_ALL, 0.0, stands=False)
    kept = decision.without_pauses()
    assert (kept.pause, kept.ratios) == (frozenset(), (0.2, 0.0, 0.3))


def decided(policy: Policy) -> Decision:
    limits = ServerLimits(TINY, GPU, 8, math.inf, 4096)
    loop = Controller(policy, 30.0, StepLog(RooflineLatencyModel(TINY, GPU)), limits)
    try:
        return loop.decide(STATE)
    finally:
        loop.guard.close()


def test_what_is_fetched_ahead_takes_half_of_a_step_that_decodes() -> None:
    """Not of the prompt that was computed last, beside whose successor it would be fetched."""
    moments = iter([0.0, 0.03, 1.23])
    steps = StepLog(RooflineLatencyModel(TINY, GPU), clock=lambda: next(moments))
    loop = Controller(Stock(), 30.0, steps, ServerLimits(TINY, GPU, 8, math.inf, 4096))
    assert loop.decide(STATE).fetch_ahead_s == 0.0
    steps.start(StepWork(2, 300))
    steps.start(StepWork(0, 0, prefill_rows=9000, prefill_pairs=9000 * 4500))
    steps.idle()
    assert loop.decide(STATE).fetch_ahead_s == pytest.approx(LINK_SHARE * 0.03)
    loop.guard.close()
