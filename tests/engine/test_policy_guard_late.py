"""Nobody waits for a policy that is late or hangs; and on whose thread it is asked."""

from __future__ import annotations

import dataclasses
import logging
import math
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from ellm_sgl.engine import policy_guard as asking_module
from ellm_sgl.engine.last_word import STANDS_S, Answer
from ellm_sgl.latency import StepWork
from ellm_sgl.policies import Batch, Fcfs, FixedRatio, Ratios, Stock, SystemState, WorkSplit
from ellm_sgl.policies.planned import select
from ellm_sgl.policies.testing import requests
from tests.engine.scripted import LONG_S, STATE, Prompt, Scripted, asking, hanging, is_safe


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


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first answer has so little time that tests need not wait for long."""
    monkeypatch.setattr(asking_module, "FIRST_ANSWER_S", 0.3)


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
        assert "Scripted has not answered its first question after 0.3 s" in said
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


def test_who_answers_otherwise_does_not_inherit_the_promise() -> None:
    class Other(FixedRatio):
        def split(self, state: SystemState, plan: StepWork) -> WorkSplit:
            return super().split(state, plan)

    class Mixin:
        """No policy itself."""

        def batch(self, state: SystemState) -> Batch:
            return Batch(admit=())

    class Mixed(Mixin, Fcfs): ...

    class Named(Mixed):
        def never_waits(self) -> bool:
            return True

    assert FixedRatio().never_waits() and Stock().never_waits() and not Other().never_waits()
    assert Fcfs().never_waits() and Fcfs().idle_without_pressure()
    assert not (Mixed().never_waits() or Mixed().idle_without_pressure())
    assert Named().never_waits() and not Named().idle_without_pressure()


def test_without_a_deadline_the_callers_own_thread_asks() -> None:
    threads: list[int] = []

    def note() -> Batch:
        threads.append(threading.get_ident())
        return Batch(admit=(0,))

    with asking(Scripted(batch=note), math.inf) as safe:
        safe.warm_up(STATE)
        assert safe.answer(STATE).batch == Batch(admit=(0,))
    assert threads == [threading.get_ident()]


def slowly(*_: object) -> Batch:
    time.sleep(0.05)
    return Batch(admit=(2,))


def test_what_has_come_late_on_the_callers_thread_is_used(caplog: pytest.LogCaptureFixture) -> None:
    """The time has passed: to replace it would only undo what was decided."""
    with asking(Prompt(batch=slowly, ratio=lambda: Ratios(np.zeros(2), np.zeros(1)))) as safe:
        safe.budget_s = 0.01
        assert safe.answer(STATE).batch == Batch(admit=(2,))
        assert safe.failures == {"late": 1}
    assert "took more than 10 ms; its answer is used" in caplog.text


def test_built_in_policies_have_the_budget_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FixedRatio, "batch", slowly)
    with asking(FixedRatio(0.25), budget_s=0.01) as safe:
        assert safe.answer(STATE).batch == Batch(admit=(2,))
        assert safe.failures == {"late": 1}


def test_on_a_thread_of_its_own_nobody_waits_for_it() -> None:
    release = threading.Event()
    with asking(Scripted(batch=hanging(release)), budget_s=0.01) as safe:
        assert is_safe(safe.answer(STATE))
        assert safe.failures == {"late": 1}
        release.set()


def late_after_one_answer(state: SystemState, *later: SystemState) -> list[Answer]:
    """Of a policy that pauses the second of those that run, admits the third of those that wait and
    then says nothing more."""
    hangs, asked = threading.Event(), 0

    def once() -> Batch:
        nonlocal asked
        asked += 1
        if asked > 1:
            hangs.wait(LONG_S)
        return Batch(admit=(2,), pause=(1,))

    policy = Scripted(batch=once, ratio=lambda: Ratios(np.array([0.5, 0.75]), np.array([0.25])))
    with asking(policy) as safe:
        answers = [safe.answer(state)]
        safe.budget_s = 0.01
        answers += [safe.answer(one) for one in later]
        assert safe.failures == {"late": len(later)}
        hangs.set()
    return answers


def test_what_a_policy_said_last_stands_while_it_is_late() -> None:
    """Whoever paused goes on pausing, and nobody else is admitted."""
    first, again = late_after_one_answer(STATE, STATE)
    assert again.batch == Batch(admit=(), pause=(1,)) and again.split == first.split
    assert again.ratios.running.tolist() == [0.5, 0.75] and not len(again.ratios.admitted)


def test_it_stands_for_the_same_requests_wherever_they_are_now() -> None:
    """The first has ended; the one that was admitted runs, and one that nobody was asked of."""
    paused, admitted = STATE.running.request_id[1], STATE.waiting.request_id[2]
    running = requests([100, 60, 100], request_id=[900, admitted, paused])
    [_, again] = late_after_one_answer(STATE, dataclasses.replace(STATE, running=running))
    assert again.batch == Batch(admit=(), pause=(2,))
    assert again.ratios.running.tolist() == [0.0, 0.25, 0.75]


@pytest.mark.parametrize("too_long", [True, False])
def test_it_stands_for_a_while_and_while_anybody_runs(too_long: bool) -> None:
    later = dataclasses.replace(STATE, now_s=STATE.now_s + 1.5 * STANDS_S)
    alone = dataclasses.replace(STATE, running=select(STATE.running, [1]))
    after = later if too_long else alone
    [_, again] = late_after_one_answer(STATE, after)
    assert again.batch.admit == (0, 1, 2) and not again.batch.pause
    assert not again.ratios.running.any() and len(again.ratios.running) == len(after.running)


def test_what_a_policy_said_before_it_failed_does_not_stand() -> None:
    def fail() -> Batch:
        raise ValueError

    scripts = iter([lambda: Batch(admit=(), pause=(1,)), fail, slowly])
    policy = Scripted(batch=lambda: next(scripts)(), ratio=lambda: Ratios(np.zeros(2), np.zeros(0)))
    with asking(policy) as safe:
        assert safe.answer(STATE).batch.pause == (1,)
        assert is_safe(safe.answer(STATE))
        safe.budget_s = 0.01
        assert is_safe(safe.answer(STATE))
        assert safe.failures == {"exception": 1, "late": 1}


SWITCHES_AWAY = """
import threading
from ellm_sgl.engine import policy_guard as asking
from ellm_sgl.engine.controller import Controller, ServerLimits
from ellm_sgl.engine.step_log import StepLog
from ellm_sgl.latency import RooflineLatencyModel
from ellm_sgl.policies import Stock
from ellm_sgl.policies.planned import select
from ellm_sgl.policies.testing import requests
from tests.engine.scripted import STATE, Scripted
from tests.latency.machines import GPU, TINY

asking.FIRST_ANSWER_S = 0.3
hangs = Scripted(batch=threading.Event().wait)
limits = ServerLimits(TINY, GPU, 8, 1.0, 4096)
loop = Controller(hangs, 30.0, StepLog(RooflineLatencyModel(TINY, GPU)), limits)
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


def test_what_a_policy_writes_over_while_it_is_late_is_not_what_it_said() -> None:
    """Its arrays are its own, and it uses them again."""
    hangs, written = threading.Event(), threading.Event()
    buffer, asked = np.full(len(STATE.running), 0.5), 0

    def batch() -> Batch:
        nonlocal asked
        asked += 1
        if asked > 1:
            buffer[:] = np.inf
            written.set()
            hangs.wait(LONG_S)
        return Batch(admit=())

    policy = Scripted(batch=batch, ratio=lambda: Ratios(buffer, np.zeros(0)))
    with asking(policy) as safe:
        said = safe.answer(STATE)
        safe.budget_s = 0.05
        again = safe.answer(STATE)
        assert safe.failures == {"late": 1}
        assert written.wait(LONG_S)
        hangs.set()
    assert (buffer == np.inf).all()
    assert again.ratios.running.tolist() == said.ratios.running.tolist() == [0.5] * len(buffer)
