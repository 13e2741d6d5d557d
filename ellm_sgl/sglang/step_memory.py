"""What the machine leaves the activations of a step, and who has its memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from ellm_sgl.budget.machine import ROOT, own_data, tightest
from ellm_sgl.memory import KVPool, PageTable
from ellm_sgl.memory.step_room import MARGIN_BYTES, BytesByOwner, StepRoom

PERIOD_S = 1.0
"""How often to look, which takes 0.1 ms."""


class StepMemory:
    """Of one rank. On CPU hosts only so far: elsewhere nothing is known to bound a step.

    Args:
        table, pool: of the device, not used so far.
        room: of steps.
        host_tier, hidden: bytes of these pools,
        in_files: bytes of both which have their memory already.
        ranks: of this server, which all take as much.
    """

    def __init__(
        self,
        table: PageTable,
        pool: KVPool,
        room: StepRoom,
        host_tier: int,
        hidden: int,
        in_files: int,
        ranks: int,
    ) -> None:
        self._table, self._pool, self._room = table, pool, room
        self._host_tier, self._hidden = host_tier, hidden
        self._lazy_host = host_tier + hidden - in_files
        self._ranks = ranks
        self.store = 0
        """Most bytes of what waits for the store on disk, or comes from it,"""
        self.queued: Callable[[], int] = lambda: 0
        """and those that wait now: their memory counts as taken."""
        self._bounded = pool.buffer.device.type == "cpu"
        self._looked_s, self._left, self._counted = -math.inf, math.inf, table.committed_units
        self.backed_units: Callable[[], int] = lambda: table.committed_units
        """Units of the pool that have memory, or may come to have it at any moment."""
        self._most_units, self._most_host_units = 0, 0
        """Ever seen in use: their memory counts as taken, that of the others is promised."""

    def left(self) -> float:
        """Bytes for one step's activations: what is free, less what the pools have been promised
        and have not used yet, and less the margin. As of the last second, less what the pool has
        grown since, and is growing."""
        now = time.monotonic()
        if self._bounded and now >= self._looked_s + PERIOD_S:
            self._looked_s, self._counted = now, self._table.committed_units
            self._left = self._free() - MARGIN_BYTES
        return self._left - max(self.backed_units() - self._counted, 0) * self._pool.unit_bytes

    def note_written(self, units: int) -> None:
        """The pool's first units have been written to, by no request."""
        self._most_units = max(self._most_units, units)

    def for_growth(self) -> float:
        """Bytes that the pool may grow by at this moment: steps keep what they need, those that
        compute prompts above all. Nothing takes it back from the pool."""
        if not self._bounded:
            return math.inf
        # What the pools were promised counts as the process's own already.
        own = own_data(ROOT) - (self.store - self.queued())
        return min(self._free(), own) - MARGIN_BYTES - self._room.kept_bytes

    def _free(self) -> float:
        return tightest(ROOT).free / self._ranks - self._promised()

    def _promised(self) -> int:
        """Bytes that will be taken: of the pools, when they are written to for the first time, and
        of the store."""
        pool, table = self._pool, self._table
        self._most_units = max(self._most_units, table.highest_unit)
        lazy = min(pool.lazy_units, table.committed_units)
        promised = pool.bytes_behind(lazy) - pool.bytes_behind(min(self._most_units, lazy))
        promised += self.store - self.queued()
        used = table.host.num_units - table.host.free_units
        self._most_host_units = max(self._most_host_units, used)
        if used < table.host.num_units:
            share = 1 - self._most_host_units / table.host.num_units
            promised += int(share * self._lazy_host)
        return promised

    def describe(self) -> BytesByOwner:
        """Who has what now."""
        staging = self._room.staged_units * self._pool.unit_bytes
        return BytesByOwner(
            kv=self._pool.bytes_behind(self._table.committed_units) - staging,
            staging=staging,
            activations=self._room.reserved_bytes,
            hidden_states=self._hidden,
            host_tier=self._host_tier,
            kv_store=self.store,
            left=int(self.left()) if self._bounded else None,
        )

    def summary(self) -> str:
        """One line, for the log."""
        found, took = self.describe(), self._room.activations
        parts = [f"KV {found.kv / 1e6:.1f} MB"]
        parts += [f"hidden states {found.hidden_states / 1e6:.1f} MB"] * (found.hidden_states > 0)
        parts += [f"host tier {found.host_tier / 1e6:.1f} MB"] * (found.host_tier > 0)
        parts += [f"KV store {found.kv_store / 1e6:.1f} MB"] * (found.kv_store > 0)
        if found.left is not None:
            parts.append(
                f"a step's activations {took.row_bytes / 1e3:.1f} kB a row, "
                f"{took.logit_row_bytes / 1e3:.1f} kB a row of logits, "
                f"of {found.left / 1e6:.0f} MB left"
            )
        return ", ".join(parts)
