"""Ask a policy, and go on without it when it fails.

A policy may be other people's code on the hot path. Each of its answers is checked before use, and
replaced if it is not there in time: by what the policy said last, which stands for a while, then by
the safe answer, which brings everybody back who pauses and admits everybody who waits. It runs on a
thread of its own, so that one that hangs delays a step by its budget and no more. The first
question may take longer, for imports and compilation: `FIRST_ANSWER_S`. (One that holds the
interpreter's lock in native code cannot be hurried; numpy, scipy and cvxpy release it, or return
soon.) A policy that promises never to wait is asked on the caller's thread, because on a busy
machine waking another costs a step milliseconds; what it says is used even if it is late, because
the time has passed.
"""

from __future__ import annotations

import logging
import math
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from ellm_sgl.engine.last_word import STANDS_S, Answer, own, repeated, safe_answer
from ellm_sgl.policies import EndedRequest, Policy, SystemState
from ellm_sgl.policies.base import MOST_ENDED
from ellm_sgl.policies.checks import InvalidAnswer, check_batch, check_ratios, check_split
from ellm_sgl.policies.planned import step_work
from ellm_sgl.worker import OverdueError, Worker, result_within

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_ANSWER_S = 10.0
"""Seconds of a policy's first answer, before a server starts or goes on without it. Imports
and compilations take seconds on a busy machine; a server that is switched stands still meanwhile.
"""

LOG_INTERVAL_S = 60.0
"""A failure is logged once per kind and so many seconds; all are counted."""


