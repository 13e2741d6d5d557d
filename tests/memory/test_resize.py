"""A pool's size: it shrinks and grows step by step, and always comes to an end."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch

from ellm_sgl.kernels.torch_paged import copy_units
from ellm_sgl.memory import KVPool, Outcome, Resizer
from ellm_sgl.memory.resize import RETRY_STEPS
from ellm_sgl.worker import Worker
from tests.engine.scene import BLOCK, GROUPS, SHAPE, Scene
from tests.memory.fake_arena import FakeArena, small_steps

UNIT = 64
"""Bytes."""
ROOM = 12
"""Blocks."""


@pytest.fixture(autouse=True)
def _small_steps() -> Iterator[None]:
    """Of four units each."""
    with small_steps(4 * UNIT):
        yield


def at_once(function: Callable[[], None]) -> Future[None]:
    done: Future[None] = Future()
    try:
        function()
        done.set_result(None)
    except MemoryError as error:
        done.set_exception(error)
    return done


class Server:
    """A pool of `ROOM` blocks, whose every unit holds its own number once it is filled."""

    def __init__(
        self,
        max_restored: int = 1000,
        submit: Callable[[Callable[[], None]], Future[None]] = at_once,
        agree: Callable[[list[int]], list[int]] = list,
        start: int = ROOM,
        spare: Callable[[], float] = lambda: math.inf,
        tries_again: bool = False,
    ) -> None:
        self.scene = Scene(ROOM, max_restored=max_restored, start=start)
        self.table = self.scene.table
        units, committed = self.table.num_units, self.table.committed_units
        self.pool = KVPool(
            SHAPE, units, 1, 1, torch.float32, "cpu", reserve=FakeArena, committed=committed
        )
        assert self.pool.unit_bytes == UNIT and isinstance(self.pool.arena, FakeArena)
        self.arena = self.pool.arena
        elastic = self.scene.elastic
        self.resizer = Resizer(elastic, self.pool, copy_units, submit, agree, spare, tries_again)

    def ask(self, blocks: int) -> Outcome:
        self.resizer.ask(blocks * GROUPS)
        return self.resizer.outcome

    def steps(self) -> int:
        """Steps until it has ended."""
        for count in range(50):
            if self.resizer.outcome is not Outcome.UNDER_WAY:
                self.check()
                return count
            self.resizer.step()
            self.table.check_integrity()
        raise AssertionError("it does not end")

    def end(self) -> Outcome:
        """Of a growth, whose thread may take its time."""
        deadline = time.monotonic() + 60
        while self.resizer.outcome is Outcome.UNDER_WAY:
            assert time.monotonic() < deadline, "it does not end"
            self.resizer.step()
            time.sleep(0.001)
        self.check()
        return self.resizer.outcome

    def check(self) -> None:
        """Of an end."""
        table, wanted = self.table, self.resizer.wanted_units
        assert table.unit_limit == table.committed_units >= table.used_units
        assert self.arena.committed == (table.committed_units + 1) * UNIT
        self.arena.check()
        sizes = {
            Outcome.APPLIED: table.unit_limit == wanted,
            Outcome.FLOOR: table.unit_limit > wanted,
            Outcome.CEILING: table.unit_limit < wanted,
        }
        assert sizes[self.resizer.outcome]

    def fill(self, seq_id: int) -> torch.Tensor:
        """A request's KV: what `read` has to find."""
        units = self.table.units[self.table.blocks_of(seq_id)]
        self.pool.buffer[units] = torch.rand((*units.shape, *self.pool.buffer.shape[1:]))
        return self.read(seq_id)

    def read(self, seq_id: int) -> torch.Tensor:
        return self.pool.buffer[self.table.units[self.table.blocks_of(seq_id)]]


def test_free_units_go_with_the_request_itself() -> None:
    server = Server()
    server.scene.request(0, tokens=2 * BLOCK)
    with patch("ellm_sgl.memory.resize.DECOMMIT_BYTES", 1 << 30):
        assert server.ask(4) is Outcome.APPLIED
    server.check()
    assert server.arena.committed == (4 * GROUPS + 1) * UNIT


def test_much_memory_is_given_back_in_steps() -> None:
    server = Server()
    assert server.ask(4) is Outcome.UNDER_WAY
    assert server.table.unit_limit == 4 * GROUPS  # not to be used any more
    assert server.arena.committed == (ROOM * GROUPS - 4 + 1) * UNIT
    assert server.steps() == 3


def test_what_lies_beyond_is_moved_and_reads_as_before() -> None:
    server = Server()
    server.scene.request(0, tokens=9 * BLOCK)
    server.scene.request(1, tokens=3 * BLOCK)
    expected = server.fill(1)
    server.scene.elastic.forget(0)
    server.table.release(range(1, 10))
    assert server.ask(3) is Outcome.UNDER_WAY
    server.steps()
    assert server.table.unit_limit == 3 * GROUPS and server.scene.uncached() == [0]
    assert torch.equal(server.read(1), expected)
    assert server.scene.elastic.totals.relocated_units == 3 * GROUPS


