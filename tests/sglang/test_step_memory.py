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
    memory = StepMemory(table, pool, StepRoom(Activations(), 4), 0, 0, 0, 1)
    before = memory.left()
    assert before <= free.free - MARGIN_BYTES
    memory.backed_units = lambda: 8 + 12  # a growth has begun since it was looked up
    assert before - memory.left() == 12 * pool.unit_bytes
    table.commit_units(20)  # and is over: the look is no newer
    assert before - memory.left() == 12 * pool.unit_bytes
    memory.backed_units = lambda: 4
    assert memory.left() == before


def test_what_calibration_has_written_to_is_not_promised_once_more(free: SimpleNamespace) -> None:
    table = PageTable(SHAPE, UNITS, UNITS)
    pool = KVPool(SHAPE, UNITS, 1, 8, torch.float32, "cpu", reserve=FakeArena)

    def made() -> StepMemory:
        return StepMemory(table, pool, StepRoom(Activations(), 4), 0, 0, 0, 1)

    before, memory = made().left(), made()
    memory.note_written(10)
    assert memory.left() - before == pool.bytes_behind(10) - pool.bytes_behind(0)


def test_of_the_host_tier_what_is_in_files_has_its_memory(free: SimpleNamespace) -> None:
    """Hidden states on the device have none, whatever file there is for KV."""
    table = PageTable(SHAPE, UNITS, UNITS, host_units=8)
    pool = KVPool(SHAPE, UNITS, 1, 8, torch.float32, "cpu", reserve=FakeArena)

    def left(in_files: int) -> float:
        return StepMemory(table, pool, StepRoom(Activations(), 4), 700, 300, in_files, 1).left()

    assert left(1000) - left(0) == 1000
    assert left(700) - left(0) == 700


@pytest.mark.parametrize("planned", [None, (8, 8), (512, 1), (80, 80)])
def test_growth_leaves_prompts_a_whole_chunk(
    free: SimpleNamespace, planned: tuple[int, int] | None
) -> None:
    """Also where the last step only decoded, and where there has been none; steps that took more
    keep it."""
    table = PageTable(SHAPE, UNITS, UNITS)
    pool = KVPool(SHAPE, UNITS, 1, 8, torch.float32, "cpu", reserve=FakeArena)
    room = StepRoom(Activations(row_bytes=1e4, logit_row_bytes=1e5, step_bytes=1e6), 4)
    room.chunk_rows = 256
    memory = StepMemory(table, pool, room, 0, 0, 0, 1)
    if planned is not None:
        room.reserve(*planned, 0)
    free.free -= memory.for_growth()  # which the pool takes, all of it
    assert memory.left() >= room.reserved_bytes
    room.left_bytes = memory.left()
    decoding = 0 if planned is None else planned[1]
    room_beside = room.for_prompts(0) - room.activations.bytes_of_rows(0, decoding)
    assert room.rows(room_beside) >= 256
