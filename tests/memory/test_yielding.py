"""A machine, or a container, that comes to have less than it had: the pool yields what prompts need
for their activations, and has it back once it is there again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ellm_sgl.memory import Outcome
from ellm_sgl.memory.resize import RETRY_STEPS
from ellm_sgl.memory.step_room import Activations
from tests.engine.scene import BLOCK, GROUPS
from tests.memory.fake_arena import small_steps
from tests.memory.test_resize import ROOM, UNIT, Server

CHUNK = 2
"""Blocks,"""
WHOLE = 4 * UNIT
"""and the activations of so many rows: two blocks of KV."""


@pytest.fixture(autouse=True)
def _small_steps() -> Iterator[None]:
    with small_steps(4 * UNIT):
        yield


class Machine(Server):
    """That has `left` bytes beside what the pool has of it at first."""

    def __init__(self, left: int, tries_again: bool = True) -> None:
        self.left = left
        super().__init__(spare=lambda: self._free() - 2 * WHOLE, tries_again=tries_again)
        room = self.scene.elastic.room
        room.activations = Activations(row_bytes=WHOLE / CHUNK / BLOCK)
        room.chunk_rows = CHUNK * BLOCK

    def _free(self) -> int:
        return self.left + (ROOM * GROUPS - self.table.committed_units) * UNIT

    def cache(self, blocks: int) -> None:
        """Prefixes that have been computed."""
        self.scene.cache_prefix(blocks)
        self.table.note_read(self.scene.tree)

    def look(self) -> None:
        """A second has passed, in which prompts are computed."""
        self.scene.elastic.room.left_bytes = self._free()

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.look()
            self.resizer.step()
            self.table.check_integrity()

    @property
    def blocks(self) -> int:
        return self.table.unit_limit // GROUPS


def test_units_that_nobody_has_make_way_for_a_whole_chunk() -> None:
    machine = Machine(left=WHOLE // 2 - 1)
    machine.turns(10)
    machine.check()
    assert machine.resizer.outcome is Outcome.CEILING
    assert machine._free() >= 2 * WHOLE and machine.blocks == ROOM - 4
    machine.left -= WHOLE  # libc keeps what has been freed
    machine.turns(10)
    assert machine.blocks == ROOM - 4, "once is enough"


def test_a_chunk_that_lacks_less_than_half_changes_nothing() -> None:
    machine = Machine(left=WHOLE // 2)
    machine.turns(10)
    assert machine.resizer.outcome is Outcome.APPLIED and machine.blocks == ROOM


def test_each_look_at_memory_counts_once() -> None:
    """What has gone back is not seen before the next one."""
    machine = Machine(left=-UNIT)
    machine.look()
    for _ in range(10):
        machine.resizer.step()
    machine.check()
    assert machine.blocks == ROOM - 5


def test_idle_prefixes_go_and_what_requests_have_stays() -> None:
    """And what the coming steps begin: of a chunk, and a block of each request."""
    machine = Machine(left=-ROOM * GROUPS * UNIT)
    machine.scene.request(0, tokens=5 * BLOCK)
    expected = machine.fill(0)
    machine.cache(blocks=6)
    machine.turns(30)
    machine.check()
    assert not machine.scene.tree[3:] and machine.scene.uncached() == [0]
    assert torch.equal(machine.read(0), expected)
    assert machine.blocks == 5 + CHUNK + 1


def test_prefixes_that_cannot_go_end_it() -> None:
    machine = Machine(left=0)
    machine.scene.request(0, tokens=3 * BLOCK)
    machine.cache(blocks=9)
    machine.scene.tree.clear()  # somebody holds them
    machine.turns(10)
    machine.check()
    assert machine.resizer.outcome is Outcome.APPLIED and machine.blocks == ROOM
    assert machine.scene.uncached() == [0]


def test_it_has_its_size_again_when_the_memory_is_there_and_does_not_swing() -> None:
    machine = Machine(left=0)
    sizes = set()
    for _ in range(5 * RETRY_STEPS):
        machine.turns(1)
        sizes.add(machine.blocks)
    assert machine.blocks == ROOM - 4 and sizes <= set(range(ROOM - 4, ROOM + 1))
    sizes.clear()
    for _ in range(3 * RETRY_STEPS):
        machine.turns(1)
        sizes.add(machine.blocks)
    assert sizes == {ROOM - 4}
    machine.left += 2 * WHOLE
    machine.turns(RETRY_STEPS + 10)
    machine.check()
    assert machine.resizer.outcome is Outcome.APPLIED and machine.blocks == ROOM


def test_one_that_is_told_its_size_takes_it_again_when_it_is_told() -> None:
    machine = Machine(left=0, tries_again=False)
    machine.turns(10)
    machine.left += 2 * WHOLE
    machine.turns(2 * RETRY_STEPS)
    assert machine.resizer.outcome is Outcome.CEILING and machine.blocks == ROOM - 4
    machine.resizer.ask(ROOM * GROUPS)
    machine.turns(10)
    machine.check()
    assert machine.blocks == ROOM


def test_a_look_from_before_it_grew_does_not_count() -> None:
    machine = Machine(left=0, tries_again=False)
    machine.turns(10)
    old = machine._free()
    machine.left += 2 * WHOLE
    machine.resizer.ask(ROOM * GROUPS)
    machine.steps()
    machine.scene.elastic.room.left_bytes = old - 20 * UNIT
    machine.resizer.step()
    machine.turns(10)
    machine.check()
    assert machine.blocks == ROOM
    machine.left = 0
    machine.turns(10)
    assert machine.blocks == ROOM - 4


def test_what_it_comes_to_is_not_what_was_asked_for() -> None:
    machine = Machine(left=0)
    machine.look()
    machine.resizer.step()
    assert machine.resizer.outcome is Outcome.UNDER_WAY
    assert machine.resizer.coming_units == (ROOM - 4) * GROUPS
    assert machine.resizer.wanted_units == ROOM * GROUPS


def test_a_shrink_that_was_asked_for_goes_on() -> None:
    machine = Machine(left=0)
    machine.scene.request(0, tokens=4 * BLOCK)
    machine.left += UNIT
    machine.ask(4)
    machine.turns(30)
    machine.check()
    assert machine.resizer.outcome is Outcome.APPLIED and machine.blocks == 4