def test_idle_prefixes_go_before_anybody_is_evicted() -> None:
    server = Server()
    server.scene.cache_prefix(blocks=6)
    server.scene.request(0, tokens=6 * BLOCK)
    expected = server.fill(0)
    server.ask(6)
    server.steps()
    assert server.resizer.outcome is Outcome.APPLIED and not server.scene.tree
    assert server.scene.uncached() == [0] and torch.equal(server.read(0), expected)


def test_a_part_of_what_requests_have_is_freed_and_moved_in_one_step() -> None:
    """Every step of the model reads all of it: what is little then does not matter."""
    server, totals = Server(), []
    server.scene.cache_prefix(blocks=6)
    server.scene.request(0, tokens=6 * BLOCK)
    expected = server.fill(0)
    with (
        patch("ellm_sgl.memory.resize.DECOMMIT_BYTES", 1 << 30),
        patch("ellm_sgl.memory.resize.MOVED_PART", 2),
    ):
        server.ask(6)
        totals.append(server.scene.elastic.totals.relocated_units)
        while server.resizer.outcome is Outcome.UNDER_WAY:
            server.resizer.step()
            totals.append(server.scene.elastic.totals.relocated_units)
    server.check()
    assert totals[-1] == 6 * GROUPS and torch.equal(server.read(0), expected)
    assert max(after - before for before, after in pairwise([0, *totals])) == 3 * GROUPS


def test_a_shrink_evicts_a_little_at_a_time() -> None:
    server = Server()
    server.scene.request(0, tokens=12 * BLOCK)
    server.ask(4)
    missing = [server.scene.uncached()[0]]
    while server.resizer.outcome is Outcome.UNDER_WAY:
        server.resizer.step()
        missing.append(server.scene.uncached()[0])
    server.check()
    assert missing[0] == 2 * BLOCK and missing[-1] == 8 * BLOCK
    assert all(after - before <= 2 * BLOCK for before, after in pairwise(missing))


@pytest.mark.parametrize(("max_restored", "floor"), [(8 * BLOCK, 8), (4 * BLOCK, 10), (0, 12)])
def test_no_more_is_evicted_than_half_of_what_a_step_restores(
    max_restored: int, floor: int
) -> None:
    server = Server(max_restored)
    server.scene.request(0, tokens=12 * BLOCK)
    server.ask(1)
    server.steps()
    assert server.resizer.outcome is Outcome.FLOOR
    assert server.table.unit_limit == floor * GROUPS
    assert server.scene.elastic.fits_one_step([0])


def test_what_no_step_has_computed_is_the_floor() -> None:
    server = Server()
    blocks = server.table.allocate(3)
    server.table.place(blocks)
    server.table.map(0, blocks, 3 * BLOCK)
    server.ask(1)
    server.steps()
    assert server.resizer.outcome is Outcome.FLOOR and server.table.unit_limit == 3 * GROUPS


def test_growth_is_used_as_it_is_committed() -> None:
    """Committing takes its time on another thread; nobody waits for it."""
    server = Server(submit=Worker("test").submit)
    server.ask(2)
    server.steps()
    may_commit = threading.Semaphore(0)
    commit = server.arena.commit

    def commit_when_told(low: int, high: int) -> None:
        assert may_commit.acquire(timeout=60)
        commit(low, high)

    with patch.object(server.arena, "commit", commit_when_told):
        assert server.ask(12) is Outcome.UNDER_WAY
        for blocks in (4, 6):
            may_commit.release()
            while server.table.unit_limit < blocks * GROUPS:
                server.resizer.step()
                time.sleep(0.001)
            assert server.table.unit_limit == server.table.committed_units == blocks * GROUPS
            assert len(server.table.place(server.table.allocate(2))) == 2
        server.ask(5)  # somebody thinks better of it
        may_commit.release(10)
        server.end()
    assert server.table.unit_limit == 5 * GROUPS


def test_where_the_machine_gives_no_more_growth_ends_and_the_server_goes_on() -> None:
    server = Server()
    server.ask(2)
    server.steps()
    server.arena.room = (9 * GROUPS + 1) * UNIT
    server.ask(12)
    assert server.end() is Outcome.CEILING and server.table.unit_limit == 8 * GROUPS
    server.arena.room = server.arena.nbytes
    server.ask(12)
    assert server.end() is Outcome.APPLIED and server.table.unit_limit == 12 * GROUPS


def test_a_pool_at_its_ceiling_grows_once_others_have_given_memory_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    server = Server(start=2, tries_again=True)
    server.arena.room = server.arena.committed
    server.ask(6)
    assert server.end() is Outcome.CEILING and server.table.unit_limit == 2 * GROUPS
    for _ in range(3 * RETRY_STEPS):
        server.resizer.step()
    assert server.resizer.outcome is Outcome.CEILING
    assert caplog.text.count("no memory to grow further") == 1
    assert caplog.text.count("tokens asked for, room for") == 1
    server.arena.room = server.arena.nbytes
    for _ in range(RETRY_STEPS):
        server.resizer.step()
    assert server.end() is Outcome.APPLIED and server.table.unit_limit == 6 * GROUPS


