"""Ask a policy, and go on without it when it fails.

A policy may be other people's code on the hot path. It runs on a thread of its own, so that one
that hangs delays a step by its budget and no more, and each of its answers is checked before use.
(One that holds the interpreter's lock in native code cannot be hurried; numpy, scipy and cvxpy
release it, or return soon.) The policies of this package are trusted to return: they are asked on
the caller's thread, because on a busy machine waking another costs a step milliseconds.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as LateError
from dataclasses import dataclass

import numpy as np

from ellm_sgl.policies import Batch, Policy, Ratios, SystemState, Threads
from ellm_sgl.policies.checks import InvalidAnswer, check_batch, check_ratios, check_threads
from ellm_sgl.policies.plan import step_work

logger = logging.getLogger(__name__)

LOG_INTERVAL_S = 60.0
"""A failure is logged once per kind and so many seconds; all are counted."""

SAFE_THREADS = Threads(swap_layers=0, recompute_layers=1, delta=512)


_OUR_POLICIES = "ellm_sgl.policies."


class _OverdueError(Exception):
    """The policy has not answered within its budget."""


@dataclass(frozen=True, eq=False)
class Answer:
    """A policy's three answers to one state, or the safe ones."""

    batch: Batch
    ratios: Ratios
    threads: Threads
    failure: str | None = None
    """Why the safe answer stands in: a kind that `SafePolicy.failures` counts by."""


def safe_answer(state: SystemState, failure: str | None = None) -> Answer:
    """Keep all cached, admit as SGLang does."""
    waiting = len(state.waiting)
    return Answer(
        Batch(join=tuple(range(waiting))),
        Ratios(running=np.zeros(len(state.running)), joining=np.zeros(waiting)),
        SAFE_THREADS,
        failure,
    )


class SafePolicy:
    """A policy whose exceptions, invalid answers and delays never reach the server.

    Args:
        policy: whom to ask. One of this package's is called on the caller's thread and without a
            deadline; any other on a thread of its own.
        budget_s: time of another's three answers, in seconds. inf: no deadline and no thread, so
            that a simulation repeats exactly.
    """

    def __init__(self, policy: Policy, budget_s: float) -> None:
        self.policy = policy
        self.budget_s = budget_s
        self._trusted = type(policy).__module__.startswith(_OUR_POLICIES)
        self.failures: Counter[str] = Counter()
        """Answers replaced, by kind: "late", "exception", or an `InvalidAnswer.kind`."""
        self.asked = 0
        self.keeps_what_fits = self._promises()
        """`Policy.keeps_what_fits`; not if asking it fails."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ellm-policy")
        self._pending: Future[Answer] | None = None
        self._logged: dict[str, float] = {}

    def _promises(self) -> bool:
        try:
            return bool(self.policy.keeps_what_fits())
        except Exception:
            logger.warning("policy %s: keeps_what_fits raised", type(self.policy).__name__)
            return False

    def warm_up(self, state: SystemState) -> None:
        """Ask once without a deadline: imports, compilation. A failure is found later, in turn."""
        if self.budget_s < math.inf:
            self._thread.submit(self._ask, state).exception()

    def answer(self, state: SystemState) -> Answer:
        """The policy's answer to `state`, within the budget; else the safe one."""
        self.asked += 1
        if self._pending is not None:
            if not self._pending.done():
                return self._failed(state, "late", "is still at an earlier question")
            self._pending = None
        try:
            if self.budget_s == math.inf or self._trusted:
                return self._ask(state)
            return self._ask_in_time(state)
        except _OverdueError:
            return self._failed(state, "late", f"took more than {self.budget_s * 1e3:g} ms")
        except InvalidAnswer as error:
            return self._failed(state, error.kind, str(error))
        except Exception as error:
            return self._failed(state, "exception", f"raised {type(error).__name__}: {error}")

    def close(self) -> None:
        """Let the thread go; a question in progress is not waited for."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _ask_in_time(self, state: SystemState) -> Answer:
        future = self._thread.submit(self._ask, state)
        try:
            return future.result(self.budget_s)
        except LateError:
            if future.done():  # the policy's own TimeoutError
                raise
            self._pending = future
            raise _OverdueError from None

    def _ask(self, state: SystemState) -> Answer:
        batch = self.policy.batch(state)
        check_batch(state, batch)
        ratios = self.policy.ratio(state, batch)
        check_ratios(state, batch, ratios)
        threads = self.policy.threads(state, step_work(state, batch, ratios))
        check_threads(threads)
        return Answer(batch, ratios, threads)

    def _failed(self, state: SystemState, kind: str, what: str) -> Answer:
        self.failures[kind] += 1
        now = time.monotonic()
        if now - self._logged.get(kind, -LOG_INTERVAL_S) >= LOG_INTERVAL_S:
            self._logged[kind] = now
            logger.warning(
                "policy %s %s; this step keeps all cached and admits as SGLang does "
                "(%d such answers replaced so far)",
                type(self.policy).__name__, what, self.failures[kind],
            )  # fmt: skip
        return safe_answer(state, kind)
