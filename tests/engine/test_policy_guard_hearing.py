"""What a policy is told besides its questions: requests that have ended, and its own end."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable

import pytest

from ellm_sgl.engine.policy_guard import PolicyGuard
from ellm_sgl.policies import Batch, EndedRequest, SystemState
from tests.engine.scripted import LONG_S, STATE, Scripted, asking, hanging


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
