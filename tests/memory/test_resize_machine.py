"""Requests come, decode and go while the pool shrinks and grows: what is read is what was written,
nothing is lost, and every change of size comes to an end."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ellm_sgl.kernels.torch_paged import copy_units
from ellm_sgl.memory import NONE, KVPool, Outcome, Resizer
from ellm_sgl.memory.step_room import Activations
from tests.engine.scene import BLOCK, GROUPS, SHAPE, Scene
from tests.memory.fake_arena import FakeArena, small_steps
from tests.simulation.transfers import LateWorker

UNIT = 64
"""Bytes."""

running = precondition(lambda machine: machine.scene.table.sequence_ids)


class ResizeMachine(RuleBasedStateMachine):
    """Every unit holds a number of its block and group."""

    @initialize(
        room=st.integers(2, 12),
        max_restored=st.sampled_from([2 * BLOCK, 8 * BLOCK, 1000]),
        granule=st.sampled_from([UNIT, 3 * UNIT, UNIT // 2]),
        step=st.integers(1, 6),
        start=st.integers(1, 12),
    )
    def start(self, room: int, max_restored: int, granule: int, step: int, start: int) -> None:
        self.patched = small_steps(step * UNIT)
        self.patched.start()
        self.scene = Scene(room, max_restored=max_restored, start=min(start, room))
        self.table = self.scene.table
        self.pool = KVPool(
            SHAPE, self.table.num_units, 1, 1, torch.float32, "cpu",
            reserve=lambda nbytes: FakeArena(nbytes, granule),
            committed=self.table.committed_units,
        )  # fmt: skip
        assert isinstance(self.pool.arena, FakeArena)
        self.arena = self.pool.arena
        self.worker = LateWorker()
        self.resizer = Resizer(
            self.scene.elastic, self.pool, copy_units, self.worker.submit, agree=list
        )
        self.next_id = 0
        memory = self.scene.elastic.room
        memory.activations, memory.chunk_rows = Activations(row_bytes=UNIT / BLOCK), 4 * BLOCK

    def teardown(self) -> None:
        if hasattr(self, "patched"):
            self._end()
            self.patched.stop()

    # -- requests ---------------------------------------------------------------------------

    @rule(tokens=st.integers(1, 30), cached=st.booleans())
    def arrive(self, tokens: int, cached: bool) -> None:
        count = SHAPE.blocks_for(tokens)
        if count > self.table.free_blocks:
            return
        blocks = self.scene.elastic.allocate(count)
        self._write()
        if cached:  # one that has ended: the tree has it
            self.scene.tree += blocks.tolist()
            return
        self.table.map(self.next_id, blocks, tokens)
        self.table.note_computed([self.next_id], [tokens])
        self.next_id += 1

    @running
    @rule(data=st.data())
    def leave(self, data: Any) -> None:
        seq_id = data.draw(st.sampled_from(self.table.sequence_ids), "request")
        blocks = self.table.blocks_of(seq_id).copy()
        self.scene.elastic.forget(seq_id)
        self.table.release(blocks)

    @running
    @rule()
    def restore(self) -> None:
        """A step computes again what there is room for."""
        self.scene.restore(self.table.sequence_ids)
        self._write()

    @rule(units=st.integers(0, 8))
    def make_room(self, units: int) -> None:
        self.scene.elastic.make_room(units)

    # -- sizes ------------------------------------------------------------------------------

    @rule(data=st.data())
    def ask(self, data: Any) -> None:
        units = data.draw(st.integers(GROUPS, self.table.num_units), "units")
        self.resizer.ask(units)

    @rule(data=st.data(), patience=st.integers(0, 3))
    def machine(self, data: Any, patience: int) -> None:
        """What memory there is, and how long it takes to get it."""
        self.worker.patience = patience
        blocks = data.draw(st.integers(0, self.table.num_units), "room")
        self.arena.room = max(blocks * UNIT, self.arena.committed)

    @rule(units=st.integers(0, 20))
    def others_take(self, units: int) -> None:
        """What they leave for a step's activations, of which a chunk takes four units."""
        self.scene.elastic.room.left_bytes = units * UNIT

    @rule()
    def step(self) -> None:
        self.worker.pass_time()
        before = len(self.table.missing_blocks(self.table.sequence_ids))
        self.resizer.step()
        missing = self.table.missing_blocks(self.table.sequence_ids)
        assert len(missing) == before or self.scene.elastic.fits_one_step(self.table.sequence_ids)

    @rule()
    def end(self) -> None:
        self._end()

    # -- promises ---------------------------------------------------------------------------

    @invariant()
    def all_is_as_it_was_written(self) -> None:
        self.table.check_integrity()
        self.arena.check()
        assert self.table.used_units <= self.table.unit_limit
        assert self.arena.committed >= self.pool.bytes_behind(self.table.committed_units)
        units = torch.from_numpy(self.table.units[1:].astype(np.int64))
        held = units != NONE
        numbers = self.pool.buffer.flatten(1)[units[held]]
        assert torch.equal(numbers, self._numbers()[held][:, None].expand_as(numbers))

    def _end(self) -> None:
        for _ in range(4 * self.table.num_units + 10):
            if self.resizer.outcome is not Outcome.UNDER_WAY:
                break
            self.step()
        table, resizer = self.table, self.resizer
        assert table.unit_limit == table.committed_units
        assert self.arena.committed == self.pool.bytes_behind(table.committed_units)
        assert {
            Outcome.APPLIED: table.unit_limit == resizer.wanted_units,
            Outcome.FLOOR: table.unit_limit > resizer.wanted_units,
            Outcome.CEILING: table.unit_limit < resizer.wanted_units,
        }[resizer.outcome]

    def _numbers(self) -> torch.Tensor:
        """What each (block, group) holds, float32 [blocks, groups]."""
        return torch.arange(self.table.num_blocks * GROUPS, dtype=torch.float32).view(-1, GROUPS)

    def _write(self) -> None:
        """All units hold what they should."""
        units = torch.from_numpy(self.table.units[1:].astype(np.int64))
        held = units != NONE
        self.pool.buffer.flatten(1)[units[held]] = self._numbers()[held][:, None]


ResizeMachine.TestCase.settings = settings(stateful_step_count=30, max_examples=60)
TestResizeMachine = ResizeMachine.TestCase
