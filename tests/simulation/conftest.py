"""SGLang's scheduler takes 12 s to import: only tests that ask for the simulation pay for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def simulation() -> Iterator[Any]:
    """The module `campaign`, in a process whose SGLang carries eLLM's hooks."""
    from tests.simulation.sglang_process import hooked

    with hooked():
        from tests.simulation import campaign

        yield campaign
