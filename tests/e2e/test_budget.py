"""Real servers that share a budget: bursts, kills, and what is refused at the start."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest

from ellm_sgl.budget import Member, list_budgets, path_of
from ellm_sgl.budget.file import LedgerFile
from ellm_sgl.client.process import DEMO_ARGUMENTS, ServerProcess
from tests.e2e.load import ask, greedy, prompts, token_ids
from tests.e2e.test_memory_pressure import wait_for
from tests.servers import STRICT, refused

pytestmark = pytest.mark.slow

MIB = 1 << 20
BUDGET = 96 * MIB
TOKENS = 22_000
"""Of the demo model: 86 MiB."""
NEEDED = TOKENS * 4096
PATIENCE_S = 120.0
"""For what takes a second or two on a machine that does nothing else."""


@pytest.fixture
def budget() -> Iterator[str]:
    """Its name."""
    name = f"test-{os.getpid()}"
    path_of(name).unlink(missing_ok=True)
    yield name
    path_of(name).unlink(missing_ok=True)


def arguments(budget: str, *more: str) -> list[str]:
    return [*DEMO_ARGUMENTS, "--ellm-policy", "fcfs", "--ellm-device-kv-tokens", str(TOKENS),
            "--ellm-memory-budget", f"{budget}:{BUDGET}", *more]  # fmt: skip


def committed(budget: str) -> dict[int, int]:
    """Bytes of each server that lives, by port."""
    (found,) = list_budgets(budget)
    assert found.problem is None
    return {s.row.port: s.row.committed for s in found.sharers if s.alive}


class Watcher:
    """Looks at the ledger every 10 ms."""

    def __init__(self, budget: str) -> None:
        self._budget = budget
        self._stop = threading.Event()
        self.sums: list[int] = []
        self.most: dict[int, int] = {}
        """The most that each server had."""

    def __enter__(self) -> Watcher:
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            found = committed(self._budget)
            self.sums.append(sum(found.values()))
            for port, nbytes in found.items():
                self.most[port] = max(self.most.get(port, 0), nbytes)


def scheduler_of(server: ServerProcess) -> int:
    """The pid of the process that has its memory."""
    (row,) = (s.row for b in list_budgets() for s in b.sharers if s.row.port == server.port)
    return row.pid


def wait_until(holds: Callable[[], bool], what: str) -> float:
    """Returns seconds that it took."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() < began + PATIENCE_S, what
        time.sleep(0.005)
    return time.monotonic() - began


def ledger_is_right(budget: str, server: ServerProcess) -> bool:
    """Whether it has what its state says."""
    has = server.state(integrity=False)["device_bytes_committed"]
    return bool(has == committed(budget)[server.port])


def test_opposite_bursts_share_one_budget(budget: str) -> None:
    """Each has most of it while the other has nothing to do, and half while both have."""
    bodies = [greedy(p, 160) for p in prompts(24, 500, 700, seed=11)]
    with (
        ServerProcess(arguments(budget), STRICT) as one,
        ServerProcess(arguments(budget), STRICT) as two,
        Watcher(budget) as watcher,
        ThreadPoolExecutor(2) as background,
    ):
        alone = token_ids(ask(one.url, bodies))
        assert watcher.most[one.port] > 0.6 * BUDGET
        watcher.most[two.port] = 0  # it had most when it started
        assert token_ids(ask(two.url, bodies)) == alone
        assert watcher.most[two.port] > 0.6 * BUDGET
        for server in (one, two):
            server.flush_cache()
        both = [background.submit(ask, server.url, bodies) for server in (one, two)]
        share = BUDGET // 2
        wait_until(
            lambda: all(0.8 * share < b <= share for b in committed(budget).values()),
            f"no fair shares: {committed(budget)}",
        )
        assert [token_ids(answers.result()) for answers in both] == [alone, alone]
        for server in (one, two):
            state = server.state()
            assert state["integrity"] == "ok" and state["retractions_total"] == 0
            assert state["budget"]["problem"] is None
            wait_until(partial(ledger_is_right, budget, server), "the ledger is wrong")
    assert len(watcher.sums) > 200 and max(watcher.sums) <= BUDGET
    assert len(watcher.most) == 2


def test_a_server_that_is_killed_leaves_its_memory_to_the_other(budget: str) -> None:
    bodies = [greedy(p, 400) for p in prompts(24, 600, 700, seed=12)]
    with ServerProcess(arguments(budget), STRICT) as one, ThreadPoolExecutor(2) as background:
        with ServerProcess(arguments(budget), STRICT) as two:
            other, mine = (background.submit(ask, s.url, bodies) for s in (two, one))
            for server in (one, two):
                wait_for(server, lambda state: state["running"] > 0)
            wait_until(
                lambda: min(committed(budget).values()) > 0.4 * BUDGET, "no share of its own"
            )
            before = committed(budget)
            os.kill(scheduler_of(two), signal.SIGKILL)
            whole = NEEDED - 2 * MIB  # growth goes in steps
            took = wait_until(
                lambda: committed(budget).get(one.port, 0) >= whole,
                f"what the dead server had is nobody's: {committed(budget)}, {before}",
            )
            more = (committed(budget)[one.port] - before[one.port]) / MIB
            print(f"\n{more:.0f} MiB of a killed server in use after {took:.3f} s")
            assert other.exception() is not None
        answered = token_ids(mine.result())
        assert all(len(tokens) == 400 for tokens in answered)
        assert token_ids(ask(one.url, bodies[:3])) == answered[:3], "those of a quiet server"
        one.flush_cache()
        state = one.state()
        assert state["integrity"] == "ok"
        assert state["device_units_free"] == state["device_units_total"]


