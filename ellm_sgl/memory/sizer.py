"""How large the pool is to be, where several servers share a budget, or one gives memory back while
it is idle.

```
 what requests need ─▶ publish ─▶ the share ─┬─ less than there is ─▶ ask for it, credit as it goes
                                  idle ──────┤
                                             └─ more is needed ─▶ debit, then ask for it
```

No clock and no process is in here: `Sizer.tick` is given what the steps have reported, and says
what is to be asked of all ranks. Bytes are debited before anybody may commit them, and credited
only once every rank has reported that it has them no more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from ellm_sgl.budget import Standing
from ellm_sgl.config.sizes import MOST_BYTES

QUANTA = 64
"""The pool grows by at least this part of its largest size, unless less is needed: every change is
work for all ranks."""
RETRY_S = 0.1
"""How soon to ask again for a shrink that has come to its floor."""
CEILING_S = 5.0
"""How soon to ask again for memory that the machine did not have."""


class Ledger(Protocol):
    """As `budget.Member`."""

    def follow(self, want: int) -> Standing: ...

    def debit(self, nbytes: int) -> bool: ...

    def credit(self, nbytes: int) -> None: ...


@dataclass(frozen=True)
class Load:
    """What the scheduler's thread says, in units, whenever it decides."""

    needed_units: int
    """What the requests that run and wait need, and what they are expected to."""
    most_units: int
    """What the pool may have, by the operator,"""
    asked_units: int
    """and was last asked to have, by whoever."""
    idle_since_s: float | None = None
    """When the last request ended, if all have,"""
    resting_units: int = 0
    """and what it is to have if that has been long enough."""
    released: bool = False
    """All is to go, and to stay away."""
    limit_units: int | None = None
    """That are in use or may be: fewer than reported where the machine has come to have less."""


@dataclass(frozen=True)
class Report:
    """What has become of what was asked for, in units."""

    asked_units: int
    """As last asked for, by whoever,"""
    limit_units: int
    """what is in use or may be, the same on all ranks,"""
    backed_units: int
    """and what has, or may at any moment come to have, memory on any of them."""
    under_way: bool
    ceiling: bool = False
    """The machine had no more."""


@dataclass(frozen=True)
class Ask:
    """What all ranks are to do: come to this size, and report."""

    units: int | None
    """None: only report."""


class Alone:
    """The ledger of a server that shares with nobody."""

    def __init__(self, nbytes: int) -> None:
        self._committed = nbytes

    def follow(self, want: int) -> Standing:
        return Standing(MOST_BYTES, self._committed, MOST_BYTES)

    def debit(self, nbytes: int) -> bool:
        self._committed += nbytes
        return True

    def credit(self, nbytes: int) -> None:
        self._committed -= nbytes


