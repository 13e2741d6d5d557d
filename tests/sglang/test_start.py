"""Before the first request, a policy is asked about made-up ones."""

from __future__ import annotations

from ellm_sgl.engine import Controller
from ellm_sgl.policies import Batch, Stock, SystemState
from ellm_sgl.sglang.start import warm_up
from tests.engine.test_iteration import Server


class Remembers(Stock):
    def __init__(self) -> None:
        self.states: list[SystemState] = []

    def batch(self, state: SystemState) -> Batch:
        self.states.append(state)
        return super().batch(state)


def test_a_policy_is_warmed_up_by_a_question_under_pressure() -> None:
    policy, iteration = Remembers(), Server().iteration
    iteration.controller = Controller(
        policy, 30.0, iteration.controller.steps, iteration.controller.limits
    )
    warm_up(iteration)
    iteration.controller.guard.close()
    (state,) = policy.states
    assert len(state.running) == 4 and len(state.waiting) == 2
    assert state.running.tokens.sum() > state.memory.device_tokens
    # What it remembers of them fits no request to come.
    assert state.running.request_id.max() < 0 and state.waiting.request_id.max() < 0
    assert state.now_s == iteration.clock() == state.waiting.arrival_s[0]
