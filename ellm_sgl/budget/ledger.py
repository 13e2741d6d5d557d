"""One server's part in a budget that it shares.

```
 publish   what it wants ─▶ its share, and what nobody has
 debit     before it commits memory: all that it asks for, or nothing
 credit    after it has given memory back
```

So what all have debited, and with it what all have committed, is never more than the budget. A row
that no process holds any more is free for whoever looks next.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ellm_sgl.budget.file import LedgerFile, path_of
from ellm_sgl.budget.layout import Row
from ellm_sgl.budget.share import Claim, fair_shares
from ellm_sgl.budget.waker import Waker

logger = logging.getLogger(__name__)

DEATHS_S = 0.2
"""How often to look whether servers have died, where nobody writes: that is no change of the file.
"""


@dataclass(frozen=True)
class Standing:
    """Of one server, in bytes."""

    share: int
    """What it may have,"""
    committed: int
    """what it has debited,"""
    free: int
    """and what nobody has."""
    others_lack: bool = False
    """Some other server wants more than it has."""


class Member:
    """A server that has joined a budget; for one thread at a time. Its row goes when its processes
    do.

    Args:
        name: of the budget, and
        budget: its size.
        label, port: of the server, for those who list them.
        floor: what it is promised.

    Raises (and so do all its methods):
        LedgerError: the file is not what it should be, or (here) this server has no place in it.
    """

    def __init__(
        self,
        name: str,
        budget: int,
        label: str,
        floor: int,
        port: int = 0,
        folder: Path | None = None,
    ) -> None:
        self.budget = budget
        self.index = -1
        """Its row's number, for `hold`."""
        self._file = LedgerFile(path_of(name, folder), create=True)
        self._found: tuple[int, bytes, Standing] | None = None
        """What was published last, what was in the file then, and what came of it."""
        self._looked_s = 0.0
        try:
            with self._file.locked():
                self.index = self._enter(Row(os.getpid(), port, label, floor), budget)
        except BaseException:
            self._file.close()
            raise

    def _enter(self, row: Row, budget: int) -> int:
        known, rows = self._file.read()
        rows = self._without_dead(rows)
        living = [r for r in rows if r is not None]
        if known != budget:
            if living:
                raise self._file.error(
                    f"its servers ({_named(living)}) share {known:,} bytes, not {budget:,}; give "
                    "all the same size, or end them first"
                )
            self._file.begin(budget)
        promised = sum(r.floor for r in living)
        if promised + row.floor > budget:
            raise self._file.error(
                f"a floor of {row.floor:,} bytes does not fit in {budget:,}, of which {promised:,} "
                f"are promised to others ({_named(living) or 'nobody'}); give a smaller "
                "--ellm-min-device-kv-tokens, or a larger budget"
            )
        if None not in rows:
            raise self._file.error(f"{len(rows)} servers share it, and no more can")
        index = rows.index(None)
        self._file.hold(index)
        self._file.write(index, row)
        return index

    def publish(self, want: int) -> Standing:
        """Say how much this server could use; everybody's share is reckoned anew."""
        with self._file.locked():
            rows = self._rows()
            self._reckon(rows, dataclasses.replace(self._own(rows), want=want))
            standing = self._standing(rows)
            self._found, self._looked_s = (want, self._file.contents(), standing), time.monotonic()
        return standing

    def follow(self, want: int) -> Standing:
        """As `publish`, for who asks again and again: where this server wants what it did, and
        nobody has written since, one read without a lock. Memory of servers that have died is seen
        by who asks `DEATHS_S` after the last look, or later."""
        recent = time.monotonic() < self._looked_s + DEATHS_S
        if recent and self._found is not None and self._found[:2] == (want, self._file.contents()):
            return self._found[2]
        return self.publish(want)

    def debit(self, nbytes: int) -> bool:
        """Take so many bytes more, before any of them is committed. Returns whether there were so
        many; if not, nothing has changed."""
        with self._file.locked():
            rows = self._rows()
            if nbytes > self._standing(rows).free:
                return False
            self._book(rows, nbytes)
            return True

    def credit(self, nbytes: int) -> None:
        """Give so many bytes back, after the last of them has been decommitted."""
        with self._file.locked():
            self._book(self._rows(), -nbytes)

    def waker(self) -> Waker:
        """Tells whoever sleeps that one of the servers has written to the ledger."""
        return self._file.waker()

    def others(self) -> str:
        """The other servers, and what each has, for a message."""
        with self._file.locked():
            rows = self._rows()
        return _named([r for i, r in enumerate(rows) if r is not None and i != self.index])

    # -- internals, with the lock -----------------------------------------------------------

    def _rows(self) -> list[Row | None]:
        budget, rows = self._file.read()
        if budget != self.budget or rows[self.index] is None:
            raise self._file.error("was begun anew meanwhile; restart the servers that shared it")
        return self._without_dead(rows)

    def _own(self, rows: Sequence[Row | None]) -> Row:
        row = rows[self.index]
        assert row is not None
        return row

    def _without_dead(self, rows: Sequence[Row | None]) -> list[Row | None]:
        """The rows of those who live; the others' are freed."""
        living = list(rows)
        for index, row in enumerate(rows):
            if row is not None and index != self.index and not self._file.is_held(index):
                self._file.write(index, None)
                living[index] = None
                logger.info(
                    "%s: %s (pid %d) is gone; its %d bytes are free",
                    self._file.path, row.label, row.pid, row.committed,
                )  # fmt: skip
        return living

    def _book(self, rows: list[Row | None], nbytes: int) -> None:
        own = self._own(rows)
        own = dataclasses.replace(own, committed=own.committed + nbytes)
        assert own.committed >= 0, f"a credit of {-nbytes} bytes, of {own.committed + nbytes}"
        self._file.write(self.index, own)

    def _reckon(self, rows: list[Row | None], own: Row) -> None:
        """Write everybody's share, and this server's row, where they are others: every write wakes
        all servers."""
        before = list(rows)
        rows[self.index] = own
        places = [(i, row) for i, row in enumerate(rows) if row is not None]
        claims = [Claim(row.floor, row.want, row.committed) for _, row in places]
        for (i, row), share in zip(places, fair_shares(self.budget, claims), strict=True):
            rows[i] = dataclasses.replace(row, share=share)
            if rows[i] != before[i]:
                self._file.write(i, rows[i])

    def _standing(self, rows: Sequence[Row | None]) -> Standing:
        own, taken = self._own(rows), sum(row.committed for row in rows if row is not None)
        others = (row for i, row in enumerate(rows) if row is not None and i != self.index)
        lack = any(row.want > row.committed for row in others)
        return Standing(own.share, own.committed, self.budget - taken, lack)


def hold(name: str, index: int, folder: Path | None = None) -> LedgerFile:
    """Another process of the same server: its memory is the row's, too, for as long as what is
    returned is open."""
    file = LedgerFile(path_of(name, folder), create=False)
    file.hold(index)
    return file


def _named(rows: Sequence[Row]) -> str:
    return ", ".join(f"{row.label} (pid {row.pid}): {row.committed:,} bytes" for row in rows)
