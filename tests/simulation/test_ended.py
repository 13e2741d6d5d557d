"""A policy hears of each request's end, and of how it ended, once."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from ellm_sgl.policies import EndedRequest
from tests.simulation.configuration import Configuration
from tests.simulation.events import Abort, Arrive, Event, Step
from tests.simulation.policy import Scripted

STORY: list[Event] = [
    Arrive(name=1, tokens=6, output=3),
    Arrive(name=2, tokens=6, output=40),
    Arrive(name=3, tokens=6, output=40),
    Step(admit=2),
    Step(admit=0),
    Step(admit=0),
    Abort(3),  # it waits,
    Abort(2),  # and this one runs
    Step(admit=0),
    Arrive(name=4, tokens=6, output=1),  # ends with the step that computes its prompt
    Step(),
]


class Hears(Scripted):
    def __init__(self) -> None:
        super().__init__()
        self.heard: dict[int, EndedRequest] = {}

    def ended(self, request: EndedRequest) -> None:
        assert request.request_id not in self.heard
        self.heard[request.request_id] = request


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("radix", [False, True])
def test_a_policy_hears_of_each_requests_end_once(
    simulation: Any, overlap: bool, radix: bool
) -> None:
    from tests.simulation.life import Agreement, Life

    server = Configuration(layers=4, radix=radix, overlap=overlap, max_running=4, device_blocks=40)
    life, policy = Life(server, STORY, 0, Agreement()), Hears()
    iteration = life.plane.context.iteration
    assert iteration is not None
    controller = iteration.controller
    controller.switch(policy)
    life.scripted = policy
    life.live()
    outputs = {name: len(life.scheduler.reqs[f"r{name}."].output_ids) for name in (1, 2, 4)}
    heard = dict(policy.heard)
    life.scheduler.reqs.clear()
    gc.collect()
    life._ours.note_gone()
    waiting = list(controller.guard._ended)
    heard |= {request.request_id: request for request in waiting}
    assert heard == {
        1: EndedRequest(1, 3, aborted=False),
        2: EndedRequest(2, outputs[2], aborted=True),
        3: EndedRequest(3, 0, aborted=True),
        4: EndedRequest(4, 1, aborted=False),
    }
    assert 1 <= outputs[2] < 40
