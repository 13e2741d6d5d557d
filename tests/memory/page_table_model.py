"""The page table once more, in dictionaries and lists: what `PageTable` has to agree with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ellm_sgl.memory import NONE, PageTable, PoolShape
from ellm_sgl.memory.shape import PoolStatistics


@dataclass
class Block:
    """An allocated block."""

    units: list[int]
    """Unit of each layer group, or NONE."""
    owned: bool = True
    computed: int = 0
    """Tokens, from the first, that a forward pass has computed."""

    @property
    def missing(self) -> int:
        return self.units.count(NONE)


@dataclass
class PageTableModel:
    """Same operations as `PageTable`; which free block or unit is taken, the table decides."""

    shape: PoolShape
    num_blocks: int
    num_units: int
    limit: int
    committed: int
    """Units that have memory."""
    blocks: dict[int, Block] = field(default_factory=dict)
    sequences: dict[int, tuple[list[int], int]] = field(default_factory=dict)
    """Blocks and length of each sequence."""

    # -- operations -------------------------------------------------------------------------

    def allocate(self, taken: Sequence[int]) -> None:
        assert not self.blocks.keys() & set(taken) and len(set(taken)) == len(taken)
        assert all(1 <= block <= self.num_blocks for block in taken)
        for block in taken:
            self.blocks[block] = Block([NONE] * self.shape.num_groups)

    def release_by_owner(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.blocks[block].owned = False
        self._free_unreferenced()

    def map(self, seq_id: int, blocks: list[int], length: int) -> None:
        self.sequences[seq_id] = (blocks, length)
        self._free_unreferenced()

    def note_computed(self, seq_id: int, count: int) -> None:
        blocks, length = self.sequences[seq_id]
        for i, block in enumerate(blocks):
            tokens = min(length - i * self.shape.block_tokens, self.shape.block_tokens)
            if i * self.shape.block_tokens + tokens > length - count:
                self.blocks[block].computed = max(self.blocks[block].computed, tokens)

    def unmap(self, seq_id: int) -> None:
        self.sequences.pop(seq_id, None)
        self._free_unreferenced()

    def fitting(self, blocks: list[int]) -> list[int]:
        """The leading blocks that `place` can complete."""
        room = max(self.free_units, 0)
        for i, block in enumerate(blocks):
            room -= self.blocks[block].missing
            if room < 0:
                return blocks[:i]
        return blocks

    def place(self, block: int, units: Sequence[int]) -> None:
        """`block` has been completed: its units are now `units`."""
        before = self.blocks[block].units
        fresh = [new for new, old in zip(units, before, strict=True) if old == NONE]
        assert sorted(fresh) == self.lowest_free(len(fresh))
        assert max(fresh, default=0) <= self.limit
        assert [u for u in units if u not in fresh] == [u for u in before if u != NONE]
        self.blocks[block].units = list(units)

    def relocate(self, moves: dict[int, int], lent: Sequence[int] = ()) -> None:
        """Units are others now: the highest have moved to the lowest free ones."""
        beyond = [unit for unit in self.held_units if unit > self.limit]
        assert sorted(moves) == sorted(beyond)[len(beyond) - len(moves) :]
        assert sorted(moves.values()) == self.lowest_free(len(moves), lent)
        assert max(moves.values(), default=0) <= self.limit
        for block in self.blocks.values():
            block.units = [moves.get(unit, unit) for unit in block.units]

    def evict(self, block: int, groups: slice) -> int:
        units = self.blocks[block].units
        freed = [g for g in range(len(units))[groups] if units[g] != NONE]
        for g in freed:
            units[g] = NONE
        return len(freed)

    def adopt(self, destination: int, source: int) -> int:
        to, of = self.blocks[destination].units, self.blocks[source].units
        moved = [g for g in range(len(to)) if to[g] == NONE and of[g] != NONE]
        for g in moved:
            to[g], of[g] = of[g], NONE
        return len(moved)

    def clear(self) -> None:
        self.blocks.clear()
        self.sequences.clear()

    def _free_unreferenced(self) -> None:
        self.blocks = {b: block for b, block in self.blocks.items() if self.references(b)}

    # -- questions --------------------------------------------------------------------------

    def references(self, block: int) -> int:
        owned = block in self.blocks and self.blocks[block].owned
        return owned + sum(blocks.count(block) for blocks, _ in self.sequences.values())

    @property
    def held_units(self) -> list[int]:
        return [unit for block in self.blocks.values() for unit in block.units if unit != NONE]

    def lowest_free(self, count: int, lent: Sequence[int] = ()) -> list[int]:
        free = set(range(1, self.num_units + 1)) - set(self.held_units) - set(lent)
        return sorted(free)[:count]

    @property
    def free_units(self) -> int:
        return self.limit - len(self.held_units)

    @property
    def missing_units(self) -> int:
        return sum(block.missing for block in self.blocks.values())

    def uncached_tokens(self, seq_id: int) -> int:
        blocks, length = self.sequences[seq_id]
        return sum(
            self.blocks[blocks[t // self.shape.block_tokens]].missing > 0 for t in range(length)
        )

    def cached_ratio_mean(self) -> float:
        shares = [1 - self.uncached_tokens(s) / (n or 1) for s, (_, n) in self.sequences.items()]
        return math.fsum(shares) / len(shares) if shares else 1.0

    def statistics(self) -> PoolStatistics:
        mapped = sum(length for _, length in self.sequences.values())
        places = sum(len(b) for b, _ in self.sequences.values()) * self.shape.block_tokens
        return PoolStatistics(
            units_committed=self.committed,
            units_total=self.limit,
            units_free=max(self.free_units, 0),
            blocks_total=self.num_blocks,
            blocks_free=self.num_blocks - len(self.blocks),
            missing_units=self.missing_units,
            host_units_total=0,
            host_units_free=0,
            sequences=len(self.sequences),
            mapped_tokens=mapped,
            uncached_tokens=sum(map(self.uncached_tokens, self.sequences)),
            cached_ratio_mean=self.cached_ratio_mean(),
            occupancy=len(self.held_units) / self.limit,
            fragmentation=1 - mapped / places if places else 0.0,
        )

    # -- agreement --------------------------------------------------------------------------

    def assert_same_blocks(self, table: PageTable) -> None:
        every = range(1, self.num_blocks + 1)
        empty = [NONE] * self.shape.num_groups
        assert set(table.free_block_ids.tolist()) == set(every) - self.blocks.keys()
        assert table.references(every).tolist() == [self.references(b) for b in every]
        assert table._computed[1:].tolist() == [
            self.blocks[b].computed if b in self.blocks else 0 for b in every
        ]
        assert table.units[1:].tolist() == [
            self.blocks[b].units if b in self.blocks else empty for b in every
        ]

    def assert_same_sequences(self, table: PageTable) -> None:
        assert set(table.sequence_ids) == self.sequences.keys()
        every = list(self.sequences)
        assert table.uncached_tokens(every).tolist() == [*map(self.uncached_tokens, every)]
        for seq_id, (blocks, length) in self.sequences.items():
            assert table.blocks_of(seq_id).tolist() == blocks
            assert table.length_of(seq_id) == length
            assert table.uncached_tokens([seq_id]) == self.uncached_tokens(seq_id)

    def assert_same_counts(self, table: PageTable) -> None:
        assert table.free_units == self.free_units
        assert table.used_units == len(self.held_units)
        assert table.highest_unit == max(self.held_units, default=0)
        assert table.free_blocks == self.num_blocks - len(self.blocks)
        assert table.missing_units == self.missing_units
        assert table.statistics() == self.statistics()