class Sizes:
    """Units as bytes of all ranks, and back.

    Args:
        bytes_of: so many units' memory on all ranks.
        groups: units of a block.
        most_units: whole blocks'.
    """

    def __init__(self, bytes_of: Callable[[int], int], groups: int, most_units: int) -> None:
        self.bytes_of, self.groups, self.most_units = bytes_of, groups, most_units

    def within(self, nbytes: int) -> Sizes:
        """Of a pool that may take no more than so many bytes."""
        return Sizes(self.bytes_of, self.groups, self.units_in(nbytes))

    def units_in(self, nbytes: int) -> int:
        """Units, whole blocks', that have room in so many bytes."""
        blocks = range(1, self.most_units // self.groups + 1)
        return bisect_right(blocks, nbytes, key=lambda n: self.bytes_of(n * self.groups)) * (
            self.groups
        )


class Sizer:
    """Decides for one server, on rank 0.

    Args:
        ledger: what this server has debited is what `report` says that it has.
        sizes: of its pool.
        least_units: its floor.
        idle_s: seconds after which an idle server gives memory back; None: never.
    """

    def __init__(
        self, ledger: Ledger, sizes: Sizes, least_units: int, idle_s: float | None = None
    ) -> None:
        self._idle_s = idle_s
        self._ledger, self._sizes, self._least = ledger, sizes, least_units
        self._step = max(sizes.most_units // sizes.groups // QUANTA, 1) * sizes.groups
        self._shrink_again_s = self._grow_again_s = 0.0
        self._heard: Report | None = None
        self.wanted_bytes = 0
        """As last published, and"""
        self.standing: Standing | None = None
        """what came of it."""

    def tick(self, load: Load, report: Report, now_s: float) -> Ask | None:
        """What to ask for now. To be called once what was asked before has been reported on.

        Raises:
            LedgerError: as `Member`'s methods; nothing was debited that is not asked for.
        """
        most = max(min(load.most_units, self._sizes.most_units), self._least)
        if report.ceiling and report is not self._heard:
            self._grow_again_s = now_s + CEILING_S
        self._heard = report
        want = self._wanted(load, report, most, now_s)
        self.wanted_bytes = self._sizes.bytes_of(want)
        standing = self._credited(self._ledger.follow(self.wanted_bytes), report)
        self.standing = standing
        if standing.share < self._sizes.bytes_of(_kept(report)):
            return self._shrink(self._sizes.units_in(standing.share), report, now_s)
        if not load.released:
            to = self._rest(load, report, most, now_s)
            if to is None:
                to = self._stay(want, standing, report)
            if to is None:
                to = self._grow(want, standing, report)
            if to is not None:
                return Ask(to)
        asked = load.asked_units == report.asked_units
        known = asked and load.limit_units in (None, report.limit_units)
        return None if known and not report.under_way else Ask(None)

    def differs(self, before: Load, now: Load) -> bool:
        """Whether other things may be decided, had no time passed."""
        return self._steps(before) != self._steps(now) or _told(before) != _told(now)

    def presses(self, before: Load, now: Load) -> bool:
        """Whether that may not wait for the next look, which takes the interpreter from the
        scheduler's thread as a step begins: somebody has asked for another size, more is needed
        than there is, or others, who lack memory, could have what is needed no more."""
        if not self.differs(before, now):
            return False
        have = now.asked_units if now.limit_units is None else now.limit_units
        more = min(self._steps(now) * self._step, now.most_units) > have
        heard = self.standing is None or self.standing.others_lack
        return heard or more or _told(before) != _told(now)

    def _steps(self, load: Load) -> int:
        return -(-load.needed_units // self._step)

    def _wanted(self, load: Load, report: Report, most: int, now_s: float) -> int:
        """Units, in steps, so that a request more does not change the size of the pool each; of
        what is released no more than the floor: others can use it."""
        if load.released:
            return self._least
        want = self._steps(load) * self._step
        if now_s < self._grow_again_s:
            want = min(want, report.limit_units)
        return min(max(want, self._least), most)

    def _credited(self, standing: Standing, report: Report) -> Standing:
        """Give back what no rank has any more, nor will have of what was asked for."""
        excess = standing.committed - self._sizes.bytes_of(_kept(report))
        if excess <= 0:
            return standing
        self._ledger.credit(excess)
        committed, free = standing.committed - excess, standing.free + excess
        return replace(standing, committed=committed, free=free)

    def _shrink(self, share: int, report: Report, now_s: float) -> Ask | None:
        """To so many units, at once, however little it is: somebody else waits for it."""
        share = max(share, self._least)
        if report.asked_units > share:
            return Ask(share)
        if report.under_way:
            return Ask(None)
        if now_s < self._shrink_again_s:  # it has come to what cannot be evicted now
            return None
        self._shrink_again_s = now_s + RETRY_S
        return Ask(share)

    def _rest(self, load: Load, report: Report, most: int, now_s: float) -> int | None:
        """Units to come to, where nobody has needed more for long enough; None: not now."""
        if self._idle_s is None or load.idle_since_s is None or report.under_way:
            return None
        if now_s < load.idle_since_s + self._idle_s:
            return None
        resting = -(-load.resting_units // self._sizes.groups) * self._sizes.groups
        resting = min(max(resting, self._least), most)
        # What was asked for may be less: a share that has since come back, of which some stayed.
        return resting if report.limit_units > resting != report.asked_units else None

    def _stay(self, want: int, standing: Standing, report: Report) -> int | None:
        """Units that a shrink under way is to come to, where it need not go as far any more."""
        if not report.under_way or report.asked_units >= report.limit_units:
            return None
        to = min(want, self._sizes.units_in(standing.share), report.limit_units)
        return to if to > report.asked_units else None

    def _grow(self, want: int, standing: Standing, report: Report) -> int | None:
        """Units to grow to, whose bytes have been debited; None: not now."""
        if report.under_way or want <= report.limit_units:
            return None
        within = min(standing.share, standing.committed + standing.free)
        to = min(want, self._sizes.units_in(within))
        if to <= report.limit_units or to - report.limit_units < min(
            self._step, want - report.limit_units
        ):
            return None
        more = self._sizes.bytes_of(to) - standing.committed
        return to if more <= 0 or self._ledger.debit(more) else None


def _told(load: Load) -> tuple[int, int | None]:
    return load.asked_units, load.limit_units


def _kept(report: Report) -> int:
    """Units that have memory on some rank, or will have of what was asked for."""
    return max(report.backed_units, report.asked_units if report.under_way else 0)


def start_units(
    publish: Callable[[int], Standing], sizes: Sizes, least: int, wish: int, patient: bool
) -> int | None:
    """Units that a server which joins may begin with, of those that it would like; None: not yet.

    Args:
        publish: `Member.publish`.
        least: its floor.
        wish: units that it would like.
        patient: rather wait for its share than begin with less.
    """
    wish = max(min(wish, sizes.most_units), least)
    standing = publish(sizes.bytes_of(wish))
    share = max(min(sizes.units_in(standing.share), wish), least)
    units = min(share, sizes.units_in(standing.free))
    return units if units >= (share if patient else least) else None
