"""What several schedulers answer, put together."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

from ellm_sgl.client.state import resize_of, resized_to
from ellm_sgl.sglang.platform.torchvision_ops import declare
from ellm_sgl.sglang.replicas import Answer, all_of, ask_replicas, error_of, in_turn, one_of

declare()


def test_answers_are_in_the_order_of_replicas() -> None:
    asked: list[Any] = []

    async def dumper_control(request: Any) -> list[Any]:
        asked.append(request)
        return [
            SimpleNamespace(response=[{"replica": which}, {"a": which}], error="")
            for which in (1, 0)
        ]

    manager = SimpleNamespace(dumper_control=dumper_control)
    answers = asyncio.run(ask_replicas(manager, "state", {"integrity": True}))
    assert answers == [Answer(0, [{"a": 0}], ""), Answer(1, [{"a": 1}], "")]
    assert (asked[0].method, asked[0].body) == ("ellm/state", {"integrity": True})


def test_one_scheduler_says_what_it_always_said() -> None:
    alone = [Answer(0, [{"a": 1}], "")]
    assert one_of(alone) == {"a": 1} and all_of(alone) == [{"a": 1}]


def test_several_are_told_apart() -> None:
    both = [Answer(0, [{"a": 1}], ""), Answer(1, [{"a": 2}, {"a": 3}], "")]
    each = [{"replica": 0, "a": 1}, {"replica": 1, "a": 2}]
    assert one_of(both) == {"a": 1, "replicas": each}
    assert all_of(both) == [*each, {"replica": 1, "a": 3}]


def test_what_all_refuse_is_one_error_and_what_one_refuses_names_it() -> None:
    assert error_of([Answer(0, [], ""), Answer(1, [], "")]) == ""
    assert error_of([Answer(0, [], "no"), Answer(1, [], "no")]) == "no"
    told = error_of([Answer(0, [], ""), Answer(1, [], "no")])
    assert told == "replica 1: no; the other replicas have done it"
    told = error_of([Answer(0, [], "late"), Answer(1, [], "no")])
    assert told == "replica 0: late; replica 1: no"


def test_a_resize_is_as_far_as_the_last_replica() -> None:
    def state(*outcomes: str) -> dict[str, Any]:
        every = [{"resize": {"outcome": outcome, "of": i}} for i, outcome in enumerate(outcomes)]
        return every[0] if len(every) == 1 else {**every[0], "replicas": every}

    assert resize_of(state("floor")) == {"outcome": "floor", "of": 0}
    assert resize_of(state("applied", "applied"))["of"] == 0
    assert resize_of(state("applied", "under way", "ceiling"))["of"] == 1
    assert resize_of(state("applied", "floor", "ceiling"))["of"] == 2


def test_a_pool_that_came_to_another_size_is_bounded() -> None:
    def state(units: int, outcome: str = "applied") -> dict[str, Any]:
        return {"resize": {"outcome": outcome}, "device_units_total": units, "block_tokens": 16,
                "layer_groups": 2}  # fmt: skip

    assert resized_to(state(20), 160)["outcome"] == "applied"
    assert resized_to(state(20), 175)["outcome"] == "applied", "whole blocks"
    assert resized_to(state(20), 320)["outcome"] == "bounded"
    assert resized_to(state(20, "ceiling"), 320)["outcome"] == "ceiling"
    both = {**state(40), "replicas": [state(40), state(20)]}
    assert resized_to(both, 320)["outcome"] == "bounded"


WAITS = """
import sys
from ellm_sgl.sglang.replicas import in_turn
with in_turn(int(sys.argv[1])):
    print("in", flush=True)
"""


def test_a_replica_waits_for_its_turn_and_one_scheduler_does_not() -> None:
    def enter(replicas: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", WAITS, str(replicas)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    with in_turn(2):
        other = enter(2)
        alone = enter(1)  # starts later, and is through before
        assert alone.communicate(timeout=60)[0] == "in\n"
        assert other.poll() is None
    assert other.communicate(timeout=60)[0] == "in\n"
