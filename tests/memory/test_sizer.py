"""Who decides on a pool's size: never more than the budget, whatever happens when; and its share
in the end."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from ellm_sgl.budget import LedgerError, Member, path_of
from ellm_sgl.memory import Alone, Ask, Load, Report, Sizer, Sizes
from ellm_sgl.memory.sizer import CEILING_S, RETRY_S, start_units

GROUPS, UNIT, RANKS = 2, 10, 2
MOST = 100
"""Units."""
BUDGET = 150 * UNIT * RANKS
SIZES = Sizes(lambda units: RANKS * units * UNIT, GROUPS, MOST)


class Server:
    """A server of two ranks whose memory comes and goes at its own pace, on each of them."""

    def __init__(self, folder: Path, least: int = GROUPS, start: int = GROUPS) -> None:
        self.member = Member("test", BUDGET, "a", SIZES.bytes_of(least), folder=folder)
        assert self.member.debit(SIZES.bytes_of(start))
        self.sizer = Sizer(self.member, SIZES, least)
        self.needed, self.most = start, MOST
        self.limit = self.asked = start
        self.pinned = 0
        """Units that cannot be evicted."""
        self.growing: int | None = None
        self.backed = [start] * RANKS
        self.under_way = self.ceiling = False
        self.sent: Ask | None = None
        self.report = self._report()
        self.now = 0.0

    def tick(self) -> None:
        self.now += 0.02
        if self.sent is None:
            load = Load(self.needed, self.most, self.asked)
            self.sent = self.sizer.tick(load, self.report, self.now)

    def turn(self, rng: random.Random) -> None:
        """Of the scheduler: what was sent arrives, or memory comes or goes on some rank."""
        if self.sent is not None and rng.random() < 0.5:
            if self.sent.units is not None:
                self.ask(self.sent.units)
            self.sent, self.report = None, self._report()
        elif self.growing is not None:
            self._grow(rng)
        else:
            self._shrink(rng)

    def ask(self, units: int) -> None:
        assert GROUPS <= units <= MOST and units % GROUPS == 0
        self.asked, self.under_way, self.ceiling = units, True, False
        if self.growing is None and units > max(self.backed):
            self.growing = units

    @property
    def bytes(self) -> int:
        """That it really has."""
        return sum(self.backed) * UNIT

    def settle(self, rng: random.Random, turns: int = 400) -> None:
        for _ in range(turns):
            self.tick()
            self.turn(rng)

    def _grow(self, rng: random.Random) -> None:
        assert self.growing is not None
        rank = rng.randrange(RANKS)
        self.backed[rank] = min(self.backed[rank] + rng.randrange(1, 9), self.growing)
        if self.ceiling or min(self.backed) == self.growing or self.asked < min(self.backed):
            self.growing = None
            self.limit = min(self.backed)
            self.backed = [self.limit] * RANKS
            self.under_way = self.asked != self.limit
            if self.asked > self.limit and not self.ceiling:
                self.growing = self.asked

    def _shrink(self, rng: random.Random) -> None:
        if self.under_way:
            self.limit = max(self.asked, self.limit - rng.randrange(9), self.pinned)
            rank = rng.randrange(RANKS)
            self.backed[rank] = self.limit
            self.under_way = self.backed != [max(self.asked, self.pinned)] * RANKS

    def _report(self) -> Report:
        most = max(*self.backed, self.growing or 0)
        return Report(self.asked, self.limit, most, self.under_way, self.ceiling)


@pytest.mark.parametrize("seed", range(12))
def test_all_servers_together_never_have_more_than_the_budget(tmp_path: Path, seed: int) -> None:
    rng, count = random.Random(seed), 2 + seed % 2
    servers = [Server(tmp_path) for _ in range(count)]
    for _ in range(300):
        server = rng.choice(servers)
        match rng.randrange(8):
            case 0:
                server.needed = rng.choice([0, rng.randrange(MOST), 2 * MOST])
            case 1:
                server.pinned = rng.choice([0, 0, server.limit])
            case 2:
                server.most = rng.randrange(GROUPS, MOST, GROUPS)
            case 3:
                server.ceiling = server.growing is not None
            case 4 | 5:
                server.tick()
            case _:
                server.turn(rng)
        assert sum(each.bytes for each in servers) <= BUDGET
        for each in servers:
            assert each.bytes <= each.member.publish(each.sizer.wanted_bytes).committed
    for server in servers:  # and in the end each has its share
        server.needed, server.most, server.pinned = 2 * MOST, MOST, 0
        server.now += 2 * CEILING_S
    for _ in range(3):
        for server in servers:
            server.settle(rng)
    share = min(BUDGET // count // UNIT // RANKS, MOST)
    assert all(abs(s.limit - share) <= GROUPS for s in servers), [s.limit for s in servers]


@pytest.mark.parametrize("seed", range(4))
def test_what_does_not_differ_decides_nothing_else(seed: int) -> None:
    rng, most, alike = random.Random(seed), 64 * 8, 0
    sizes = Sizes(lambda units: units * UNIT, GROUPS, most)
    for _ in range(500):
        now = Load(rng.randrange(most), most, rng.choice([98, *[100] * 9]), limit_units=100)
        needed = min(max(now.needed_units + rng.randrange(-9, 9), 0), most)
        before = replace(now, needed_units=needed, asked_units=100)
        report, found = Report(100, 100, 100, under_way=False), []
        for load in (before, now):
            sizer = Sizer(Alone(100 * UNIT), sizes, GROUPS)
            found.append((sizer.tick(load, report, 0.0), sizer.wanted_bytes))
        if not sizer.differs(before, now):
            assert found[0] == found[1]
            alike += 1
    assert 100 < alike < 400


def test_what_is_needed_presses_where_there_is_less_or_others_lack_memory(tmp_path: Path) -> None:
    most = 64 * 8
    sizes = Sizes(lambda units: units * UNIT, GROUPS, most)
    little, much = Load(1, most, 100, limit_units=100), Load(90, most, 100, limit_units=100)
    member = Member("test", BUDGET, "a", GROUPS * UNIT, folder=tmp_path)
    other = Member("test", BUDGET, "b", GROUPS * UNIT, folder=tmp_path)
    assert member.debit(100 * UNIT)
    sizer, report = Sizer(member, sizes, GROUPS), Report(100, 100, 100, under_way=False)
    assert sizer.presses(little, much), "nobody knows yet who else is there"
    for wants, presses in ((GROUPS * UNIT, True), (0, False), (BUDGET, True)):
        other.publish(wants)
        sizer.tick(little, report, 0.0)
        assert sizer.presses(little, much) == sizer.presses(much, little) == presses
        assert not sizer.presses(little, replace(little, needed_units=2)), "it is the same step"
    other.publish(0)
    sizer.tick(little, report, 0.0)
    assert sizer.presses(little, replace(little, needed_units=101))
    for told in (replace(little, limit_units=90), replace(little, asked_units=90)):
        assert sizer.presses(little, told)
    full = replace(much, most_units=100)
    assert not sizer.presses(full, replace(full, needed_units=120)), "nor may it have more"


@pytest.fixture
def rng() -> random.Random:
    return random.Random(1)


def test_memory_that_nobody_else_wants_is_kept(tmp_path: Path, rng: random.Random) -> None:
    busy, other = Server(tmp_path), Server(tmp_path)
    busy.needed = 80
    busy.settle(rng)
    busy.needed = 0
    busy.settle(rng)
    assert busy.limit == 80
    other.needed = 100
    for server in (other, busy, other):
        server.settle(rng)
    assert (busy.limit, other.limit) == (50, 100)


def test_bytes_are_debited_before_they_are_asked_for_and_credited_after_they_have_gone(
    tmp_path: Path, rng: random.Random
) -> None:
    server = Server(tmp_path)
    server.needed = 60
    server.tick()
    assert server.sent == Ask(60) and server.member.publish(0).committed == SIZES.bytes_of(60)
    server.settle(rng)
    server.ask(20)  # the operator
    server.tick()
    assert server.member.publish(0).committed == SIZES.bytes_of(60)
    server.most = 20
    server.settle(rng)
    assert server.bytes == server.member.publish(0).committed == SIZES.bytes_of(20)


def test_a_shrink_that_has_come_to_its_floor_is_asked_for_again(
    tmp_path: Path, rng: random.Random
) -> None:
    busy, other = Server(tmp_path), Server(tmp_path)
    busy.needed = busy.pinned = 100
    busy.settle(rng)
    other.needed = 100
    other.settle(rng)
    busy.settle(rng)
    assert (busy.limit, other.limit) == (100, 50)
    asks = 0
    for _ in range(100):
        busy.tick()
        asks += busy.sent is not None
        busy.turn(rng)
    assert 0 < asks <= 100 * 0.02 / RETRY_S * 5
    busy.pinned = 0
    for server in (busy, other):
        server.settle(rng)
    assert (busy.limit, other.limit) == (75 // GROUPS * GROUPS, 75 // GROUPS * GROUPS)


def test_a_shrink_goes_no_further_than_is_still_called_for() -> None:
    """What asked for it is over: others want less, or a request has come to who rested."""
    sizer = Sizer(Alone(SIZES.bytes_of(80)), SIZES, 4, idle_s=5.0)
    coming = Report(20, 60, 80, under_way=True)
    assert sizer.tick(Load(40, MOST, 20), coming, 0.0) == Ask(40)
    assert sizer.tick(Load(90, MOST, 20), coming, 0.0) == Ask(60), "no more than has its bytes"
    assert sizer.tick(Load(20, MOST, 20), coming, 0.0) == Ask(None)
    assert sizer.tick(Load(90, 20, 20), coming, 0.0) == Ask(None), "the operator's word"
    assert sizer.tick(Load(90, MOST, 20, released=True), coming, 0.0) == Ask(None)
    growing = Report(70, 60, 80, under_way=True)
    assert sizer.tick(Load(90, MOST, 70), growing, 0.0) == Ask(None)


def resting(since_s: float | None, units: int = 0) -> Load:
    return Load(0, MOST, 80, since_s, units)


def test_an_idle_server_comes_to_what_its_prefixes_take(tmp_path: Path) -> None:
    sizer = Sizer(Alone(SIZES.bytes_of(80)), SIZES, 4, idle_s=5.0)
    report = Report(80, 80, 80, under_way=False)
    assert sizer.tick(resting(None), report, 50.0) is None
    assert sizer.tick(resting(10.0), report, 14.9) is None
    assert sizer.tick(resting(10.0), report, 15.1) == Ask(4)
    assert sizer.tick(resting(10.0, 21), report, 15.1) == Ask(22)
    assert sizer.tick(resting(10.0, 90), report, 15.1) is None
    floor = Report(22, 30, 30, under_way=False)
    assert sizer.tick(Load(0, MOST, 22, 10.0, 21), floor, 16.0) is None, "asked once"
    squeezed = Report(22, 40, 40, under_way=False)  # it came to 40; others want it no more
    assert sizer.tick(Load(0, MOST, 22, 10.0, 29), squeezed, 16.0) == Ask(30)


def test_memory_of_one_who_shares_with_nobody_comes_back_as_it_is_needed() -> None:
    sizer = Sizer(Alone(SIZES.bytes_of(4)), SIZES, 4, idle_s=5.0)
    report = Report(4, 4, 4, under_way=False)
    assert sizer.tick(Load(30, MOST, 4), report, 0.0) == Ask(30)
    assert sizer.tick(Load(2 * MOST, 60, 4), report, 0.0) == Ask(60), "what the operator allows"


def test_what_is_released_stays_away() -> None:
    sizer = Sizer(Alone(SIZES.bytes_of(80)), SIZES, 4, idle_s=5.0)
    report = Report(2, 2, 2, under_way=False)
    assert sizer.tick(Load(80, MOST, 2, released=True), report, 0.0) is None
    assert sizer.wanted_bytes == SIZES.bytes_of(4), "others can use it"
    assert sizer.tick(Load(80, MOST, 2), report, 0.0) == Ask(80)


def test_small_changes_of_what_is_needed_change_nothing(tmp_path: Path, rng: random.Random) -> None:
    sizes = Sizes(SIZES.bytes_of, GROUPS, 100 * 64)
    member = Member("test", 10**9, "a", 40, folder=tmp_path)
    sizer = Sizer(member, sizes, GROUPS)
    report = Report(400, 400, 400, under_way=False)
    assert member.debit(SIZES.bytes_of(400))
    assert sizer.tick(Load(399, 6400, 400), report, 0.0) is None
    assert sizer.tick(Load(401, 6400, 400), report, 0.0) == Ask(500)


def test_what_the_machine_does_not_have_is_not_asked_for_again_at_once(tmp_path: Path) -> None:
    server = Server(tmp_path)
    report = Report(60, 40, 40, under_way=False, ceiling=True)
    assert server.member.debit(SIZES.bytes_of(60) - SIZES.bytes_of(GROUPS))
    load = Load(60, MOST, 60)
    assert server.sizer.tick(load, report, 1.0) is None
    assert server.member.publish(0).committed == SIZES.bytes_of(40)
    assert server.sizer.tick(load, report, CEILING_S) is None
    assert server.sizer.tick(load, report, 1.1 + CEILING_S) == Ask(60)


def test_what_the_machine_has_taken_back_is_credited(tmp_path: Path) -> None:
    server = Server(tmp_path)
    assert server.member.debit(SIZES.bytes_of(60) - SIZES.bytes_of(GROUPS))
    stale = Report(60, 60, 60, under_way=False)
    yielded = Load(60, MOST, 60, limit_units=40)
    assert server.sizer.tick(yielded, stale, 1.0) == Ask(None), "what has it come to?"
    report = Report(60, 40, 40, under_way=False, ceiling=True)
    assert server.sizer.tick(yielded, report, 1.1) is None
    assert server.member.publish(0).committed == SIZES.bytes_of(40)
    assert server.sizer.tick(yielded, report, 1.2 + CEILING_S) == Ask(60)


def test_a_server_that_joins_waits_for_its_share_and_then_takes_what_there_is(
    tmp_path: Path,
) -> None:
    first = Server(tmp_path, start=MOST)
    first.member.publish(SIZES.bytes_of(MOST))
    other = Member("test", BUDGET, "b", SIZES.bytes_of(10), folder=tmp_path)
    assert start_units(other.publish, SIZES, 10, MOST, patient=True) is None
    assert start_units(other.publish, SIZES, 10, MOST, patient=False) == 50
    first.member.credit(SIZES.bytes_of(25))
    assert start_units(other.publish, SIZES, 10, MOST, patient=True) == 74
    assert start_units(other.publish, SIZES, 10, 20, patient=True) == 20
    assert first.member.debit(SIZES.bytes_of(70))
    assert start_units(other.publish, SIZES, 10, MOST, patient=False) is None


def test_a_ledger_that_breaks_is_told_of(tmp_path: Path) -> None:
    server = Server(tmp_path)
    path_of("test", tmp_path).write_bytes(b"something else")
    with pytest.raises(LedgerError, match="is corrupt"):
        server.tick()
