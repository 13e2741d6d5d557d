"""Every operation on the page table, in any order, against `PageTableModel`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ellm_sgl.memory import IntegrityError, OutOfBlocksError, PageTable, PoolShape
from tests.memory.page_table_model import PageTableModel

SHAPES = (
    PoolShape(num_layers=1, layer_group=1, block_tokens=1),
    PoolShape(num_layers=4, layer_group=1, block_tokens=3),
    PoolShape(num_layers=3, layer_group=8, block_tokens=16),
    PoolShape(num_layers=7, layer_group=3, block_tokens=3),
    PoolShape(num_layers=8, layer_group=4, block_tokens=16),
)
SEQUENCE_IDS = range(4)

allocated = precondition(lambda machine: machine.model.blocks)
mapped = precondition(lambda machine: machine.model.sequences)


class PageTableMachine(RuleBasedStateMachine):
    """Owners' references stand for SGLang's: they may go before or after the sequences' own."""

    @initialize(shape=st.sampled_from(SHAPES), num_blocks=st.integers(1, 10), data=st.data())
    def start(self, shape: PoolShape, num_blocks: int, data: Any) -> None:
        enough = num_blocks * shape.num_groups
        num_units = data.draw(st.integers(shape.num_groups, enough), "num_units")
        self.table = PageTable(shape, num_blocks, num_units)
        self.model = PageTableModel(shape, num_blocks, num_units, num_units, num_units)

    # -- blocks -----------------------------------------------------------------------------

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        self._allocate(count)

    @allocated
    @rule(data=st.data())
    def release_by_owner(self, data: Any) -> None:
        owned = sorted(b for b, block in self.model.blocks.items() if block.owned)
        blocks = data.draw(st.lists(st.sampled_from(owned), unique=True)) if owned else []
        self.table.release(blocks)
        self.model.release_by_owner(blocks)

    @rule(data=st.data())
    def release_too_often(self, data: Any) -> None:
        block = data.draw(st.integers(0, self.model.num_blocks), "block")
        others = self._draw_blocks(data)
        with pytest.raises(IntegrityError):
            self.table.release([*others, *[block] * (self.model.references(block) + 1)])

    # -- sequences --------------------------------------------------------------------------

    @rule(seq_id=st.sampled_from(SEQUENCE_IDS), length=st.integers(0, 40))
    def admit(self, seq_id: int, length: int) -> None:
        """A new request, with units as far as they last."""
        blocks = self._allocate(self.table.shape.blocks_for(length))
        if blocks is not None:
            self._map(seq_id, blocks, length)
            self._place(blocks)

    @allocated
    @rule(seq_id=st.sampled_from(SEQUENCE_IDS), data=st.data())
    def map(self, seq_id: int, data: Any) -> None:
        blocks = self._draw_blocks(data)
        self._map(seq_id, blocks, data.draw(st.sampled_from(self._lengths(len(blocks))), "length"))

    @mapped
    @rule(seq_id=st.sampled_from(SEQUENCE_IDS), data=st.data())
    def share_prefix(self, seq_id: int, data: Any) -> None:
        """`seq_id` begins with the first blocks of another sequence."""
        blocks, length = self.model.sequences[self._draw_sequence(data)]
        count = data.draw(st.integers(0, len(blocks)), "blocks shared")
        self._map(seq_id, blocks[:count], min(count * self.table.shape.block_tokens, length))

    @mapped
    @rule(by=st.integers(0, 20), data=st.data())
    def extend(self, by: int, data: Any) -> None:
        seq_id = self._draw_sequence(data)
        blocks, length = self.model.sequences[seq_id]
        added = self._allocate(self.table.shape.blocks_for(length + by) - len(blocks))
        if added is not None:
            self.table.extend(seq_id, length + by, added)
            self.model.map(seq_id, blocks + added, length + by)

    @mapped
    @rule(steps=st.integers(1, 6), data=st.data())
    def decode(self, steps: int, data: Any) -> None:
        """Some sequences grow by a token in each step."""
        growing = data.draw(
            st.lists(st.sampled_from(sorted(self.model.sequences)), min_size=1, unique=True)
        )
        block_tokens = self.table.shape.block_tokens
        for _ in range(steps):
            held = [self.model.sequences[s] for s in growing]
            begun = [i for i, (_, length) in enumerate(held) if length % block_tokens == 0]
            added = self._allocate(len(begun))
            if added is None:
                return
            for i, block in zip(begun, added, strict=True):
                held[i] = ([*held[i][0], block], held[i][1])
            last = np.array([blocks[-1] for blocks, _ in held], np.int32)
            self.table.extend_each(growing, last)
            for seq_id, (blocks, length) in zip(growing, held, strict=True):
                self.model.map(seq_id, blocks, length + 1)

    @mapped
    @rule(data=st.data())
    def note_computed(self, data: Any) -> None:
        """A forward pass over the last tokens of some sequences."""
        chosen = data.draw(
            st.lists(st.sampled_from(sorted(self.model.sequences)), min_size=1, unique=True)
        )
        lengths = [self.model.sequences[s][1] for s in chosen]
        counts = [data.draw(st.integers(min(1, n), n), "count") for n in lengths]
        self.table.note_computed(chosen, counts)
        for seq_id, count in zip(chosen, counts, strict=True):
            self.model.note_computed(seq_id, count)

    @rule(seq_id=st.sampled_from(SEQUENCE_IDS))
    def unmap(self, seq_id: int) -> None:
        self.table.unmap(seq_id)
        self.model.unmap(seq_id)

    @mapped
    @rule(owner_first=st.booleans(), data=st.data())
    def abort(self, owner_first: bool, data: Any) -> None:
        """A request leaves, and the owner lets go of those of its blocks that it holds."""
        seq_id = self._draw_sequence(data)
        blocks = self.model.sequences[seq_id][0]
        owned = [b for b in blocks if self.model.blocks[b].owned]
        if owner_first:
            self.table.release(owned)
        self.table.unmap(seq_id)
        if not owner_first:
            self.table.release(owned)
        self.model.release_by_owner(owned)
        self.model.unmap(seq_id)

    # -- units ------------------------------------------------------------------------------

    @allocated
    @rule(data=st.data())
    def place(self, data: Any) -> None:
        self._place(self._draw_blocks(data))

    @allocated
    @rule(data=st.data())
    def evict_block(self, data: Any) -> None:
        block = self._draw_block(data)
        assert self.table.evict(block) == self.model.evict(block, slice(None))

    @allocated
    @rule(data=st.data())
    def evict_lowest_groups(self, data: Any) -> None:
        block = self._draw_block(data)
        groups = slice(0, data.draw(st.integers(0, self.table.shape.num_groups), "groups"))
        assert self.table.evict(block, groups) == self.model.evict(block, groups)

    @allocated
    @rule(data=st.data())
    def adopt(self, data: Any) -> None:
        destination, source = self._draw_block(data), self._draw_block(data)
        both = {self.model.blocks[b].computed for b in (destination, source)}
        if both != {self.table.shape.block_tokens}:
            with pytest.raises(IntegrityError, match="computed in full"):
                self.table.adopt(destination, source)
            return
        assert self.table.adopt(destination, source) == self.model.adopt(destination, source)

    @allocated
    @rule(data=st.data())
    def list_a_block_twice(self, data: Any) -> None:
        blocks = [*self._draw_blocks(data), block := self._draw_block(data), block]
        with pytest.raises(IntegrityError, match="listed more than once"):
            self.table.place(blocks)
        with pytest.raises(IntegrityError, match="listed more than once"):
            self.table.map(0, blocks, len(blocks) * self.table.shape.block_tokens)

    @rule(count=st.integers(0, 4), data=st.data())
    def borrow(self, count: int, data: Any) -> None:
        """Units that a step borrows are nobody else's until it gives them back."""
        if count > max(self.model.free_units, 0):
            with pytest.raises(IntegrityError, match="to borrow"):
                self.table.borrow_units(count)
            return
        units = self.table.borrow_units(count)
        assert not set(units.tolist()) & set(self.model.held_units)
        self.table.check_integrity()
        self.table.return_units(units)
        if count:
            with pytest.raises(IntegrityError, match="not borrowed"):
                self.table.return_units(units)

    @rule(data=st.data())
    def limit_units(self, data: Any) -> None:
        limits = st.integers(self.table.shape.num_groups, self.model.committed)
        self.model.limit = data.draw(limits, "limit")
        self.table.limit_units(self.model.limit)
        assert self.table.unit_limit == self.model.limit

    @rule(most=st.integers(0, 8))
    def relocate(self, most: int) -> None:
        if self.model.free_units < 0:
            with pytest.raises(IntegrityError, match="do not fit"):
                self.table.relocate(most)
            return
        sources, targets = self.table.relocate(most)
        assert len(sources) == len(targets) <= most
        self.model.relocate(dict(zip(sources.tolist(), targets.tolist(), strict=True)))

    @rule(count=st.integers(1, 3))
    def relocate_beside_a_loan(self, count: int) -> None:
        """What a step has borrowed stays where it is."""
        if count > self.model.free_units:
            return
        lent = self.table.borrow_units(count)
        sources, targets = self.table.relocate(8)
        moves = dict(zip(sources.tolist(), targets.tolist(), strict=True))
        self.model.relocate(moves, lent.tolist())
        self.table.return_units(lent)

    @rule(data=st.data())
    def move_the_frontier(self, data: Any) -> None:
        """Not below what is in use or may be, nor beyond what is reserved."""
        count = data.draw(st.integers(0, self.model.num_units + 1), "committed")
        if count >= self.model.committed:
            move, possible = self.table.commit_units, count <= self.model.num_units
        else:
            move = self.table.decommit_units
            possible = count >= max([self.model.limit, *self.model.held_units])
        if not possible:
            with pytest.raises(IntegrityError, match="commit"):
                move(count)
            return
        move(count)
        self.model.committed = count

    @precondition(lambda machine: len(machine.model.sequences) >= 3)
    @rule()
    def clear(self) -> None:
        self.table.clear()
        self.model.clear()

    # -- after every step -------------------------------------------------------------------

    @invariant()
    def table_agrees_with_itself(self) -> None:
        self.table.check_integrity()

    @invariant()
    def table_agrees_with_model(self) -> None:
        self.model.assert_same_blocks(self.table)
        self.model.assert_same_sequences(self.table)
        self.model.assert_same_counts(self.table)

    # -- helpers ----------------------------------------------------------------------------

    def _allocate(self, count: int) -> list[int] | None:
        """`count` new blocks, or None (and the right error) where so many are not left."""
        if count > self.model.num_blocks - len(self.model.blocks):
            with pytest.raises(OutOfBlocksError):
                self.table.allocate(count)
            return None
        blocks: list[int] = self.table.allocate(count).tolist()
        self.model.allocate(blocks)
        return blocks

    def _place(self, blocks: list[int]) -> None:
        complete = self.table.place(blocks).tolist()
        assert complete == self.model.fitting(blocks)
        for block in complete:
            self.model.place(block, self.table.units[block].tolist())

    def _map(self, seq_id: int, blocks: list[int], length: int) -> None:
        self.table.map(seq_id, blocks, length)
        self.model.map(seq_id, blocks, length)

    def _lengths(self, blocks: int) -> range:
        """Lengths that `blocks` blocks are right for."""
        block_tokens = self.table.shape.block_tokens
        return range(max((blocks - 1) * block_tokens + 1, 0), blocks * block_tokens + 1)

    def _draw_sequence(self, data: Any) -> int:
        seq_id: int = data.draw(st.sampled_from(sorted(self.model.sequences)), "sequence")
        return seq_id

    def _draw_block(self, data: Any) -> int:
        block: int = data.draw(st.sampled_from(sorted(self.model.blocks)), "block")
        return block

    def _draw_blocks(self, data: Any) -> list[int]:
        if not self.model.blocks:
            return []
        some = st.lists(st.sampled_from(sorted(self.model.blocks)), unique=True, max_size=4)
        blocks: list[int] = data.draw(some, "blocks")
        return blocks


PageTableMachine.TestCase.settings = settings(stateful_step_count=40)
TestPageTableMachine = PageTableMachine.TestCase
