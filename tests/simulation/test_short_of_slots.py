"""Slots run out before memory does: requests grow beside a prompt that is computed in chunks, with
too few of SGLang's own slots for all of them. Rarely so on a server, whose slots are many."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.simulation.configuration import Configuration
from tests.simulation.events import Arrive, Event, Step

STORY: list[Event] = [
    *(Arrive(name=name, tokens=4, output=60) for name in range(1, 7)),
    *(Step() for _ in range(6)),
    Arrive(name=7, tokens=60, output=4),
    *(Step() for _ in range(40)),
]


def failure(simulation: Any, slots: int, overlap: bool, totals: Counter[str]) -> Any:
    """Of a life with so many blocks' slots, and more than enough memory."""
    from ellm_sgl.sglang import memory

    widen = memory.widen_logical_capacity
    server = Configuration(
        device_blocks=80,
        chunk=12,
        mixed=True,
        max_running=8,
        conservativeness=0.05,  # SGLang admits the prompt as if the others grew little
        overlap=overlap,
    )

    def narrow(config: Any, *others: Any) -> None:
        widen(config, *others)
        config.max_total_num_tokens = slots * server.block_tokens

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "widen_logical_capacity", narrow)
        return simulation.failure(server, STORY, totals=totals)


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
@pytest.mark.parametrize("slots", [37, 41, 42, 44])
def test_those_who_decode_have_slots_beside_a_prompt(
    simulation: Any, slots: int, overlap: bool
) -> None:
    totals: Counter[str] = Counter()
    assert failure(simulation, slots, overlap, totals) is None
    assert totals["steps: mixed"] >= 10 and totals["retractions"] > 0


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
def test_who_finds_no_slot_all_the_same_sits_out(
    simulation: Any, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    from ellm_sgl.sglang import admission

    monkeypatch.setattr(admission, "_begun", lambda adder: 0)
    assert failure(simulation, 44, overlap, Counter()) is None
