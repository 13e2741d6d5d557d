"""The pool shrinks and grows while it serves, a bounded step between every two of the model's.

```
 shrink:  lower the limit ─▶ drop idle prefixes, evict ─▶ move the tail down ─▶ decommit
 grow:    commit, on a thread of its own ─▶ publish what all ranks have committed ─▶ raise the limit
 yield:   lower the limit ─▶ drop idle prefixes, no more ─▶ move the tail down ─▶ decommit
```

A shrink ends at what was asked for, or at the floor: what is left cannot be evicted, or a step
could not restore it beside what else may come to be missing. So nobody is retracted for it. A
growth ends at what was asked for, or at the ceiling: the machine gives no more. Where it comes to
have less than it had, the pool yields what no request has, and is at its ceiling.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from enum import StrEnum

import torch

from ellm_sgl.memory.elastic import ElasticMemory
from ellm_sgl.memory.pool import KVPool

logger = logging.getLogger(__name__)

STEP_BYTES = 64 << 20
"""What one step evicts: a few milliseconds. It frees prefixes and moves as much, or more where the
model's own step takes long: see `Resizer._units_to_move`."""
MOVED_PART = 4
"""Of what requests have, this part is moved between two steps. Measured (`bench resize`): all of it
makes a stream's longest pause 3.6 steps of the model, a half 2.3, a quarter 1.8."""
DECOMMIT_BYTES = 1 << 30
"""What one step gives back: likewise."""
COMMIT_BYTES = 32 << 20
"""What is committed at once, before it can be published: 2 ms, or where a virtual machine has to
get the memory first, 70. So little of it is for Python, whose lock steps have, that it need not be
had sooner than after the 5 ms that they may keep it."""
COMMIT_NICE = 5
"""By so much lower is the priority of the thread that commits: a quarter of a core where steps take
all of them. On a par with these it would hold them up by a scheduler's slice at a time."""

RETRY_STEPS = 256
"""Steps after which a pool at its ceiling tries to grow again: others may have given memory back.
In steps, not seconds: all ranks have to begin in the same one."""

Submit = Callable[[Callable[[], None]], Future[None]]
"""Runs a function on a thread of its own."""

