"""Faults planted in the product are found within the lives that CI runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.simulation.planted import FAULTS, Fault, Misplanted, planted
from tests.simulation.test_lives import LIVES


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "_"))
def test_a_planted_fault_is_found(
    simulation: Any, fault: Fault, record_property: Callable[[str, object], None]
) -> None:
    with planted(fault):
        found = simulation.first_found([*range(fault.first, LIVES), *range(fault.first)])
    assert found is not None, f"in {LIVES} lives nobody noticed: {fault.name}"
    own = ("NameError", "UnboundLocalError", "AttributeError", "TypeError", "ImportError")
    assert found.kind not in own, f"the fault itself is broken: {found.error}"
    record_property("lives", found.seed + 1)
    record_property("error", found.error)
    assert simulation.failure(found.configuration, found.story) is None  # it was the fault


def test_the_page_has_all_of_them() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text()
    assert [fault.name for fault in FAULTS if f"\n| {fault.name} | " not in page] == []


def test_a_fault_that_no_longer_fits_the_product_is_told() -> None:
    gone = Fault("none", FAULTS[0].function, "text that is not there", "")
    with pytest.raises(Misplanted, match="adapt the fault"), planted(gone):
        pass