def start(*more: str, environment: Mapping[str, str] = STRICT) -> str:
    """What a server says that does not start."""
    status, lines = refused([*DEMO_ARGUMENTS, *more], environment)
    said = [line for line in lines if line.startswith("ellm-sgl: error: ")]
    assert status != 0 and len(said) == 1, lines[-30:]
    return said[0]


def refusal(budget: str, *more: str, environment: Mapping[str, str] = STRICT) -> str:
    return start(*arguments(budget, *more)[len(DEMO_ARGUMENTS) :], environment=environment)


def test_a_size_that_makes_no_sense() -> None:
    said = start("--ellm-policy", "fcfs", "--ellm-memory-budget", "a:nan")
    assert "--ellm-memory-budget 'a:nan': give NAME:SIZE" in said


def test_more_than_the_machine_has() -> None:
    said = start("--ellm-policy", "fcfs", "--ellm-memory-budget", "a:900TiB")
    assert re.search(
        r"a:\d+: the (machine|container).* has [\d,]+ bytes in all; give a small", said
    )


def test_ledgers_that_are_none(budget: str) -> None:
    path = path_of(budget)
    path.write_bytes(b"something else")
    assert f"{path}: is corrupt; remove it (rm {path}) once no" in refusal(budget)
    assert path.read_bytes() == b"something else"
    path.unlink()
    ledger = LedgerFile(path, create=True)
    ledger.begin(BUDGET)
    with path.open("r+b") as out:
        out.seek(16)
        out.write(b"\x07")
    assert "is of another version of ellm-sgl (format 7, not 1); remove it" in refusal(budget)
    path.unlink()
    path.symlink_to("/etc/passwd")
    assert "cannot be opened" in refusal(budget)


def test_a_budget_that_has_no_place_for_a_server(budget: str) -> None:
    """Which is known only once the model is."""
    other = Member(budget, BUDGET, "other", BUDGET - 4 * MIB)
    # With a variable of its own it is a process of its own, no copy.
    own = STRICT | {"OMP_DISPLAY_ENV": "false"}
    said = refusal(budget, "--ellm-min-device-kv-tokens", "4000", environment=own)
    assert f"are promised to others (other (pid {os.getpid()}): 0 bytes); give a smaller" in said
    assert "give all the same size, or end them first" in refusal(
        budget, "--ellm-memory-budget", f"{budget}:64MiB"
    )
    assert other.publish(0).committed == 0
    said = start("--ellm-policy", "fcfs", "--ellm-memory-budget", f"{budget}-small:1MiB")
    path_of(f"{budget}-small").unlink()
    assert "a floor of 2,097,152 bytes does not fit in 1,048,576" in said


def test_a_dead_owner_is_no_owner(budget: str) -> None:
    """Nor does its size of the budget bind anybody."""
    code = f"from ellm_sgl.budget import Member; Member('{budget}', {8 * MIB}, 'dead', 0).debit(9)"
    subprocess.run([sys.executable, "-c", code], check=True)
    with ServerProcess(arguments(budget), STRICT) as server:
        assert list(committed(budget)) == [server.port]
        assert server.state()["budget"]["floor_bytes"] == 2 * MIB


def test_a_ledger_that_breaks_while_servers_run(budget: str) -> None:
    """They go on with what they have."""
    [body] = [greedy(p, 16) for p in prompts(1, 60, 60)]
    with ServerProcess(arguments(budget), STRICT) as server:
        expected = token_ids(ask(server.url, [body]))
        with path_of(budget).open("r+b") as out:  # in one write: an emptied file says otherwise
            out.write(b"something else")
        wait_until(
            lambda: server.state(integrity=False)["budget"]["problem"] is not None,
            "it has not noticed",
        )
        assert "is corrupt" in server.state()["budget"]["problem"]
        assert token_ids(ask(server.url, [body])) == expected
        assert server.log.read_text().count("this server keeps what it has") == 1


def mapped(server: ServerProcess) -> int:
    """Tokens of requests, wherever their KV is."""
    return int(server.state(integrity=False)["pool"]["mapped_tokens"])


@contextmanager
def two_ranks(budget: str, nbytes: int) -> Iterator[ServerProcess]:
    cores = sorted(os.sched_getaffinity(0))
    binding = {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}
    more = "--tp", "2", "--ellm-memory-budget", f"{budget}:{nbytes}"
    with ServerProcess(arguments(budget, *more), {**STRICT, **binding}) as server:
        yield server


def test_two_ranks_follow_their_share(budget: str) -> None:
    """Who have more KV under way than they keep when the other wants as much."""
    bodies, shared, taken = [greedy(p, 450) for p in prompts(8, 200, 250)], 22 * MIB, 10 * MIB
    with two_ranks(budget, shared) as server, ThreadPoolExecutor(1) as background:
        expected = token_ids(ask(server.url, bodies))
        server.flush_cache()
        other = Member(budget, shared, "other", 2 * MIB)
        evicted = server.state()["evicted_units_total"]
        with Watcher(budget) as watcher:
            answers = background.submit(ask, server.url, bodies)
            wait_until(lambda: mapped(server) > 3200, "they do not grow")
            for _ in range(3):
                wait_until(lambda: other.publish(shared).free >= taken, "it does not give back")
                assert other.debit(taken)
                assert server.state()["integrity"] == "ok"
                assert not answers.done()
                other.publish(0)
                other.credit(taken)
                time.sleep(0.3)
            assert token_ids(answers.result()) == expected
        assert max(watcher.sums) <= shared
        state = server.state()
        assert state["evicted_units_total"] > evicted
        assert (state["integrity"], state["retractions_total"]) == ("ok", 0)