Copy = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(target, target units, source, source units): copies units, one to one."""

Spare = Callable[[], float]

Agree = Callable[[list[int]], list[int]]
"""The least of each of these numbers over all ranks, all of which call it in the same steps."""


class Outcome(StrEnum):
    """What has become of a size that was asked for."""

    UNDER_WAY = "under way"
    APPLIED = "applied"
    FLOOR = "floor"
    """The pool is larger, and shrinks no more,"""
    CEILING = "ceiling"
    """or smaller, and grows no more."""


class Resizer:
    """Brings a pool to the size that was last asked for. All ranks ask for the same in the same
    step, and come to the same page table.

    Args:
        elastic: memory, of the pool's page table.
        pool: one without an arena only ceases to be used, and its units stay where they are.
        copy: moves units within the pool, before it returns.
        submit: takes what commits.
        agree: with the other ranks.
        spare: bytes that the pool may grow by, beside what the next step takes; asked on the
            thread that commits, as it begins.
        tries_again: at the ceiling, from time to time; else who asked has to ask again.
    """

    def __init__(
        self,
        elastic: ElasticMemory,
        pool: KVPool,
        copy: Copy,
        submit: Submit,
        agree: Agree,
        spare: Spare = lambda: math.inf,
        tries_again: bool = False,
    ) -> None:
        self._elastic, self._pool, self._spare = elastic, pool, spare
        self._tries_again = tries_again
        self._copy, self._submit, self._agree = copy, submit, agree
        self._growth: _Growth | None = None
        self._units_per_step = max(STEP_BYTES // pool.unit_bytes, 1)
        self.start_units = elastic.table.unit_limit
        """The pool's size at first."""
        self.wanted_units = self.start_units
        """As last asked for,"""
        self.outcome = Outcome.APPLIED
        """and what has become of it."""
        self._yields_to: int | None = None
        """Units that the machine has left it, while it comes to them."""
        self._seen_bytes = math.inf
        """`StepRoom.left_bytes` in the turn before."""
        self._grown = False
        """Since these changed: they may be of an older look, less what it has grown by."""
        self._steps_at_ceiling = 0
        self._told = False
        """That the machine gave no more for what was last asked for."""
        self._logged: tuple[Outcome, int, int] | None = None
        """What it came to, of how much, as last told in the log."""
        self.commit_s_per_unit = 0.0
        """What committing took when the pool last grew, in seconds; 0 before."""

    @property
    def limit_units(self) -> int:
        """Units that may be in use."""
        return self._elastic.table.unit_limit

    @property
    def coming_units(self) -> int:
        """Units that it comes to: what was asked for, unless it yields."""
        return self.wanted_units if self._yields_to is None else self._yields_to

    @property
    def used_units(self) -> int:
        """Units that are."""
        return self._elastic.table.used_units

    @property
    def backed_units(self) -> int:
        """Units that have memory here, or may come to have it at any moment."""
        growing = 0 if self._growth is None else self._growth.last
        return max(self._elastic.table.committed_units, growing)

    def ask(self, units: int, idle: bool = False) -> None:
        """Bring the limit to so many units. Takes the place of what was asked for before.

        Args:
            units: whole blocks'.
            idle: see `step`, the first of which is taken here.

        Raises:
            ValueError: fewer than one block's units, or more than are reserved.
        """
        table = self._elastic.table
        if not table.shape.num_groups <= units <= table.num_units:
            raise ValueError(f"{units} units, of {table.shape.num_groups} to {table.num_units}")
        if units != self.wanted_units:
            self._told = False
        self.wanted_units, self.outcome = units, Outcome.UNDER_WAY
        self._yields_to = None
        if self._growth is not None:
            self._growth.stop()
        self.step(idle)

    def step(self, idle: bool = False) -> None:
        """Go on, as far as one step goes, between two steps of the model.

        Args:
            idle: nobody waits for a step of the model: go on to the end, unless memory has yet to
                be committed. (A server with nothing to do sleeps between two turns.)
        """
        if self.outcome is Outcome.CEILING and self._tries_again:
            self._steps_at_ceiling += 1
            if self._steps_at_ceiling % RETRY_STEPS == 0:
                self.outcome = Outcome.UNDER_WAY
        self._begin_to_yield()
        while self.outcome is Outcome.UNDER_WAY:
            further = self._step()
            if not (idle and further):
                return

    def _step(self) -> bool:
        """Returns whether it got any further by itself."""
        if self._growth is not None and not self._publish(self._growth):
            return False
        table = self._elastic.table
        self._raise_limit()
        if self.coming_units > table.committed_units:
            first, last = table.committed_units, self.wanted_units
            self._growth = _Growth(self._pool, first, last, self._submit, self._spare)
            return False
        lowered = self.coming_units < table.unit_limit and self._lower_limit()
        goes_on = lowered and self.coming_units < table.unit_limit
        return self._give_back_tail(Outcome.UNDER_WAY if goes_on else self._end()) or lowered

    def _end(self) -> Outcome:
        """What a shrink comes to that gets no further."""
        if self.wanted_units == self.limit_units:
            return Outcome.APPLIED
        return Outcome.FLOOR if self.limit_units > self.wanted_units else Outcome.CEILING

    # -- shrink -----------------------------------------------------------------------------

    def _begin_to_yield(self) -> None:
        """Where the machine, or the container, has come to leave prompts too little: with units
        that are free or idle prefixes', but for those that the coming steps begin. Of each look at
        memory once: the next one sees what has gone back."""
        table, room = self._elastic.table, self._elastic.room
        seen, self._seen_bytes = self._seen_bytes, room.left_bytes
        if room.left_bytes == seen or self.outcome not in (Outcome.APPLIED, Outcome.CEILING):
            return
        grown, self._grown = self._grown, False
        short = math.ceil(room.short_bytes / self._pool.unit_bytes)
        if grown or short == 0:
            return
        groups = table.shape.num_groups
        begun = table.shape.blocks_for(room.chunk_rows) + len(table.sequence_ids)
        spare = table.free_units + table.idle_full_units() - begun * groups
        units = -(-min(short, spare) // groups) * groups
        if units > 0:
            self._yields_to = table.unit_limit - units
            self.outcome, self._steps_at_ceiling = Outcome.UNDER_WAY, 0

    def _lower_limit(self) -> bool:
        """Evict for one step's worth of units; returns whether that got any further. A pool that
        yields drops prefixes alone: what requests have costs more than small chunks do."""
        table, elastic, before = self._elastic.table, self._elastic, self._elastic.table.unit_limit
        used = min(table.used_units, before)
        table.limit_units(max(self.coming_units, used - self._units_to_move()))
        elastic.reclaim_prefixes(0)
        evicted = min(-table.free_units, self._evictable_units(), self._units_per_step)
        if evicted > 0 and self._yields_to is None:
            table.limit_units(table.used_units - evicted)
            elastic.make_room(0)
        table.limit_units(max(table.unit_limit, table.used_units))
        return table.unit_limit < before

    def _units_to_move(self) -> int:
        """Units that one step frees or moves: all that requests have is read by every step of the
        model, and to copy a part of it takes no longer than that."""
        table = self._elastic.table
        tokens = int(table.lengths_of(table.sequence_ids).sum())
        in_use = table.shape.blocks_for(tokens) * table.shape.num_groups
        return max(self._units_per_step, in_use // MOVED_PART)

    def _evictable_units(self) -> int:
        """Units that may go until half of what a step can restore is missing: the other half is
        for what requests that grow will evict."""
        table = self._elastic.table
        tokens = int(table.uncached_tokens(table.sequence_ids).sum())  # shared ones count for each
        missing = table.shape.blocks_for(tokens)
        most = self._elastic.restorable_tokens(0) // 2 // table.shape.block_tokens
        return max(most - missing, 0) * table.shape.num_groups

    def _give_back_tail(self, then: Outcome) -> bool:
        """Move what lies beyond the limit below it, and decommit the rest; `then` is the outcome
        once that is done. Returns whether anything was moved or decommitted."""
        table, pool = self._elastic.table, self._pool
        if pool.arena is None:
            self._came_to(then)
            return False
        # While more is to be evicted, that may be what would be moved.
        moved = 0 if then is Outcome.UNDER_WAY else self._move_tail()
        committed, chunk = table.committed_units, max(DECOMMIT_BYTES // pool.unit_bytes, 1)
        frontier = max(table.unit_limit, table.highest_unit, committed - chunk)
        table.decommit_units(frontier)
        pool.decommit(frontier, committed)
        if frontier == table.unit_limit:
            self._came_to(then)
        return moved > 0 or frontier < committed

    def _move_tail(self) -> int:
        """Returns units moved."""
        sources, targets = self._elastic.table.relocate(self._units_to_move())
        if len(sources):
            buffer = self._pool.buffer
            to, of = torch.from_numpy(targets), torch.from_numpy(sources)
            self._copy(buffer, to.long(), buffer, of.long())
            self._elastic.totals.relocated_units += len(sources)
        return len(sources)

    # -- grow -------------------------------------------------------------------------------

    def _publish(self, growth: _Growth) -> bool:
        """Use what all ranks have committed; returns whether the growth is over on all of them."""
        table = self._elastic.table
        mine = growth.over  # first: nothing is committed after it
        units, over, most = self._agree([growth.committed, mine, growth.most])
        table.commit_units(units)
        self._raise_limit()
        growth.end_at(most)
        self.commit_s_per_unit = growth.seconds_per_unit or self.commit_s_per_unit
        if not over:
            return False
        self._growth, self._grown = None, True
        self._pool.decommit(units, growth.committed)  # what other ranks do not have
        if most < growth.last and units < self.wanted_units:
            self._tell(growth.problem or "on another rank")
            self._came_to(Outcome.CEILING)
        return self.outcome is Outcome.UNDER_WAY

    def _tell(self, reason: BaseException | str) -> None:
        """Once for what was asked for, however often it is tried."""
        if not self._told:
            logger.warning("eLLM pool: no memory to grow further (%s)", reason)
        self._told = True

    def _raise_limit(self) -> None:
        table = self._elastic.table
        limit = min(self.coming_units, table.committed_units)
        table.limit_units(max(table.unit_limit, limit))

    # -- both -------------------------------------------------------------------------------

    def _came_to(self, outcome: Outcome) -> None:
        self.outcome = outcome
        if outcome is Outcome.UNDER_WAY:
            return
        self._yields_to = None
        table, shape = self._elastic.table, self._elastic.table.shape
        came = outcome, self.wanted_units, table.unit_limit
        if came == self._logged:  # a shared budget asks again and again for what it is not given
            return
        self._logged = came
        logger.info(
            "eLLM pool: %d tokens asked for, room for %d now (%s); %.1f MB committed",
            shape.tokens_in(self.wanted_units), shape.tokens_in(table.unit_limit), outcome,
            self._pool.bytes_behind(table.committed_units) / 1e6,
        )  # fmt: skip


class _Growth:
    """Units that get memory while steps run.

    Args:
        pool: whose.
        first: units that have it before, and
        last: after.
        submit: takes what commits.
        spare: as of `Resizer`.
    """

    def __init__(self, pool: KVPool, first: int, last: int, submit: Submit, spare: Spare) -> None:
        self.committed = first
        """Units that have memory by now."""
        self._pool, self.last, self._spare = pool, last, spare
        self._chunk = max(COMMIT_BYTES // pool.unit_bytes, 1)
        self._end = last
        self.seconds_per_unit = 0.0
        """As measured so far."""
        self._future = submit(self._commit)

    def _commit(self) -> None:
        first, spare, began = self.committed, self._spare(), time.perf_counter()
        while self.committed < self._end:
            end = min(self.committed + self._chunk, self.last)
            # Others may take from it, too, while this goes on.
            left = min(spare - (self.committed - first) * self._pool.unit_bytes, self._spare())
            if (end - self.committed) * self._pool.unit_bytes > left:
                left = max(int(left), 0)
                raise MemoryError(f"{left:,} bytes were left beside a step's activations")
            self._pool.commit(self.committed, end)
            self.committed = end
            self.seconds_per_unit = (time.perf_counter() - began) / (end - first)

    def stop(self) -> None:
        """Commit no more than what has been begun."""
        self._end = 0

    def end_at(self, units: int) -> None:
        """Commit no more than so many units, and what has been begun: another rank has no more."""
        self._end = min(self._end, units)

    @property
    def most(self) -> int:
        """Units that may have memory in the end: `last`, or as many as there are for now that the
        machine gives no more."""
        return self.last if self.problem is None else self.committed

    @property
    def over(self) -> bool:
        """Whether nothing more is committed."""
        return self._future.done()

    @property
    def problem(self) -> BaseException | None:
        """Why no more could be committed."""
        return self._future.exception() if self._future.done() else None
