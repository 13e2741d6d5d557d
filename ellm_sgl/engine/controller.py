"""Asks the policy: observe, ask the policy, keep its decision for those who apply it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ellm_sgl.engine.policy_guard import Answer, PolicyGuard
from ellm_sgl.engine.step_log import StepLog
from ellm_sgl.latency import (
    FetchingLatencyModel,
    HardwareProfile,
    LatencyModel,
    ModelShape,
)
from ellm_sgl.policies import MemoryState, Policy, Requests, SystemState, WorkSplit
from ellm_sgl.policies.pausing.limits import LINK_SHARE


@dataclass(frozen=True)
class Decision:
    """What one iteration does. Requests are named by their position in what was observed."""

    admit: tuple[int, ...]
    """Waiting requests to admit, in this order."""
    reorders: bool
    """Whether `admit` departs from the order in which they wait."""
    pause: frozenset[int]
    """Running requests that pause for this step."""
    ratios: tuple[float, ...]
    """Target uncached ratio of each running request."""
    admitted_ratio: float
    """That of the admitted requests, weighted by their tokens; bounds admission."""
    split: WorkSplit
    fetch_ahead_s: float
    """Seconds of the link that the coming step may spend on fetching for requests that sit it
    out. Decided here because it comes from a clock, and ranks must agree."""
    stands: bool
    """Whether it keeps everything and stands while all fits (`Policy.idle_without_pressure`)."""


@dataclass(frozen=True)
class ServerLimits:
    """What does not change while a server runs."""

    model: ModelShape
    hardware: HardwareProfile
    max_running: int
    tpot_slo_s: float
    max_restored_tokens: int
    """Most tokens one step may restore."""


class Controller:
    """Turns observations into decisions, and steps into what the next observation knows.

    Args:
        policy: whom to ask.
        budget_s: seconds it has for all three answers; inf as for `PolicyGuard`.
        steps: measures steps; its latency model is the one policies see.
        limits: of this server.
    """

    def __init__(
        self, policy: Policy, budget_s: float, steps: StepLog, limits: ServerLimits
    ) -> None:
        self.steps = steps
        self.limits = limits
        self.guard = PolicyGuard(policy, budget_s)
        self._fetching = FetchingLatencyModel(steps.model)

    @property
    def latency(self) -> LatencyModel:
        return self.steps.model

    def switch(self, policy: Policy) -> None:
        """Ask `policy` from now on; counters start again. The one before is not waited for."""
        self.guard.close()
        self.guard = PolicyGuard(policy, self.guard.budget_s)

    def state(
        self, now_s: float, running: Requests, waiting: Requests, memory: MemoryState
    ) -> SystemState:
        """The state a policy is asked about."""
        return SystemState(
            now_s=now_s,
            running=running,
            waiting=waiting,
            max_running=self.limits.max_running,
            memory=memory,
            model=self.limits.model,
            latency=self._fetching if memory.host_tokens else self.latency,
            hardware=self.limits.hardware,
            tpot_slo_s=self.limits.tpot_slo_s,
            last_step=self.steps.last,
        )

    def decide(self, state: SystemState) -> Decision:
        """Ask about one iteration; never fails, never takes much longer than the budget."""
        last = self.steps.last
        ahead_s = 0.0 if last is None else LINK_SHARE * last.seconds
        return _decision(state, self.guard.answer(state), self.guard.idle_without_pressure, ahead_s)


def _decision(
    state: SystemState, answer: Answer, idle_without_pressure: bool, fetch_ahead_s: float
) -> Decision:
    admit = answer.batch.admit
    keeps_all = not answer.batch.pause and not answer.ratios.running.any()
    return Decision(
        admit=admit,
        reorders=any(a > b for a, b in itertools.pairwise(admit)),
        pause=frozenset(answer.batch.pause),
        ratios=tuple(answer.ratios.running.tolist()),
        admitted_ratio=_weighted(answer.ratios.admitted, state.waiting.tokens[list(admit)]),
        split=answer.split,
        fetch_ahead_s=fetch_ahead_s,
        stands=idle_without_pressure and keeps_all,
    )


def _weighted(ratios: npt.NDArray[np.float64], tokens: npt.NDArray[np.int64]) -> float:
    total = int(tokens.sum())
    return float((ratios * tokens).sum() / total) if total else 0.0
