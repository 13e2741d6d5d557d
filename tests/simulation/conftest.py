"""SGLang's functions carry eLLM's hooks while the tests of this folder run, and not otherwise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _hooked() -> Iterator[None]:
    from tests.simulation.sglang_process import hooked

    with hooked():
        yield
