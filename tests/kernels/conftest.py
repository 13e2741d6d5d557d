"""What tests of the compiled kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ellm_sgl.kernels.cpu.library import (
    INSTRUCTION_SETS,
    ISA_VARIABLE,
    best_instruction_set,
    instruction_set,
)


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=INSTRUCTION_SETS)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The kernels of each instruction set in turn."""
    name = str(request.param)
    found = instruction_set(64, name)
    if found is None or found[1] != name:
        pytest.skip(f"this processor has no {name}")
    monkeypatch.setenv(ISA_VARIABLE, name)
    best_instruction_set.cache_clear()
    yield name
    best_instruction_set.cache_clear()
