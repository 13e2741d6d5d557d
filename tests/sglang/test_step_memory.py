"""What the machine leaves the activations of a step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ellm_sgl.memory import KVPool, PageTable, PoolShape
from ellm_sgl.memory.step_room import MARGIN_BYTES, Activations, StepRoom
from ellm_sgl.sglang import step_memory
from ellm_sgl.sglang.step_memory import StepMemory
from tests.memory.fake_arena import FakeArena

SHAPE = PoolShape(num_layers=2, layer_group=1, block_tokens=4)
UNITS = 40


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Bytes that the machine has."""
    machine = SimpleNamespace(free=1e9)
    monkeypatch.setattr(step_memory, "tightest", lambda root: machine)
    return machine


def test_a_step_does_not_count_on_what_the_pool_is_growing_by(free: SimpleNamespace) -> None:
    table = PageTable(SHAPE, UNITS, UNITS)
    table.limit_units(8)
    table.decommit_units(8)
    pool = KVPool(SHAPE, UNITS, 1, 8, torch.float32, "cpu", reserve=FakeArena, committed=8)
    memory = StepMemory(table, pool, StepRoom(Activations(), 4), 0, 0, False, 0, 1)
    before = memory.left()
    assert before <= free.free - MARGIN_BYTES
    memory.backed_units = lambda: 8 + 12  # a growth has begun since it was looked up
    assert before - memory.left() == 12 * pool.unit_bytes
    table.commit_units(20)  # and is over: the look is no newer
    assert before - memory.left() == 12 * pool.unit_bytes
    memory.backed_units = lambda: 4
    assert memory.left() == before
