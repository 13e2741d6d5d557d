"""Requests come, decode and go in any order; what `ElasticMemory` promises holds throughout."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ellm_sgl.memory import NONE
from ellm_sgl.memory.elastic import GROWING
from ellm_sgl.memory.eviction import OWNER_AND_ONE_SEQUENCE
from tests.engine.scene import BLOCK, GROUPS, SHAPE, Scene

RATIOS = st.sampled_from([0.0, 0.25, 0.5, 0.9])

running = precondition(lambda machine: machine.scene.table.sequence_ids)


class ElasticMachine(RuleBasedStateMachine):
    """A scheduler in miniature."""

    @initialize(room=st.integers(2, 12), max_restored=st.sampled_from([2 * BLOCK, 1000]))
    def start(self, room: int, max_restored: int) -> None:
        self.ratios: dict[int, float] = {}
        self.scene = Scene(room, self.ratios, max_restored)
        self.next_id = 0

    # -- requests ---------------------------------------------------------------------------

    @rule(tokens=st.integers(1, 30), ratio=RATIOS, data=st.data())
    def admit(self, tokens: int, ratio: float, data: Any) -> None:
        """A prefill: new blocks are placed as far as possible, then mapped behind a prefix."""
        table = self.scene.table
        prefix: list[int] = []
        if table.sequence_ids:
            other = table.blocks_of(data.draw(st.sampled_from(table.sequence_ids), "shares with"))
            most = min((tokens - 1) // BLOCK, len(other) - 1)
            prefix = other[: data.draw(st.integers(0, most), "blocks")].tolist()
        if SHAPE.blocks_for(tokens) - len(prefix) > table.free_blocks:
            return
        count = SHAPE.blocks_for(tokens) - len(prefix)
        blocks = self._protected(lambda: self.scene.elastic.allocate(count))
        missing = (table.units[blocks] == NONE).any(axis=1)
        without = int(missing.sum())
        assert missing.tolist() == [True] * without + [False] * (len(blocks) - without)
        table.map(self.next_id, [*prefix, *blocks.tolist()], tokens)
        table.note_computed([self.next_id], [tokens - len(prefix) * BLOCK])
        self.ratios[self.next_id] = ratio
        self.next_id += 1

    @running
    @rule(cached=st.booleans(), data=st.data())
    def finish(self, cached: bool, data: Any) -> None:
        """The last request that uses a block leaves it free, or in the tree."""
        table = self.scene.table
        seq_id = data.draw(st.sampled_from(table.sequence_ids), "request")
        blocks = table.blocks_of(seq_id).copy()
        self.scene.elastic.forget(seq_id)
        unused = blocks[table.references(blocks) == 1].tolist()
        if cached:
            self.scene.tree += unused
        else:
            table.release(unused)

    # -- memory -----------------------------------------------------------------------------

    @running
    @rule()
    def decode(self) -> None:
        """One step: targets, room, growth, restoration."""
        table, elastic = self.scene.table, self.scene.elastic
        seq_ids = table.sequence_ids
        targets = self._bring_to_ratios(seq_ids)
        begun = [s for s in seq_ids if table.length_of(s) % BLOCK == 0]
        if len(begun) > table.free_blocks:
            return
        units = len(begun) * GROUPS
        room = self._protected(lambda: elastic.make_room(units))
        assert room == (table.free_units >= units)
        if not room:
            return
        blocks = elastic.allocate(len(begun))
        assert not table.misses_units(blocks).any()
        new = dict(zip(begun, blocks.tolist(), strict=True))
        last = [new[s] if s in new else table.blocks_of(s)[-1] for s in seq_ids]
        table.extend_each(seq_ids, np.array(last, np.int32))
        table.note_computed(seq_ids, [1] * len(seq_ids))
        self._restore(seq_ids, targets)

    @rule(units=st.integers(0, 30))
    def make_room(self, units: int) -> None:
        room = self._protected(lambda: self.scene.elastic.make_room(units))
        assert room == (self.scene.table.free_units >= units)
        if not room:
            assert not self.scene.tree

    @rule(data=st.data())
    def limit_units(self, data: Any) -> None:
        limits = st.integers(GROUPS, self.scene.table.num_units)
        self.scene.table.limit_units(data.draw(limits, "limit"))

    # -- promises ---------------------------------------------------------------------------

    @invariant()
    def table_is_sound(self) -> None:
        self.scene.table.check_integrity()

    def _protected(self, action: Any) -> Any:
        """`action`'s result; it takes nothing from blocks being filled,
        and counts what it takes from others."""
        table, totals = self.scene.table, self.scene.elastic.totals
        running = table.sequence_ids
        mapped = sorted({int(b) for s in running for b in table.blocks_of(s)})
        full = {s: table.length_of(s) // BLOCK for s in running}
        keep = np.concatenate([[0], *(table.blocks_of(s)[n:] for s, n in full.items())])
        before, evicted = table.units.copy(), totals.evicted_units
        result = action()
        assert (table.units[keep] == before[keep]).all()
        lost = (before[mapped] != NONE) & (table.units[mapped] == NONE)
        assert totals.evicted_units - evicted == np.count_nonzero(lost)
        return result

    def _bring_to_ratios(self, seq_ids: list[int]) -> npt.NDArray[np.int64]:
        """No request goes beyond its target, nor all of them beyond the bound on restored tokens.

        Returns the targets, in tokens.
        """
        lengths = np.array([self.scene.table.length_of(s) for s in seq_ids])
        ratios = np.array([self.ratios[s] for s in seq_ids])
        targets = (lengths * ratios).astype(int) // BLOCK * BLOCK
        before = self._uncached(seq_ids)
        self._protected(lambda: self.scene.bring_to_ratios(seq_ids))
        after = self._uncached(seq_ids)
        assert (after <= np.maximum(before, targets)).all()
        assert after.sum() <= max(before.sum(), self.scene.elastic.max_restored_tokens)
        return targets

    def _restore(self, seq_ids: list[int], targets: npt.NDArray[np.int64]) -> None:
        """Blocks become complete, as room beyond growth allows, down to the targets; beyond those
        only where another request wanted a shared block."""
        table, before = self.scene.table, self._uncached(seq_ids)
        restored = self.scene.restore(seq_ids)
        after = self._uncached(seq_ids)
        assert (table.units[restored] != NONE).all() and len(set(restored)) == len(restored)
        shared = np.array(restored, int)[table.references(restored) > OWNER_AND_ONE_SEQUENCE]
        for_others = [BLOCK * np.isin(table.blocks_of(s), shared).sum() for s in seq_ids]
        assert (after + for_others >= np.minimum(before, targets)).all()
        assert not restored or table.free_units >= -(-len(seq_ids) // GROWING) * GROUPS

    def _uncached(self, seq_ids: list[int]) -> npt.NDArray[np.int64]:
        return self.scene.table.uncached_tokens(seq_ids)


ElasticMachine.TestCase.settings = settings(stateful_step_count=30)
TestElasticMachine = ElasticMachine.TestCase
