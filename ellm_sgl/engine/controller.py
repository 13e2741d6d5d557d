"""Asks the policy: observe, ask the policy, keep its decision for those who apply it."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass

from ellm_sgl.engine.decision import Decision
from ellm_sgl.engine.host_buffer import HostBuffer
from ellm_sgl.engine.policy_guard import PolicyGuard
from ellm_sgl.engine.step_log import KEPT_STEPS, StepLog
from ellm_sgl.latency import NO_WORK, FetchingLatencyModel, HardwareProfile, ModelShape, StepWork
from ellm_sgl.policies import MemoryState, Policy, Requests, SystemState, WorkSplit
from ellm_sgl.policies.lengths import OutputLengths
from ellm_sgl.policies.pausing.limits import LINK_SHARE
from ellm_sgl.policies.planned import latency_seen

LAST_DECISIONS = 16
"""Kept for those who watch."""


@dataclass(frozen=True)
class Decided:
    """A decision, when it was made, and on what."""

    at_s: float
    """Of the server's clock."""
    seconds: float
    """That it took."""
    running: int
    waiting: int
    decision: Decision
    replaced: bool
    """The policy's answer was."""


@dataclass(frozen=True)
class ServerLimits:
    """What does not change while a server runs."""

    model: ModelShape
    hardware: HardwareProfile
    max_running: int
    tpot_slo_s: float
    max_restored_tokens: int
    """As `MemoryState.max_restored_tokens`."""
    host_scaling: bool = False
    """Whether the host tier's logical size follows violations of SLOs."""


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
        self.host_buffer = HostBuffer(limits.tpot_slo_s) if limits.host_scaling else None
        self.decision_s: deque[float] = deque(maxlen=KEPT_STEPS)
        """How long each of the last decisions took, in seconds;"""
        self.decisions = 0
        """and how many there have been, of this policy and those before."""
        self.last: deque[Decided] = deque(maxlen=LAST_DECISIONS)
        self._fallbacks: Counter[str] = Counter()

    @property
    def fallbacks(self) -> Counter[str]:
        """Answers replaced, by kind, of this policy and those before."""
        return self._fallbacks + self.guard.failures

    def switch(self, policy: Policy) -> None:
        """Ask `policy` from now on; its counters start again. The one before is not waited for."""
        self._fallbacks += self.guard.failures
        self.guard.close()
        self.guard = PolicyGuard(policy, self.guard.budget_s)

    def state(
        self,
        now_s: float,
        running: Requests,
        waiting: Requests,
        prefilling: Requests,
        memory: MemoryState,
        lengths: OutputLengths,
        prefill_left: StepWork = NO_WORK,
    ) -> SystemState:
        """The state a policy is asked about."""
        if self.host_buffer is not None:
            memory = self.host_buffer.observe(running, waiting, memory)
        latency = latency_seen(self.steps.model, running, memory)
        self.steps.shown = latency if isinstance(latency, FetchingLatencyModel) else None
        return SystemState(
            now_s=now_s,
            busy_s=self.steps.busy_s,
            running=running,
            waiting=waiting,
            prefilling=prefilling,
            max_running=self.limits.max_running,
            memory=memory,
            model=self.limits.model,
            latency=latency,
            hardware=self.limits.hardware,
            tpot_slo_s=self.limits.tpot_slo_s,
            last_step=self.steps.last,
            pace=self.steps.pace.ratio,
            lengths=lengths,
            prefill_left=prefill_left,
        )

    def decide(self, state: SystemState) -> Decision:
        """Ask about one iteration; never fails, never takes much longer than the budget."""
        began, failures = time.perf_counter(), self.guard.failures.total()
        answer, last = self.guard.answer(state), self.steps.last_decode
        seconds = time.perf_counter() - began
        self.decision_s.append(seconds)
        self.decisions += 1
        batch, ratios, split = answer.batch, answer.ratios, answer.split
        keeps_all = not batch.pause and not ratios.running.any()
        decision = Decision(
            admit=batch.admit,
            pause=frozenset(batch.pause),
            ratios=tuple(ratios.running.tolist()),
            admitted_ratios=tuple(ratios.admitted.tolist()),
            # A policy may have answered with NumPy's integers, which JSON does not know.
            split=WorkSplit(int(split.swap_layers), int(split.recompute_layers), int(split.delta)),
            fetch_ahead_s=0.0 if last is None else LINK_SHARE * last.computing_s,
            stands=self.guard.idle_without_pressure and keeps_all,
        )
        replaced = self.guard.failures.total() > failures
        known = len(state.running), len(state.waiting)
        self.last.append(Decided(state.now_s, seconds, *known, decision, replaced))
        return decision