def test_a_pool_grows_beyond_what_it_started_with() -> None:
    """Requests that it had no room for come back, and it shrinks below its start as well."""
    server = Server(start=4)
    assert server.arena.committed == (4 * GROUPS + 1) * UNIT
    server.scene.request(0, tokens=8 * BLOCK)
    assert server.scene.uncached() == [4 * BLOCK] and server.table.unit_limit == 4 * GROUPS
    for blocks, missing in ((6, 3), (12, 0), (2, 6), (9, 0)):  # one stays free to grow into
        server.ask(blocks)
        assert server.end() is Outcome.APPLIED
        server.scene.restore([0])
        assert server.table.unit_limit == blocks * GROUPS
        assert server.scene.uncached() == [missing * BLOCK]
    assert server.resizer.start_units == 4 * GROUPS


def test_where_the_machine_has_no_more_than_at_the_start_the_pool_stays_as_it_is() -> None:
    server = Server(start=4)
    server.scene.request(0, tokens=4 * BLOCK)
    expected = server.fill(0)
    server.arena.room = server.arena.committed
    server.ask(12)
    assert server.end() is Outcome.CEILING and server.table.unit_limit == 4 * GROUPS
    assert torch.equal(server.read(0), expected)


def test_the_last_that_was_asked_for_counts() -> None:
    server = Server()
    server.scene.request(0, tokens=12 * BLOCK)
    for blocks in (1, 12, 3, 7):
        server.ask(blocks)
    server.steps()
    assert server.table.unit_limit == 7 * GROUPS


def test_nobody_waits_between_two_steps_of_an_idle_server() -> None:
    server = Server()
    server.scene.cache_prefix(blocks=12)
    server.resizer.ask(3 * GROUPS, idle=True)
    assert server.resizer.outcome is Outcome.APPLIED
    server.check()


@pytest.mark.parametrize("units", [GROUPS - 1, ROOM * GROUPS + 1, -1])
def test_a_size_that_cannot_be_is_refused(units: int) -> None:
    server = Server()
    with pytest.raises(ValueError, match="units, of 2 to 24"):
        server.resizer.ask(units)
    assert server.resizer.outcome is Outcome.APPLIED


def test_a_pool_without_an_arena_is_used_less_and_keeps_its_units() -> None:
    server = Server()
    pool = KVPool(SHAPE, ROOM * GROUPS, 1, 1, torch.float32, "cpu")
    server.resizer = Resizer(server.scene.elastic, pool, copy_units, at_once, list)
    server.scene.request(0, tokens=8 * BLOCK)
    server.scene.request(1, tokens=4 * BLOCK)
    server.ask(6)
    while server.resizer.outcome is Outcome.UNDER_WAY:
        server.resizer.step()
    table = server.table
    assert table.unit_limit == table.used_units == 6 * GROUPS
    assert table.committed_units == ROOM * GROUPS
    assert server.scene.elastic.totals.relocated_units == 0
    server.ask(12)
    assert server.resizer.outcome is Outcome.APPLIED and table.unit_limit == ROOM * GROUPS


@pytest.mark.parametrize("short", [0, 1])
@pytest.mark.parametrize("slow", [0, 1])
def test_ranks_use_what_all_of_them_have(short: int, slow: int) -> None:
    """One rank's machine has less memory than the other's; and one's thread begins long after the
    other's has ended."""
    barrier, said = threading.Barrier(2, timeout=60), [[0], [0]]
    begins = threading.Event()

    def run(rank: int) -> None:
        def agree(numbers: list[int]) -> list[int]:
            said[rank] = numbers
            barrier.wait()
            least = list(map(min, *said))
            barrier.wait()
            return least

        worker = Worker("test")

        def submit(work: Callable[[], None]) -> Future[None]:
            def later() -> None:
                assert rank != slow or begins.wait(60)
                work()

            return worker.submit(later)

        server = Server(submit=submit, agree=agree)
        server.ask(2)
        server.steps()
        if rank == short:
            server.arena.room = (7 * GROUPS + 1) * UNIT
        server.ask(12)
        for turn in range(100_000):
            if turn == 50:
                begins.set()
            limits[rank] = server.table.unit_limit, server.resizer.outcome
            barrier.wait()
            same = limits[0] == limits[1]
            barrier.wait()
            assert same
            if server.resizer.outcome is not Outcome.UNDER_WAY:
                break
            server.resizer.step()
        server.check()

    limits: list[tuple[int, Outcome]] = [(0, Outcome.APPLIED)] * 2
    ranks = [Worker(f"rank {rank}").submit(run, rank) for rank in range(2)]
    for rank in ranks:
        rank.result(timeout=120)
    assert limits == [(6 * GROUPS, Outcome.CEILING)] * 2


def test_what_committing_takes_is_measured() -> None:
    server = Server(start=4)
    assert server.resizer.commit_s_per_unit == 0
    server.ask(12)
    server.steps()
    assert 0 < server.resizer.commit_s_per_unit < 1
