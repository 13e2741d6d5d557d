"""A policy may fail in every way there is; the answer is then the safe one, and is counted."""

from __future__ import annotations

import dataclasses
import logging
import math
import sys

import numpy as np
import pytest

from ellm_sgl.policies import Batch, EndedRequest, FixedRatio, Policy, Ratios, Stock, WorkSplit
from ellm_sgl.policies.testing.generate import requests
from tests.engine.scripted import STATE, Scripted, asking, is_safe, raising


def test_a_good_answer_passes_unchanged() -> None:
    with asking(FixedRatio(0.25)) as safe:
        answer = safe.answer(STATE)
    assert answer.ratios.running.tolist() == [0.25, 0.25]
    assert safe.asked == 1 and not safe.failures


def test_stock_is_the_safe_answer() -> None:
    with asking(Stock()) as safe:
        answer = safe.answer(STATE)
    assert is_safe(answer) and not safe.failures


def test_a_promise_that_cannot_be_asked_about_is_none() -> None:
    class Raises(Stock):
        def idle_without_pressure(self) -> bool:
            raise RuntimeError("no")

    with asking(Stock()) as safe, asking(Raises()) as other:
        assert safe.idle_without_pressure and not other.idle_without_pressure


def test_the_split_question_is_about_the_step_that_the_answers_lead_to() -> None:
    policy = Scripted()
    with asking(policy) as safe:
        safe.answer(STATE)
    (plan,) = policy.plans
    # 100, 200, 50, 60, 70 tokens at r = 0.25, rounded down to blocks of 16
    assert (plan.decode_rows, plan.decode_tokens) == (5, 480)
    assert plan.restored_tokens == 16 + 48 + 0 + 0 + 16
    assert plan.restored_squares == 16**2 + 48**2 + 16**2


def test_paused_requests_are_not_in_that_step() -> None:
    policy = Scripted(batch=lambda: Batch(admit=(), pause=(1,)),
                      ratio=lambda: Ratios(np.array([0.5, 0.5]), np.empty(0)))  # fmt: skip
    with asking(policy) as safe:
        assert safe.answer(STATE).batch.pause == (1,)
    assert (policy.plans[0].decode_rows, policy.plans[0].restored_tokens) == (1, 48)


@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        (Scripted(batch=raising(RuntimeError("no"))), "exception"),
        (Scripted(batch=raising(TimeoutError("its own"))), "exception"),
        (Scripted(batch=lambda: Batch(admit=(3,))), "range"),
        (Scripted(batch=lambda: Batch(admit=(-1,))), "range"),
        (Scripted(batch=lambda: Batch(admit=(0, 0))), "duplicate"),
        (Scripted(batch=lambda: Batch(admit=(), pause=(0, 1))), "stall"),
        (Scripted(ratio=lambda: Ratios(np.array([0.1, np.nan]), np.zeros(3))), "nan"),
        (Scripted(ratio=lambda: Ratios(np.array([0.1, 2.0]), np.zeros(3))), "range"),
        (Scripted(ratio=lambda: Ratios(np.zeros(1), np.zeros(3))), "shape"),
        (Scripted(threads=lambda: WorkSplit(1, 1, 33)), "range"),
    ],
)
def test_a_bad_answer_is_replaced_and_counted(policy: Policy, kind: str) -> None:
    with asking(policy) as safe:
        answer = safe.answer(STATE)
    assert is_safe(answer)
    assert safe.failures == {kind: 1}


def test_nobody_admitted_to_an_idle_server_is_a_stall() -> None:
    """Otherwise those who wait would wait for ever."""
    idle = dataclasses.replace(STATE, running=requests([]))
    nobody = Scripted(batch=lambda: Batch(admit=()),
                      ratio=lambda: Ratios(np.empty(0), np.empty(0)))  # fmt: skip
    with asking(nobody) as safe:
        assert safe.answer(idle).batch.admit == (0, 1, 2)
    assert safe.failures == {"stall": 1}


def test_each_kind_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    policy = Scripted(batch=raising(RuntimeError("no")))
    with caplog.at_level(logging.WARNING), asking(policy) as safe:
        for _ in range(5):
            safe.answer(STATE)
        policy.scripts = (lambda: Batch(admit=(9,)), None, None)
        safe.answer(STATE)
    assert len(caplog.records) == 2
    assert "Scripted raised RuntimeError: no" in caplog.messages[0]
    assert safe.failures == {"exception": 5, "range": 1}


def test_warming_up_is_not_counted_and_swallows_failures() -> None:
    with asking(Scripted(batch=raising(RuntimeError("no")))) as safe:
        safe.warm_up(STATE)
    assert safe.asked == 0 and not safe.failures


def test_a_policy_that_tries_to_end_the_process_raised_an_exception() -> None:
    class Direct(Scripted):
        def never_waits(self) -> bool:
            return True

        def close(self) -> None:
            sys.exit("enough, when closed")

    for kind in (Scripted, Direct):
        with asking(kind(batch=lambda: sys.exit("enough"))) as safe:
            assert is_safe(safe.answer(STATE))
        assert safe.failures == {"exception": 1}


def test_one_that_does_so_when_told_of_an_ended_request_is_asked_all_the_same() -> None:
    class Told(Stock):
        def ended(self, request: EndedRequest) -> None:
            sys.exit("enough")

    with asking(Told()) as safe:
        safe.ended(EndedRequest(1, 4, False))
        assert safe.answer(STATE).batch == Batch(admit=(0, 1, 2))
    assert safe.failures == {"exception": 1}


def test_an_error_that_cannot_be_printed_is_counted_all_the_same() -> None:
    class UnprintableError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    with asking(Scripted(batch=raising(UnprintableError()))) as safe:
        assert is_safe(safe.answer(STATE))
    assert safe.failures == {"exception": 1}


def test_without_a_deadline_failures_are_replaced_all_the_same() -> None:
    for error in (ValueError("no"), TimeoutError("own")):
        with asking(Scripted(batch=raising(error)), math.inf) as safe:
            assert is_safe(safe.answer(STATE))
            assert safe.failures == {"exception": 1}
