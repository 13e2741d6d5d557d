"""A policy may fail in every way there is; the answer is then the safe one, and is counted."""

from __future__ import annotations

import dataclasses
import logging
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from ellm_sgl.engine import policy_guard as asking_module
from ellm_sgl.engine.policy_guard import Answer, PolicyGuard
from ellm_sgl.latency import StepWork
from ellm_sgl.policies import (
    Batch,
    EndedRequest,
    FixedRatio,
    Policy,
    Ratios,
    Stock,
    SystemState,
    WorkSplit,
)
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


def test_a_good_answer_passes_unchanged() -> None:
    with asking(FixedRatio(0.25)) as safe:
        answer = safe.answer(STATE)
    assert answer.ratios.running.tolist() == [0.25, 0.25]
    assert safe.asked == 1 and not safe.failures


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


def test_a_late_answer_is_replaced_until_the_policy_is_back() -> None:
    release = threading.Event()

    def wait() -> Batch:
        release.wait(LONG_S)
        return Batch(admit=())

    policy = Scripted(batch=wait, ratio=lambda: Ratios(np.zeros(2), np.empty(0)))
    with asking(policy, budget_s=0.01) as safe:
        assert is_safe(safe.answer(STATE))
        assert is_safe(safe.answer(STATE))  # it is still at the first question
        assert safe.failures == {"late": 2}
        release.set()
        assert safe._pending is not None
        safe._pending.result(LONG_S)
        safe.budget_s = LONG_S
        assert safe.answer(STATE).batch.admit == ()
        assert safe.failures == {"late": 2}


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


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first answer has so little time that tests need not wait for long."""
    monkeypatch.setattr(asking_module, "FIRST_ANSWER_S", 0.05)


def hanging(release: threading.Event) -> Callable[[], Batch]:
    def script() -> Batch:
        release.wait(LONG_S)
        return Batch(admit=())

    return script


@pytest.mark.usefixtures("_impatient")
def test_a_policy_that_hangs_at_first_is_late_until_it_has_answered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    release = threading.Event()
    policy = Scripted(batch=hanging(release), ratio=lambda: Ratios(np.zeros(2), np.empty(0)))
    began = time.monotonic()
    with caplog.at_level(logging.WARNING), asking(policy) as safe:
        safe.warm_up(STATE)
        assert time.monotonic() - began < LONG_S / 2
        assert safe.failures == {"late": 1}
        (said,) = caplog.messages
        assert "Scripted has not answered its first question after 0.05 s" in said
        assert is_safe(safe.answer(STATE))
        assert safe.failures == {"late": 2}
        release.set()
        assert safe._pending is not None
        safe._pending.result(LONG_S)
        assert safe.answer(STATE).batch.admit == ()
        assert safe.failures == {"late": 2} and len(caplog.messages) == 1


@pytest.mark.usefixtures("_impatient")
def test_a_promise_that_is_never_given_is_none_and_nothing_else_is_asked_meanwhile() -> None:
    release = threading.Event()

    class Silent(Scripted):
        def idle_without_pressure(self) -> bool:
            return release.wait(LONG_S)

    policy = Silent()
    with asking(policy) as safe:
        assert not safe.idle_without_pressure
        safe.warm_up(STATE)
        assert is_safe(safe.answer(STATE))
        assert safe.failures == {"late": 2} and not policy.plans
        release.set()
        assert safe._pending is not None
        safe._pending.result(LONG_S)
        assert safe.answer(STATE).ratios.running.tolist() == [0.25, 0.25]
        assert not safe.idle_without_pressure


class Prompt(Scripted):
    """Promises never to wait."""

    def never_waits(self) -> bool:
        return True


@pytest.mark.parametrize(("kind", "own_thread"), [(Scripted, True), (Prompt, False)])
def test_a_policy_that_promises_never_to_wait_is_asked_on_the_callers_thread(
    kind: type[Scripted], own_thread: bool
) -> None:
    threads: list[int] = []

    def note() -> Batch:
        threads.append(threading.get_ident())
        return Batch(admit=(0, 1, 2))

    with asking(kind(batch=note)) as safe:
        safe.warm_up(STATE)
        safe.answer(STATE)
    assert [thread != threading.get_ident() for thread in threads] == [own_thread] * 2
    assert not safe.failures


@pytest.mark.parametrize("kind", [Scripted, Prompt])
def test_all_policies_have_one_budget(kind: type[Scripted]) -> None:
    def slow() -> Batch:
        time.sleep(0.05)
        return Batch(admit=())

    policy = kind(batch=slow, ratio=lambda: Ratios(np.zeros(2), np.empty(0)))
    with asking(policy, budget_s=0.01) as safe:
        assert is_safe(safe.answer(STATE))
        assert safe.failures == {"late": 1}


def test_built_in_policies_have_the_budget_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: object) -> Batch:
        time.sleep(0.05)
        return Batch(admit=(2,))

    monkeypatch.setattr(FixedRatio, "batch", slow)
    with asking(FixedRatio(0.25), budget_s=0.01) as safe:
        assert is_safe(safe.answer(STATE))
        assert safe.failures == {"late": 1}


def test_who_answers_otherwise_does_not_inherit_the_promise() -> None:
    class Other(FixedRatio):
        def split(self, state: SystemState, plan: StepWork) -> WorkSplit:
            return super().split(state, plan)

    assert FixedRatio().never_waits() and Stock().never_waits() and not Other().never_waits()


class Hears(Scripted):
    def __init__(self, fails: bool = False, batch: Callable[[], Batch] | None = None) -> None:
        super().__init__(batch)
        self.heard: list[tuple[str, int]] = []
        self.fails = fails
        self.closed = threading.Event()

    def batch(self, state: SystemState) -> Batch:
        self.heard.append(("asked", threading.get_ident()))
        return super().batch(state)

    def ended(self, request: EndedRequest) -> None:
        self.heard.append((f"{request.request_id} ended", threading.get_ident()))
        if self.fails:
            raise ValueError("no")

    def close(self) -> None:
        self.heard.append(("closed", threading.get_ident()))
        self.closed.set()
        if self.fails:
            raise ValueError("no")


class HearsPrompt(Hears):
    def never_waits(self) -> bool:
        return True


def end(request_id: int) -> EndedRequest:
    return EndedRequest(request_id, output_tokens=5, aborted=False)


@pytest.mark.parametrize("kind", [Hears, HearsPrompt])
@pytest.mark.parametrize("budget_s", [LONG_S, math.inf])
def test_a_policy_hears_of_ended_requests_before_it_is_asked_and_of_its_own_end_last(
    kind: type[Hears], budget_s: float
) -> None:
    policy = kind()
    safe = PolicyGuard(policy, budget_s)
    safe.ended(end(3))
    safe.ended(end(4))
    assert not policy.heard
    safe.answer(STATE)
    safe.answer(STATE)
    safe.ended(end(5))  # it is not asked again
    safe.close()
    assert policy.closed.wait(LONG_S)
    assert [what for what, _ in policy.heard] == ["3 ended", "4 ended", "asked", "asked", "closed"]
    (thread,) = {thread for _, thread in policy.heard}
    ours = kind is HearsPrompt or budget_s == math.inf
    assert (thread == threading.get_ident()) == ours


def test_a_policy_that_fails_when_told_answers_all_the_same_and_is_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy = Hears(fails=True)
    with caplog.at_level(logging.WARNING), asking(policy) as safe:
        safe.ended(end(3))
        safe.ended(end(4))
        assert safe.answer(STATE).ratios.running.tolist() == [0.25, 0.25]
        assert safe.failures == {"exception": 2}
    assert "raised ValueError: no when told of an ended request" in caplog.messages[0]
    assert policy.closed.wait(LONG_S)


def test_a_policy_that_hangs_hears_of_it_later_and_nobody_waits_for_it_to_close() -> None:
    release = threading.Event()
    policy = Hears(batch=hanging(release))
    safe = PolicyGuard(policy, budget_s=0.01)
    safe.answer(STATE)
    safe.ended(end(3))
    safe.answer(STATE)
    assert safe.failures == {"late": 2}
    release.set()
    assert safe._pending is not None
    safe._pending.result(LONG_S)
    safe.budget_s = LONG_S
    release.clear()
    policy.scripts = (None, None, None)
    safe.answer(STATE)
    assert [what for what, _ in policy.heard] == ["asked", "3 ended", "asked"]
    policy.scripts = (hanging(release), None, None)
    safe.budget_s = 0.01
    safe.answer(STATE)
    safe.close()
    assert not policy.closed.is_set()
    release.set()
    assert policy.closed.wait(LONG_S)


def test_a_policy_that_tries_to_end_the_process_raised_an_exception() -> None:
    with asking(Scripted(batch=lambda: sys.exit("enough"))) as safe:
        assert is_safe(safe.answer(STATE))
    assert safe.failures == {"exception": 1}


def test_an_error_that_cannot_be_printed_is_counted_all_the_same() -> None:
    class UnprintableError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    with asking(Scripted(batch=raising(UnprintableError()))) as safe:
        assert is_safe(safe.answer(STATE))
    assert safe.failures == {"exception": 1}


SWITCHES_AWAY = """
import threading
from ellm_sgl.engine import policy_guard as asking
from ellm_sgl.engine.controller import Controller, ServerLimits
from ellm_sgl.engine.step_log import StepLog
from ellm_sgl.latency import RooflineLatencyModel
from ellm_sgl.policies import Stock
from tests.engine.test_policy_guard import STATE, Scripted
from tests.latency.machines import GPU, TINY

