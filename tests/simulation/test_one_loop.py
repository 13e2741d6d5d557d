"""SGLang's scheduler and the simulator drive one loop: of one load they ask the same questions, in
the same order, and get the same decisions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from ellm_sgl.engine import Decision, Iteration
from ellm_sgl.eval.simulator import Load, Machine, Settings, Simulation
from ellm_sgl.latency import HardwareProfile, LatencyModel, RooflineLatencyModel, StepWork
from ellm_sgl.policies import Batch, Fcfs, FixedRatio, Policy, Ratios, Requests, SystemState
from ellm_sgl.policies.base import FloatArray
from tests.simulation.configuration import Configuration
from tests.simulation.events import Arrive, Event, Step

pytestmark = pytest.mark.slow

MAX_RESTORED = 16_384
"""Of a step; the simulator allows as many at least."""
PROMPTS = (40, 25, 13, 60, 8, 31, 22, 47, 5, 17, 36, 9, 28, 52, 20, 44)
MOST_OUTPUT = (30, 36, 24, 18, 36, 30, 12, 24, 36, 20, 28, 36, 33, 26, 30, 36)
SERVER = Configuration(
    layers=4,
    radix=False,
    policy="scripted",  # another is put in its place
    max_running=6,
    max_prefill=MAX_RESTORED,
)


class Asked(Fcfs):
    """A server asks it in every iteration, as the simulator does."""

    def idle_without_pressure(self) -> bool:
        return False


class Unlearning(RooflineLatencyModel):
    """Steps of the two take different times; what they predict must not come to differ."""

    def observe(self, work: StepWork, seconds: float) -> None:
        pass


class Recorded:
    """What each decision was asked about, and said. Requests are named by their priority."""

    def __init__(self) -> None:
        self.decisions: list[tuple[Any, ...]] = []
        self.ended: list[tuple[int, int, bool]] = []
        decide, ended = Iteration.decide, Iteration.ended

        def ending(iteration: Iteration, entry: int, output_tokens: int, aborted: bool) -> None:
            name = int(iteration.requests._columns["priority"][entry])
            self.ended.append((name, output_tokens, aborted))
            ended(iteration, entry, output_tokens, aborted)

        def recording(iteration: Iteration, state: SystemState) -> Decision:
            decision = decide(iteration, state)
            self.decisions.append(_told(state, decision))
            return decision

        @contextmanager
        def recorded() -> Iterator[None]:
            with (
                patch.object(Iteration, "decide", recording),
                patch.object(Iteration, "ended", ending),
            ):
                yield

        self.recording = recorded()


def _told(state: SystemState, decision: Decision) -> tuple[Any, ...]:
    running, waiting = state.running, state.waiting
    return (
        running.priority.tolist(),
        running.tokens.tolist(),
        running.uncached_tokens.tolist(),
        waiting.priority.tolist(),
        waiting.tokens.tolist(),
        state.memory,
        [int(waiting.priority[i]) for i in decision.admit],
        sorted(int(running.priority[i]) for i in decision.pause),
        decision.ratios,
        decision.admitted_ratios,
        decision.split,
    )


def _use(iteration: Iteration, model: LatencyModel, policy: Policy) -> None:
    controller = iteration.controller
    # What clocks tell differs, and so would what is done for an SLO's sake.
    controller.limits = dataclasses.replace(controller.limits, tpot_slo_s=math.inf)
    controller.steps.model = model
    controller.switch(policy)


class EachItsOwn(FixedRatio):
    """Every third request keeps all, the others little or half."""

    def ratio(self, state: SystemState, batch: Batch) -> Ratios:
        def of(requests: Requests) -> FloatArray:
            return np.array([0.0, 0.75, 0.5])[requests.priority % 3]

        return Ratios(of(state.running), of(state.waiting)[list(batch.admit)])


POLICIES: dict[str, Callable[[], Policy]] = {
    "fcfs": Asked,
    "fixed-ratio": lambda: FixedRatio(0.4),
    "each its own": lambda: EachItsOwn(0.4),
}


def _served(server: Configuration, policy: Policy) -> tuple[Recorded, list[int], Any]:
    """On SGLang's scheduler: decisions, output lengths, and the limits that it had."""
    from tests.simulation.life import Agreement, Life, rid_of

    arrivals = (Arrive(i, n, m) for i, (n, m) in enumerate(zip(PROMPTS, MOST_OUTPUT, strict=True)))
    story: list[Event] = [*arrivals, Step()]
    life, recorded = Life(server, story, 0, Agreement()), Recorded()
    iteration = life.plane.context.iteration
    assert iteration is not None
    limits = iteration.controller.limits
    _use(iteration, Unlearning(limits.model, limits.hardware), policy)
    with recorded.recording:
        life.live()
    outputs = [len(life.scheduler.reqs[rid_of(i)].output_ids) for i in range(len(PROMPTS))]
    return recorded, outputs, limits


def _simulated(server: Configuration, policy: Policy, outputs: list[int], limits: Any) -> Recorded:
    hardware: HardwareProfile = limits.hardware
    tokens = server.device_blocks * server.block_tokens
    machine = Machine("made up", limits.model, hardware, kv_tokens=tokens, host_tokens=0)
    settings = Settings(
        restore="recompute",
        tpot_slo_s=limits.tpot_slo_s,
        block_tokens=server.block_tokens,
        layer_group=server.layer_group,
        max_running=server.max_running,
        chunk_tokens=MAX_RESTORED,
        conservativeness=server.conservativeness,
        stride=1,
    )
    count = len(PROMPTS)
    load = Load(
        at_s=np.zeros(count),
        prompt_tokens=np.array(PROMPTS),
        output_tokens=np.array(outputs),
        max_new_tokens=np.array(MOST_OUTPUT),
        priority=np.arange(count),
        tpot_slo_s=np.full(count, math.inf),
        ttft_slo_s=np.full(count, math.inf),
    )
    simulation, recorded = Simulation(machine, settings, load), Recorded()
    mode: Any = simulation.mode
    _use(mode.iteration, Unlearning(limits.model, hardware), policy)
    with recorded.recording:
        simulation.run()
    return recorded


@pytest.mark.parametrize(("device_blocks", "conservativeness"), [(40, 0.1), (30, 0.3), (40, 1.0)])
@pytest.mark.parametrize("policy", POLICIES)
def test_one_load_meets_the_same_decisions_on_sglangs_scheduler_and_in_the_simulator(
    simulation: Any, policy: str, device_blocks: int, conservativeness: float
) -> None:
    server = dataclasses.replace(
        SERVER, device_blocks=device_blocks, conservativeness=conservativeness
    )
    served, outputs, limits = _served(server, POLICIES[policy]())
    simulated = _simulated(server, POLICIES[policy](), outputs, limits)
    for i, (one, other) in enumerate(zip(served.decisions, simulated.decisions, strict=False)):
        assert one == other, f"decision {i}"
    assert len(served.decisions) == len(simulated.decisions) > 100
    assert sorted(served.ended) == sorted(simulated.ended)
    assert [name for name, _, _ in sorted(served.ended)] == list(range(len(PROMPTS)))
    crowded = [d for d in served.decisions if d[0] and d[3]]
    assert len(crowded) > 30, "somebody waits while others run"
