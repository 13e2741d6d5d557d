"""Shrinking keeps what makes a life fail, and writes it as a test."""

from __future__ import annotations

from typing import Any

import pytest

from tests.simulation.configuration import Configuration
from tests.simulation.events import Abort, Arrive, Event, Flush, Resume, Step
from tests.simulation.planted import FAULTS, planted
from tests.simulation.shrink import as_test, shrink

STORY: list[Event] = [
    Step(),
    Arrive(1, 9, 4, family=2),
    Step(pause=(1, 7), ratio=0.6),
    Abort(7),
    Flush(),
    Resume(),
    Step(),
]


def test_only_what_matters_is_left() -> None:
    small = shrink(
        Configuration(layers=4, host_blocks=12, overlap=True),
        STORY,
        lambda configuration, story: (
            configuration.host_blocks > 0
            and any(isinstance(e, Step) and 7 in e.pause for e in story)
            and Flush() in story
        ),
    )
    assert small == (Configuration(host_blocks=1), [Step(pause=(7,)), Flush()])


def test_a_test_is_written_in_which_nothing_is_as_ever() -> None:
    written = as_test("found", "why", Configuration(overlap=True), [Arrive(1, 9, 4), Step()])
    assert "Configuration(overlap=True)," in written
    assert "Arrive(name=1, tokens=9, output=4)," in written
    assert "Step()," in written


@pytest.mark.slow
def test_a_failing_life_is_reported_as_a_test_that_fails_alike(simulation: Any) -> None:
    fault = next(f for f in FAULTS if "borrowed units" in f.name)
    with planted(fault):
        found = simulation.first_found(range(100))
        assert found is not None
        report = found.report(seconds=5.0)
    assert f"seed {found.seed}: {found.error}" in report
    names = "from tests.simulation.life import live\n"
    for module in ("configuration", "events"):
        names += f"from tests.simulation.{module} import *\n"
    scope: dict[str, object] = {}
    exec(names + report[report.index("def test_") :], scope)
    (pasted,) = (value for name, value in scope.items() if name.startswith("test_"))
    assert callable(pasted)
    pasted()  # passes now
    with planted(fault), pytest.raises(AssertionError) as failed:
        pasted()
    assert failed.type.__name__ in found.error