class PolicyGuard:
    """A policy whose exceptions, invalid answers and delays never reach the server.

    Args:
        policy: whom to ask: on a thread of its own, unless it promises never to wait.
        budget_s: time of its three answers, in seconds. inf: no deadline and no thread, so that a
            simulation repeats exactly.
    """

    def __init__(self, policy: Policy, budget_s: float) -> None:
        self.policy = policy
        self.budget_s = budget_s
        self._directly = budget_s == math.inf
        self.failures: Counter[str] = Counter()
        """Answers that were late, or replaced, by kind: "late", "exception", or an
        `InvalidAnswer.kind`."""
        self.asked = 0
        self._worker = Worker("ellm-policy")
        self._ended: deque[EndedRequest] = deque(maxlen=MOST_ENDED)
        """Not told of yet."""
        self._raised: deque[BaseException] = deque()
        """By `Policy.ended`, not counted yet."""
        self._listens = type(policy).ended is not Policy.ended
        self._pending: Future[Any] | None = None
        """A question that was not answered in time. None other is put before it has been."""
        self._last: tuple[Answer, SystemState] | None = None
        """Of a policy on a thread of its own: what it said last, and of which state."""
        self._logged: dict[str, float] = {}
        self.idle_without_pressure = self._promises("idle_without_pressure")
        """`Policy.idle_without_pressure`; not if asking it fails."""
        self._directly = self._directly or self._promises("never_waits")

    def _promises(self, promise: str) -> bool:
        """What this method of the policy says; False if it fails, or another question is open."""
        if self._pending is not None:
            return False
        try:
            return self._in_time(FIRST_ANSWER_S, lambda: bool(getattr(self.policy, promise)()))
        except OverdueError:
            self._never_answered()
        except Exception:
            logger.warning("policy %s: %s raised", type(self.policy).__name__, promise)
        return False

    def warm_up(self, state: SystemState) -> None:
        """Ask once, so that imports and compilations are not the first step's.

        Returns after `FIRST_ANSWER_S` at the latest, unless the policy promises never to wait. Then
        it is late until it has answered; any other failure is found later, in turn.
        """
        if self.budget_s == math.inf or self._pending is not None:
            return
        try:
            self._in_time(FIRST_ANSWER_S, self._ask, state)
        except OverdueError:
            self._never_answered()
        except Exception as error:
            logger.debug("policy %s raised %s", type(self.policy).__name__, _told(error))

    def _never_answered(self) -> None:
        self._count(
            "late",
            f"has not answered its first question after {FIRST_ANSWER_S:g} s; until it has, steps "
            "keep all cached and admit as SGLang does",
        )

    def ended(self, request: EndedRequest) -> None:
        """Tell the policy with the next question."""
        if self._listens:
            self._ended.append(request)

    def answer(self, state: SystemState) -> Answer:
        """The policy's answer to `state`, within the budget; else the safe one."""
        self.asked += 1
        answer = self._answered(state)
        while self._raised:
            error = self._raised.popleft()
            self._count("exception", f"raised {_told(error)} when told of an ended request")
        return answer

    def _answered(self, state: SystemState) -> Answer:
        if self._pending is not None:
            if not self._pending.done():
                return self._late(state, "is still at an earlier question")
            self._pending = None
        began = time.perf_counter()
        try:
            answer = self._in_time(self.budget_s, self._ask, state)
        except OverdueError:
            return self._late(state, f"took more than {self.budget_s * 1e3:g} ms")
        except InvalidAnswer as error:
            return self._failed(state, error.kind, str(error))
        except Exception as error:
            return self._failed(state, "exception", f"raised {_told(error)}")
        if not self._directly:
            self._last = answer, state
        elif time.perf_counter() - began > self.budget_s:
            self._count("late", f"took more than {self.budget_s * 1e3:g} ms; its answer is used")
        return answer

    def close(self) -> None:
        """Close the policy, and let the thread go; neither that nor a question in progress is
        waited for, now or ever. Nothing may be asked any more."""
        if type(self.policy).close is not Policy.close:
            if self._directly:
                self._close_policy()
            else:
                self._worker.submit(self._close_policy)
        self._worker.close()

    def _close_policy(self) -> None:
        try:
            self.policy.close()
        except (Exception, SystemExit) as error:
            logger.warning("policy %s: close raised %s", type(self.policy).__name__, _told(error))

    def _in_time(self, seconds: float, question: Callable[..., T], *arguments: Any) -> T:
        """The policy's answer; or OverdueError, with the question left pending."""
        if self._directly:
            try:
                return question(*arguments)
            except SystemExit as error:  # as `Worker.submit`: the process is not the policy's
                raise RuntimeError(f"SystemExit: {error}") from error
        future = self._worker.submit(question, *arguments)
        try:
            return result_within(seconds, future)
        except OverdueError:
            self._pending = future
            raise

    def _ask(self, state: SystemState) -> Answer:
        while self._ended:
            try:
                self.policy.ended(self._ended.popleft())
            except (Exception, SystemExit) as error:
                self._raised.append(error)
        batch = self.policy.batch(state)
        check_batch(state, batch)
        ratios = own(self.policy.ratio(state, batch))
        check_ratios(state, batch, ratios)
        split = self.policy.split(state, step_work(state, batch, ratios))
        check_split(split)
        return Answer(batch, ratios, split)

    def _late(self, state: SystemState, what: str) -> Answer:
        """What it said last, where that can stand; else the safe answer."""
        stands = None if self._last is None else repeated(*self._last, state)
        if stands is None:
            return self._failed(state, "late", what)
        self._count("late", f"{what}; what it said last stands, for up to {STANDS_S:g} s")
        return stands

    def _failed(self, state: SystemState, kind: str, what: str) -> Answer:
        self._last = None
        self._count(kind, f"{what}; this step keeps all cached and admits as SGLang does")
        return safe_answer(state)

    def _count(self, kind: str, what: str) -> None:
        self.failures[kind] += 1
        now = time.monotonic()
        if now - self._logged.get(kind, -LOG_INTERVAL_S) >= LOG_INTERVAL_S:
            self._logged[kind] = now
            logger.warning(
                "policy %s %s (%d such answers so far)",
                type(self.policy).__name__, what, self.failures[kind],
            )  # fmt: skip


def _told(error: BaseException) -> str:
    """Kind and message; also of an error whose own `__str__` fails."""
    return traceback.format_exception_only(error)[-1].strip()
