"""The page table: logical token blocks of every request → physical units, per layer group.

```
 sequence (request)      blocks (logical)             units (physical), one column per layer group
 seq 7: 40 tokens  ──▶  [ 12 | 31 | 5 ]   block 12 →  [  3 | NONE ]   group 0 resident, group 1 not
                          16   16   8     block 31 →  [ 17 |   8  ]
```

Blocks are reference counted: one reference for the owner of the logical address (SGLang's
allocator: a request, later the prefix tree), plus one for every sequence that maps the block.
A block's units return to the free list at the moment its last reference goes. Only numbers live
here; the KV itself is in `KVPool`.

Units are given out lowest first, and may move (`relocate`), since nobody else keeps their numbers
between two steps. So the units beyond a frontier can do without memory:

```
 unit   1 ──────── in use ─────────┬── free ──┬── free ──────┬── no memory ── num_units
                                   used   unit_limit   committed_units
```

What a unit holds is KV only once a forward pass has computed it: the table is told so
(`note_computed`), and refuses copies of anything else.

Not thread-safe: one scheduler thread owns the table.

Over 400 lines: one table with one owner, whose every operation is checked in one place.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from collections.abc import Sequence as SequenceABC

import numpy as np
import numpy.typing as npt

from ellm_sgl.memory.host_tier import HostTier
from ellm_sgl.memory.ids import FreeList, Sequence
from ellm_sgl.memory.lacking import LackingBlocks
from ellm_sgl.memory.shape import NONE, IntArray, PoolShape, PoolStatistics, read_only

Blocks = IntArray | SequenceABC[int]

RESERVED: int = 0
"""Block 0 and unit 0 are never handed out: SGLang writes padded tokens to slot 0."""


class OutOfBlocksError(RuntimeError):
    """The logical address space is exhausted."""


class IntegrityError(RuntimeError):
    """The page table contradicts itself, or is asked to; the message says where."""


class PageTable:
    """Bookkeeping of `num_blocks` logical blocks over `num_units` physical units.

    Whatever contradicts what it holds is an `IntegrityError`, before anything is changed: a block
    that is not allocated or is listed twice, a reference or a loan that nobody has, a copy of what
    no forward pass has computed in full.

    Args:
        shape: how tokens and layers are cut.
        num_blocks: logical capacity in blocks; may exceed what the units can back.
        num_units: physical capacity in units: the most that can ever be committed.
        host_units: capacity of the host tier in units; 0 is none.
        hidden_groups: layer groups, from the lowest, whose hidden states the host keeps.
        committed: units that have memory at first, and may be used; all if None.
    """

    def __init__(
        self,
        shape: PoolShape,
        num_blocks: int,
        num_units: int,
        host_units: int = 0,
        hidden_groups: int = 0,
        committed: int | None = None,
    ) -> None:
        committed = num_units if committed is None else committed
        if num_blocks < 1 or num_units < shape.num_groups:
            raise ValueError(
                f"a pool needs at least one block ({shape.num_groups} units), "
                f"got {num_blocks} blocks and {num_units} units"
            )
        if not shape.num_groups <= committed <= num_units:
            raise ValueError(f"{committed} units committed, of {shape.num_groups} to {num_units}")
        self.shape = shape
        self._units: IntArray = np.full((num_blocks + 1, shape.num_groups), NONE, np.int32)
        self._units[RESERVED] = RESERVED
        self.units: IntArray = read_only(self._units)
        """[blocks + 1, groups]: each block's unit in each group, or `NONE`; read-only."""
        # Asked for far more often than it changes, and numpy is slow along an axis this short.
        self._missing_groups: IntArray = np.full(num_blocks + 1, shape.num_groups, np.int32)
        """Groups of each block without a unit."""
        self._missing_groups[RESERVED] = 0
        self._refs: IntArray = np.zeros(num_blocks + 1, np.int32)
        self._computed: IntArray = np.zeros(num_blocks + 1, np.int32)
        """Tokens of each block, from its first, that a forward pass has computed."""
        self._free_blocks = FreeList(num_blocks)
        self._free_units = FreeList(num_units)
        self._lent: npt.NDArray[np.bool_] = np.zeros(num_units + 1, np.bool_)
        """Units borrowed for the step in flight."""
        self.committed_units = committed
        """Units 1..so many have memory; `commit_units` and `decommit_units` change it."""
        self.unit_limit = committed
        """Units that may be used, of those committed; `limit_units` changes it."""
        self.host = HostTier(num_blocks, shape.num_groups, host_units, hidden_groups)
        self._starts: IntArray = np.zeros(num_blocks + 1, np.int32)
        self._sequences: dict[int, Sequence] = {}
        self._lacking = LackingBlocks(self._sequences, self._missing_groups)
        self.missing_units = 0
        """(block, group) pairs of allocated blocks without a unit. 0: nothing to restore."""
        self.sharing_version = 0
        """Grows when blocks may have come to be shared, or ceased to be."""
        self.layout_version = 0
        """Grows when a request may have come to have other blocks, but for more at its end, or one
        of its blocks other units than it had."""

    # -- capacity ---------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        return self._free_blocks.capacity

    @property
    def num_units(self) -> int:
        """Units for which addresses are reserved."""
        return self._free_units.capacity

    @property
    def used_units(self) -> int:
        return self._free_units.capacity - len(self._free_units)

    @property
    def free_units(self) -> int:
        """Units that `place` can give out now; negative while a lowered limit is exceeded."""
        return self.unit_limit - self.used_units

    @property
    def free_blocks(self) -> int:
        return len(self._free_blocks)

    @property
    def free_block_ids(self) -> IntArray:
        return self._free_blocks.ids

    def limit_units(self, limit: int) -> None:
        """Use at most `limit` units from now on: the pool shrinks or grows while serving.

        Units in use beyond the limit stay valid until they are evicted or freed.

        Raises:
            ValueError: fewer than one block's units, or more than are committed.
        """
        if not self.shape.num_groups <= limit <= self.committed_units:
            raise ValueError(
                f"unit limit must be between {self.shape.num_groups} and {self.committed_units}, "
                f"got {limit}"
            )
        self.unit_limit = limit

    @property
    def highest_unit(self) -> int:
        """The highest unit that is not free; 0 if all are."""
        return self._free_units.highest_taken

    def commit_units(self, count: int) -> None:
        """Units 1..`count` have memory now; not fewer than before."""
        if not self.committed_units <= count <= self.num_units:
            raise IntegrityError(
                f"commit of {count} units, where {self.committed_units} of {self.num_units} are"
            )
        self.committed_units = count

    def decommit_units(self, count: int) -> None:
        """Units beyond `count` lose their memory: none of them is in use, nor within the limit."""
        least = max(self.unit_limit, self.highest_unit)
        if not least <= count <= self.committed_units:
            raise IntegrityError(
                f"decommit beyond {count} units, of which {self.committed_units} are committed and "
                f"{least} needed"
            )
        self.committed_units = count

    def relocate(self, most: int) -> tuple[IntArray, IntArray]:
        """Move up to `most` of the units beyond the limit, the highest first, to the lowest free
        ones. Units on loan stay.

        The caller copies them before anything else is read or written.

        Returns:
            The units that they were, and those that they are now, one to one.
        """
        if self.free_units < 0:
            raise IntegrityError(f"{self.used_units} units do not fit below {self.unit_limit}")
        blocks, groups = np.nonzero(self.units > self.unit_limit)
        highest = np.argsort(-self.units[blocks, groups])[:most]
        blocks, groups = blocks[highest], groups[highest]
        sources = self.units[blocks, groups]
        targets = self._free_units.take(len(sources))
        self._units[blocks, groups] = targets
        self.layout_version += 1
        self._free_units.give(sources)
        return sources, targets

    # -- blocks -----------------------------------------------------------------------------

    def allocate(self, count: int) -> IntArray:
        """Take `count` logical blocks, one reference each, without units.

        Raises:
            OutOfBlocksError: the logical space is exhausted; nothing was taken.
        """
        if count > len(self._free_blocks):
            raise OutOfBlocksError(f"{count} blocks asked for, {len(self._free_blocks)} left")
        blocks = self._free_blocks.take(count)
        self._refs[blocks] = 1
        self.missing_units += count * self.shape.num_groups
        return blocks

    def release(self, blocks: Blocks) -> None:
        """Drop one reference from each block; a block without references is freed at once."""
        ids = np.asarray(blocks, np.int32)
        unique, counts = np.unique(ids, return_counts=True)
        if np.any(self._refs[unique] < counts):
            raise IntegrityError(f"release of a block that is not held: {unique.tolist()}")
        self._refs[unique] -= counts.astype(np.int32)
        self.sharing_version += 1
        dead = unique[self._refs[unique] == 0]
        if len(dead):
            self.missing_units -= int(self._missing_groups[dead].sum())
            self._give_back_units(dead)
            self.host.drop(dead)
            self._computed[dead] = 0
            self._free_blocks.give(dead)

    def references(self, blocks: Blocks) -> IntArray:
        """References of each block: its owner's plus one per sequence that maps it."""
        return self._refs[np.asarray(blocks, np.int32)]

    # -- units ------------------------------------------------------------------------------

    def place(self, blocks: Blocks) -> IntArray:
        """Give units to the missing groups of `blocks`, in the order given, while units last.

        Returns:
            The leading blocks that are now complete. A block is completed or left as it was.
        """
        ids = np.asarray(blocks, np.int32)
        self._refuse_unallocated(ids, "place")
        missing = self._missing_groups[ids]
        fitting = int(np.searchsorted(missing.cumsum(), max(self.free_units, 0), side="right"))
        if fitting == 0:
            return ids[:0]
        ids = ids[:fitting]
        rows, groups = np.nonzero(self.units[ids] == NONE)
        self._units[ids[rows], groups] = self._free_units.take(len(rows))
        self._lacking.came(ids[missing[:fitting] > 0])
        self._missing_groups[ids] = 0
        self.missing_units -= len(rows)
        self.host.came_back(ids)
        return ids

    def borrow_units(self, count: int) -> IntArray:
        """Take `count` free units for the duration of a step; see `return_units`."""
        if count > max(self.free_units, 0):
            raise IntegrityError(f"{count} units to borrow, {self.free_units} free")
        units = self._free_units.take(count)
        self._lent[units] = True
        return units

    def return_units(self, units: IntArray) -> None:
        """Give borrowed units back."""
        _refuse_repeated(units, "return")
        if not self._lent[units].all():
            raise IntegrityError(f"return of a unit that is not borrowed: {units.tolist()}")
        self._lent[units] = False
        self._free_units.give(units)

    def evict(self, block: int, groups: slice = slice(None)) -> int:
        """Drop the units of one block, in `groups` or in all; their KV leaves the device.

        Returns:
            Units freed.
        """
        if self._refs[block] == 0:
            raise IntegrityError(f"evict of block {block}, which is not allocated")
        row = self._units[block, groups]
        held = row[row != NONE]
        self._free_units.give(held)
        row[row != NONE] = NONE
        self.layout_version += 1
        if len(held) and self._missing_groups[block] == 0:
            self._lacking.went(np.array([block], np.int32))
        self._missing_groups[block] += len(held)
        self.missing_units += len(held)
        return len(held)

    def evict_each(self, blocks: IntArray) -> int:
        """Drop all units of each of these blocks: `evict`, in one go.

        Returns:
            Units freed.
        """
        self._refuse_unallocated(blocks, "evict")
        missing = self._missing_groups[blocks]
        freed = len(blocks) * self.shape.num_groups - int(missing.sum())
        self._lacking.went(blocks[missing == 0])
        self._give_back_units(blocks)
        self.layout_version += 1
        self.missing_units += freed
        return freed

    def adopt(self, destination: int, source: int) -> int:
        """Move units of `source` into the groups that `destination` lacks.

        Both blocks hold the same tokens at the same positions (a request computed again what
        the prefix tree had lost), so the KV is the same.

        Returns:
            Units moved.
        """
        if not self.computed_in_full([destination, source]).all():
            raise IntegrityError(
                f"adopt by block {destination} of block {source}: not both are computed in full"
            )
        gaps = (self.units[destination] == NONE) & (self.units[source] != NONE)
        self._units[destination, gaps] = self.units[source, gaps]
        self._units[source, gaps] = NONE
        self.layout_version += 1
        moved = int(np.count_nonzero(gaps))
        pair = np.array([destination, source], np.int32)
        lacked = self.misses_units(pair)
        self._missing_groups[destination] -= moved
        self._missing_groups[source] += moved
        lacks = self.misses_units(pair)
        self._lacking.came(pair[lacked & ~lacks])
        self._lacking.went(pair[lacks & ~lacked])
        self.host.came_back(destination)
        return moved

    def keep_copies(self, blocks: Blocks | int, groups: IntArray) -> IntArray:
        """Take host units for the KV of these (block, group) pairs: there is a unit to copy from,
        and no copy yet (`HostTier.keep`).

        Args:
            blocks: one for each of `groups`, or the same for all.

        Returns:
            The groups of the leading pairs that got one, to be filled by the caller.
        """
        if len(groups) == 0:
            return groups
        ids = np.broadcast_to(np.asarray(blocks, np.int32), groups.shape)
        for wrong, what in (
            (~self.computed_in_full(ids), "has not been computed in full"),
            (self.units[ids, groups] == NONE, "has no unit"),
            (self.host.units[ids, groups] != NONE, "has one"),
        ):
            if wrong.any():
                at = int(wrong.argmax())
                raise IntegrityError(f"copy of block {ids[at]}, group {groups[at]}, which {what}")
        return self.host.keep(ids, groups, self.units)

    def computed_in_full(self, blocks: Blocks) -> npt.NDArray[np.bool_]:
        """Of each block, whether forward passes have computed the KV of all its tokens."""
        computed = self._computed[np.asarray(blocks, np.int32)]
        full: npt.NDArray[np.bool_] = computed == self.shape.block_tokens
        return full

    def misses_units(self, blocks: Blocks) -> npt.NDArray[np.bool_]:
        """Of each block, whether some group has no unit: a step must restore it."""
        ids = np.asarray(blocks, np.int32)
        lacks: npt.NDArray[np.bool_]
        if len(ids) > len(self._missing_groups):
            # Shared blocks: bytes stay in the processor's cache.
            lacks = (self._missing_groups > 0).take(ids)
        else:  # `take` is twice as fast as indexing with 32-bit ids
            lacks = self._missing_groups.take(ids) > 0
        return lacks

    def holds_units(self, blocks: Blocks) -> npt.NDArray[np.bool_]:
        """Of each block, whether some group has a unit."""
        lacking = self._missing_groups[np.asarray(blocks, np.int32)]
        holds: npt.NDArray[np.bool_] = lacking < self.shape.num_groups
        return holds

    def lost(self, blocks: IntArray) -> npt.NDArray[np.bool_]:
        """Of each block, whether some group is neither on the device nor on the host,
        and can only be recomputed: in half the time that `depth` takes, numpy being slow along an
        axis this short."""
        units = self.units.take(blocks, axis=0), self.host.units.take(blocks, axis=0)
        nowhere = np.flatnonzero((units[0] == NONE) & (units[1] == NONE))
        lost = np.zeros(len(blocks), np.bool_)
        lost[nowhere // self.shape.num_groups] = True
        return lost

    def depth(self, blocks: Blocks) -> IntArray:
        """Groups, from the lowest, that a step must recompute to restore each block.

        0 when every unit is on the device or on the host; otherwise 1 + the highest group without
        either: the KV of a layer can only be recomputed through all layers below it.
        """
        ids = np.asarray(blocks, np.int32)
        missing = (self.units[ids] == NONE) & (self.host.units[ids] == NONE)
        highest = self.shape.num_groups - np.argmax(missing[:, ::-1], axis=1)
        return np.where(missing.any(axis=1), highest, 0).astype(np.int32)

    def idle_missing_units(self) -> int:
        """Those of `missing_units` that are of full blocks which nobody maps: cached prefixes."""
        if self.missing_units == 0:
            return 0
        # The owner's reference alone; new blocks are not mapped yet, but have not been computed.
        idle = (self._refs == 1) & (self._computed == self.shape.block_tokens)
        # Asked for in steps: several times as fast as indexing with the mask.
        return int((self._missing_groups * idle).sum())

    def idle_full_units(self) -> int:
        """Units of full blocks that nobody maps: cached prefixes', whether or not they may go."""
        idle = (self._refs == 1) & (self._computed == self.shape.block_tokens)
        return int(((self.shape.num_groups - self._missing_groups) * idle).sum())

    def any_idle_unit(self) -> bool:
        """Whether some block that nobody maps holds a unit."""
        held = self._missing_groups < self.shape.num_groups
        return bool((held & (self._refs == 1)).any())

    def idle_units(self, idle_tokens: int) -> int:
        """Units of cached prefixes that nobody uses: of what only the host has there are none.

        Args:
            idle_tokens: what the tree says of their length.
        """
        units = idle_tokens // self.shape.block_tokens * self.shape.num_groups
        return max(units - self.idle_missing_units(), 0) if units else 0

    def clear(self) -> None:
        """Forget every sequence and free every block."""
        self._sequences.clear()
        self._lacking.clear()
        self._refs[:] = 0
        self._computed[:] = 0
        self._units[1:] = NONE
        self._missing_groups[1:] = self.shape.num_groups
        self.missing_units = 0
        self._free_blocks = FreeList(self.num_blocks)
        self._free_units = FreeList(self.num_units)
        self._lent[:] = False
        self.host.clear()

    # -- sequences --------------------------------------------------------------------------

    def map(self, seq_id: int, blocks: Blocks, length: int) -> None:
        """Map a request's first `length` tokens to `blocks`, replacing what it had mapped.

        Raises:
            ValueError: the blocks do not fit the length.
        """
        ids = np.asarray(blocks, np.int32)
        self._refuse_unallocated(ids, "map")
        if len(ids) != self.shape.blocks_for(length):
            raise ValueError(
                f"{length} tokens need {self.shape.blocks_for(length)} blocks, got {len(ids)}"
            )
        self._refs[ids] += 1
        self.sharing_version += 1
        self.unmap(seq_id)
        self._sequences[seq_id] = sequence = Sequence(ids, length)
        self._lacking.mapped(seq_id, sequence, ids)
        self.layout_version += 1
        self._starts[ids] = np.arange(len(ids)) * self.shape.block_tokens

    def extend(self, seq_id: int, length: int, blocks: Blocks = ()) -> None:
        """Grow a request to `length` tokens; `blocks` are those that begin in the new part.

        Raises:
            ValueError: the blocks do not fit the length.
        """
        sequence = self._sequences[seq_id]
        count = sequence.count + len(blocks)
        if count != self.shape.blocks_for(length):
            raise ValueError(
                f"{length} tokens need {self.shape.blocks_for(length)} blocks, got {count}"
            )
        if len(blocks):
            ids = np.asarray(blocks, np.int32)
            self._refuse_unallocated(ids, "map")
            _refuse_mapped(ids, sequence.blocks)
            self._refs[ids] += 1
            self._starts[ids] = np.arange(sequence.count, count) * self.shape.block_tokens
            sequence.append(ids)
            self._lacking.mapped(seq_id, sequence, ids)
        sequence.length = length

    def extend_each(self, seq_ids: SequenceABC[int], blocks: IntArray) -> None:
        """Grow each of these requests by one token: what every decode step does.

        Args:
            seq_ids: each once.
            blocks: int32 [n], the block that each one's new token lies in.

        Raises:
            ValueError: a block that the next token cannot lie in.
        """
        block_tokens = self.shape.block_tokens
        sequences = [self._sequences[s] for s in seq_ids]
        places = [s.length % block_tokens for s in sequences]
        for seq_id, sequence, place, block in zip(
            seq_ids, sequences, places, blocks.tolist(), strict=True
        ):
            if place and sequence.last != block:
                raise ValueError(
                    f"sequence {seq_id} has {sequence.length} tokens: the next one lies in block "
                    f"{sequence.last}, not in {block}"
                )
        begun = [i for i, place in enumerate(places) if place == 0]
        if begun:
            self._refuse_unallocated(blocks[begun], "map")
        for i in begun:
            self._starts[blocks[i]] = sequences[i].length
            sequences[i].append(blocks[i : i + 1])
            self._lacking.mapped(seq_ids[i], sequences[i], blocks[i : i + 1])
        if begun:
            np.add.at(self._refs, blocks[begun], 1)
        for sequence in sequences:
            sequence.length += 1

    def note_computed(self, seq_ids: SequenceABC[int], counts: SequenceABC[int]) -> None:
        """A forward pass computes the last `counts` tokens of these requests, after which their
        units hold KV. To be told when the pass begins: nothing is copied while it runs."""
        block_tokens = self.shape.block_tokens
        sequences = [self._sequences[s] for s in seq_ids]
        last = [s.last for s in sequences if s.count]
        tail = [(s.length - 1) % block_tokens + 1 for s in sequences if s.count]
        for sequence, count in zip(sequences, counts, strict=True):
            first = (sequence.length - count) // block_tokens
            if first < sequence.count - 1:
                self._computed[sequence.blocks[first:-1]] = block_tokens
        # Of requests that share a block, one may hold less of it than the others.
        np.maximum.at(self._computed, last, tail)

    def note_read(self, blocks: Blocks) -> None:
        """The units of these blocks hold KV that was read from where a checked copy of it was."""
        ids = np.asarray(blocks, np.int32)
        if np.any(self._refs[ids] == 0) or self.misses_units(ids).any():
            raise IntegrityError(f"KV read into blocks without units: {ids.tolist()}")
        self._computed[ids] = self.shape.block_tokens

    def unmap(self, seq_id: int) -> None:
        """Forget a request; its blocks lose one reference each. Unknown ids are ignored."""
        sequence = self._sequences.pop(seq_id, None)
        if sequence is not None:
            self._lacking.unmapped(seq_id, sequence.blocks)
            self.release(sequence.blocks)

    @property
    def sequence_ids(self) -> list[int]:
        return list(self._sequences)

    def blocks_of(self, seq_id: int) -> IntArray:
        """Logical blocks of a request in token order. A view: valid until the next change."""
        return self._sequences[seq_id].blocks

    def starts_of(self, blocks: Blocks) -> IntArray:
        """Position of each mapped block's first token: the same in all requests that share it."""
        return self._starts[np.asarray(blocks, np.int32)]

    def length_of(self, seq_id: int) -> int:
        return self._sequences[seq_id].length

    def lengths_of(self, seq_ids: SequenceABC[int]) -> npt.NDArray[np.int64]:
        """Tokens of each of these requests."""
        lengths = [self._sequences[s].length for s in seq_ids]
        return np.array(lengths, np.int64)

    def lacking_blocks(self, seq_ids: SequenceABC[int]) -> npt.NDArray[np.int64]:
        """Blocks of each request that lack a device unit in some group."""
        if self.missing_units == 0:
            return np.zeros(len(seq_ids), np.int64)
        self._lacking.bring_up_to_date()
        return np.array([self._sequences[s].lacking for s in seq_ids], np.int64)

    def uncached_tokens(self, seq_ids: SequenceABC[int]) -> npt.NDArray[np.int64]:
        """Tokens of each request in blocks that lack a device unit: what a step must restore."""
        each = self.shape.block_tokens
        tokens = self.lacking_blocks(seq_ids) * each
        for i in tokens.nonzero()[0].tolist():
            sequence = self._sequences[seq_ids[i]]
            # A request's last block holds what is left of its length.
            if self._missing_groups[sequence.last]:
                tokens[i] -= sequence.count * each - sequence.length
        return tokens

    def uncached_on_host(self, seq_ids: SequenceABC[int]) -> npt.NDArray[np.int64]:
        """Those of `uncached_tokens` whose KV the host has wherever the device does not: a step can
        fetch them and has to recompute none of their layers."""
        tokens = np.zeros(len(seq_ids), np.int64)
        if self.host.free_units == self.host.num_units:  # nothing is kept
            return tokens
        lacking = self.lacking_blocks(seq_ids)
        if lacking.any():
            kept = ~self.lost(self.missing_of_each(seq_ids))  # full blocks: no others are copied
            tokens[:] = _counted(kept, lacking.cumsum()) * self.shape.block_tokens
        return tokens

    def missing_blocks(self, seq_ids: Iterable[int]) -> IntArray:
        """Blocks of these requests that lack a device unit, ascending, each once."""
        found = self.missing_of_each(seq_ids)
        found.sort()
        repeated = found[1:] == found[:-1]
        return np.unique(found) if repeated.any() else found  # which takes three times as long

    def missing_of_each(self, seq_ids: Iterable[int]) -> IntArray:
        """Blocks that lack a device unit, once for each of these requests that has them."""
        if self.missing_units == 0:
            return np.empty(0, np.int32)
        sequences = map(self._sequences.__getitem__, seq_ids)
        blocks = [s.blocks for s in sequences if self._lacking.may_lack(s)]
        if not blocks:
            return np.empty(0, np.int32)
        every = np.concatenate(blocks)
        lacking: IntArray = every[self.misses_units(every)]
        return lacking

    # -- reports ----------------------------------------------------------------------------

    def statistics(self) -> PoolStatistics:
        """What the table holds now. Cheap enough to be asked for between two steps."""
        lengths = self.lengths_of(self.sequence_ids)
        uncached = self.uncached_tokens(self.sequence_ids)
        mapped = int(lengths.sum())
        places = sum(s.count for s in self._sequences.values()) * self.shape.block_tokens
        return PoolStatistics(
            units_committed=self.committed_units,
            units_total=self.unit_limit,
            units_free=max(self.free_units, 0),
            blocks_total=self.num_blocks,
            blocks_free=len(self._free_blocks),
            missing_units=self.missing_units,
            host_units_total=self.host.num_units,
            host_units_free=self.host.free_units,
            sequences=len(self._sequences),
            mapped_tokens=mapped,
            uncached_tokens=int(uncached.sum()),
            cached_ratio_mean=_mean(1 - uncached / np.maximum(lengths, 1)),
            occupancy=self.used_units / self.unit_limit,
            fragmentation=1 - mapped / places if places else 0.0,
        )

    def digest(self) -> str:
        """The same for tables that map the same blocks to the same units, on device and host."""
        found = hashlib.blake2b(digest_size=16)
        for array in (self.units, self.host.units, self._refs):
            found.update(array.tobytes())
        return found.hexdigest()

    def check_integrity(self) -> None:
        """Prove that every unit is free or owned exactly once, and every reference is owed."""
        owned = self.units[1:][self.units[1:] != NONE]
        lent = np.flatnonzero(self._lent).astype(np.int32)
        accounted = np.concatenate([owned, lent, self._free_units.ids])
        if not np.array_equal(np.sort(accounted), np.arange(1, self.num_units + 1)):
            raise IntegrityError("units: some unit is lost, or owned more than once")
        if len(self._free_units) != len(self._free_units.ids):
            raise IntegrityError("units: some unit was given back more than once")
        if not max(self.unit_limit, self.highest_unit) <= self.committed_units <= self.num_units:
            raise IntegrityError("units: one without memory is in use, or within the limit")
        free = np.zeros(self.num_blocks + 1, bool)
        free[self._free_blocks.ids] = True
        if int(free.sum()) != len(self._free_blocks):
            raise IntegrityError("blocks: some block is on the free list more than once")
        if np.any(free[1:] != (self._refs[1:] == 0)):
            raise IntegrityError("blocks: a free block is referenced, or a held one is free")
        if np.any(self.units[free] != NONE):
            raise IntegrityError("blocks: a free block still holds units")
        allocated = ~free
        allocated[RESERVED] = False
        if int(np.count_nonzero(self.units[allocated] == NONE)) != self.missing_units:
            raise IntegrityError("units: the count of missing units is wrong")
        if np.any(self._missing_groups != np.count_nonzero(self.units == NONE, axis=1)):
            raise IntegrityError("units: the count of units that a block lacks is wrong")
        if np.any(self._computed[free] != 0):
            raise IntegrityError("blocks: a free block counts as computed")
        if wrong := self.host.contradiction(allocated, self.units):
            raise IntegrityError(wrong)
        if np.any(self.host.units[self._computed < self.shape.block_tokens] != NONE):
            raise IntegrityError("host units: a copy of a block not computed in full")
        mapped = np.zeros_like(self._refs)
        for seq_id, sequence in self._sequences.items():
            if sequence.count != self.shape.blocks_for(sequence.length):
                raise IntegrityError(f"sequence {seq_id}: blocks do not fit its length")
            np.add.at(mapped, sequence.blocks, 1)
        if np.any(mapped > self._refs):
            raise IntegrityError("blocks: a sequence maps a block it holds no reference to")
        if np.any(self._refs - mapped > 1):
            raise IntegrityError("blocks: some reference is neither a sequence's nor the owner's")
        if wrong := self._lacking.contradiction():
            raise IntegrityError(wrong)

    # -- internals --------------------------------------------------------------------------

    def _give_back_units(self, blocks: IntArray) -> None:
        units = self.units[blocks]
        self._free_units.give(units[units != NONE])
        self._units[blocks] = NONE
        self._missing_groups[blocks] = self.shape.num_groups

    def _refuse_unallocated(self, blocks: IntArray, what: str) -> None:
        _refuse_repeated(blocks, what)
        if not self._refs[blocks].all():
            raise IntegrityError(f"{what} of a block that is not allocated: {blocks.tolist()}")


def _counted(found: npt.NDArray[np.bool_], ends: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many there are before each end and after the one before."""
    counts: npt.NDArray[np.int64] = found.nonzero()[0].searchsorted(ends)
    counts[1:] -= counts[:-1].copy()
    return counts


def _refuse_repeated(ids: IntArray, what: str) -> None:
    if len(ids) > 1 and _distinct(ids) < len(ids):
        raise IntegrityError(f"{what}: some id is listed more than once in {ids.tolist()}")


def _refuse_mapped(ids: IntArray, mapped: IntArray) -> None:
    """Where a sequence that has `mapped` is to get `ids`: mostly one, which is compared faster."""
    repeated = (mapped == ids[0]).any() if len(ids) == 1 else np.isin(ids, mapped).any()
    if repeated:
        raise IntegrityError(f"map: some id of {ids.tolist()} is mapped by the sequence already")


def _distinct(ids: IntArray) -> int:
    """How many different ones; up to some hundreds are counted faster by Python."""
    return len(set(ids.tolist())) if len(ids) <= 512 else len(np.unique(ids))


def _mean(shares: npt.NDArray[np.float64]) -> float:
    """1 of none; the same in whatever order."""
    return math.fsum(shares.tolist()) / len(shares) if len(shares) else 1.0