asking.FIRST_ANSWER_S = 0.05
hangs = Scripted(batch=threading.Event().wait)
limits = ServerLimits(TINY, GPU, 8, 1.0, 4096)
loop = Controller(hangs, 0.005, StepLog(RooflineLatencyModel(TINY, GPU)), limits)
loop.guard.warm_up(STATE)
late = loop.guard.failures["late"]
loop.switch(Stock())
print(late, loop.decide(STATE).admit, dict(loop.guard.failures))
"""


def test_nobody_waits_for_a_policy_that_hangs_when_it_is_replaced_or_at_the_end() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SWITCHES_AWAY],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=2 * LONG_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "1 (0, 1, 2) {}\n"), done.stderr


def test_stock_is_the_safe_answer() -> None:
    with asking(Stock()) as safe:
        answer = safe.answer(STATE)
    assert is_safe(answer) and not safe.failures


def test_without_a_deadline_the_callers_own_thread_asks() -> None:
    threads: list[int] = []

    def note() -> Batch:
        threads.append(threading.get_ident())
        return Batch(admit=(0,))

    with asking(Scripted(batch=note), math.inf) as safe:
        safe.warm_up(STATE)
        assert safe.answer(STATE).batch == Batch(admit=(0,))
    assert threads == [threading.get_ident()]


def test_without_a_deadline_failures_are_replaced_all_the_same() -> None:
    for error in (ValueError("no"), TimeoutError("own")):
        with asking(Scripted(batch=raising(error)), math.inf) as safe:
            assert is_safe(safe.answer(STATE))
            assert safe.failures == {"exception": 1}
