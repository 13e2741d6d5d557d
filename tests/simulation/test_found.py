"""Lives that failed once, as they were printed: each shows a defect that has been mended."""

from __future__ import annotations

from typing import Any

import pytest

from tests.simulation.configuration import Configuration
from tests.simulation.events import Arrive, Event, Step

Life = tuple[Configuration, list[Event]]

SHARED_AND_FETCHED_AHEAD_TWICE: Life = (
    Configuration(
        layers=5,
        block_tokens=2,
        device_blocks=12,
        host_blocks=10,
        overlap=True,
        context=30,
        max_prefill=14,
    ),
    [
        Arrive(name=2, tokens=1, output=10, n=2),
        Step(),
        Arrive(name=5, tokens=6, output=12, family=1, shared=6),
        Arrive(name=6, tokens=35, output=2, family=1, shared=35),
        Step(pause=(6, 3, 4, 5), ratio=0.6, patience=1),
        Step(pause=(6, 3, 4, 5), admitted=0.9, patience=1),
        Step(pause=(6, 3, 4, 5), ratio=0.6, resting=0.999, patience=1),
        Step(pause=(6, 3, 4, 5), admitted=0.9, patience=1),
        Step(pause=(6, 3, 4, 5), patience=1),
    ],
)

SAVED_BEFORE_IT_WAS_COMPUTED: Life = (
    Configuration(
        layers=4,
        block_tokens=1,
        host_blocks=59,
        overlap=True,
        chunk=4,
        mixed=True,
        max_running=3,
        context=31,
        max_prefill=39,
    ),
    [
        Arrive(name=1, tokens=1, output=4),
        Arrive(name=2, tokens=6, output=6),
        Arrive(name=3, tokens=4, output=0),
        Arrive(name=4, tokens=10, output=3, family=1),
        Step(),
        Step(),
        Step(admitted=0.9),
        Step(pause=(1, 2, 4), recompute=1),
        Step(pause=(1, 2, 4), ratio=0.6, recompute=1),
        Step(pause=(1, 2, 4), admitted=0.9, reverse=True, recompute=1),
        Step(pause=(1, 2, 4), reverse=True, recompute=1),
    ],
)

RANKS_NUMBER_REQUESTS_DIFFERENTLY: Life = (
    Configuration(overlap=True, ranks=2, context=16),
    [
        Arrive(name=1, tokens=1, output=2, n=2),
        Step(),
        Step(),
        Step(reverse=True),
        Step(pause=(1,)),
    ],
)


@pytest.mark.parametrize(
    "life",
    [
        SHARED_AND_FETCHED_AHEAD_TWICE,
        SAVED_BEFORE_IT_WAS_COMPUTED,
        RANKS_NUMBER_REQUESTS_DIFFERENTLY,
    ],
    ids=["shared_and_fetched_ahead", "saved_uncomputed", "ranks_number_differently"],
)
def test_a_life_that_failed_once_fails_no_more(simulation: Any, life: Life) -> None:
    found = simulation.failure(*life)
    assert found is None, found
