"""The ledger: in one process, and between processes that are killed at any moment."""

from __future__ import annotations

import logging
import os
import random
import signal
import stat
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ellm_sgl.budget import (
    LedgerBusyError,
    LedgerError,
    Member,
    Row,
    Standing,
    file,
    hold,
    layout,
    ledger,
    list_budgets,
    path_of,
)
from ellm_sgl.budget.file import LedgerFile
from tests.budget import sharing
from tests.budget.sharing import BUDGET, FLOOR

NUMBERS = st.integers(0, 2**64 - 1)


def join(folder: Path, label: str = "a", floor: int = FLOOR, budget: int = BUDGET) -> Member:
    return Member("test", budget, label, floor, folder=folder)


def rows(folder: Path) -> list[Row]:
    (budget,) = list_budgets("test", folder)
    assert budget.problem is None
    return [sharer.row for sharer in budget.sharers]


def test_two_servers_divide_what_both_want(tmp_path: Path) -> None:
    a, b = join(tmp_path, "a"), join(tmp_path, "b")
    assert a.publish(2 * BUDGET).share == BUDGET - FLOOR
    assert b.publish(2 * BUDGET).share == BUDGET // 2
    assert a.publish(2 * BUDGET).share == BUDGET // 2
    assert b.publish(0).share == FLOOR
    assert [row.label for row in rows(tmp_path)] == ["a", "b"]


def test_a_debit_is_all_or_nothing(tmp_path: Path) -> None:
    a, b = join(tmp_path), join(tmp_path)
    assert a.debit(BUDGET - 10)
    assert not b.debit(11)
    assert b.publish(0).committed == 0
    assert b.debit(10)
    a.credit(BUDGET - 10)
    assert b.publish(0).free == BUDGET - 10


def test_the_file_is_the_users_alone(tmp_path: Path) -> None:
    join(tmp_path)
    assert stat.S_IMODE(path_of("test", tmp_path).stat().st_mode) == 0o600


def test_a_budget_without_servers_may_have_another_size(tmp_path: Path) -> None:
    LedgerFile(path_of("test", tmp_path), create=True).begin(BUDGET)
    assert join(tmp_path, budget=2 * BUDGET).publish(0).free == 2 * BUDGET


@given(st.builds(Row, *[NUMBERS] * 2, st.text(max_size=12), *[NUMBERS] * 4))
def test_a_row_is_read_as_it_was_written(row: Row) -> None:
    read = layout.unpack_row(layout.pack_row(row))
    assert read is not None
    assert {**vars(read), "label": ""} == {**vars(row), "label": ""}
    assert read.label == row.label.rstrip("\0").encode()[:64].decode(errors="ignore")


@given(st.integers(0, layout.SLOT - 1), st.integers(1, 255))
def test_a_changed_byte_is_noticed(at: int, change: int) -> None:
    for packed, unpack in (
        (layout.pack_row(Row(1, 2, "a", 3)), layout.unpack_row),
        (layout.pack_header(5), layout.unpack_header),
    ):
        spoiled = bytearray(packed)
        spoiled[at] ^= change
        with pytest.raises((layout.CorruptError, layout.VersionError)):
            unpack(bytes(spoiled))


# -- what is refused ------------------------------------------------------------------------


def spoil(folder: Path, at: int, data: bytes) -> None:
    with path_of("test", folder).open("r+b") as out:
        out.seek(at)
        out.write(data)


def test_errors_name_the_file_the_value_and_the_remedy(tmp_path: Path) -> None:
    path = path_of("test", tmp_path)
    member = join(tmp_path, "first", 600_000)
    with pytest.raises(LedgerError, match=r"a floor of 500,000 bytes does not fit in 1,000,000, of "
                       r"which 600,000 are promised to others \(first \(pid \d+\): 0 bytes\); give "
                       "a smaller --ellm-min"):  # fmt: skip
        join(tmp_path, floor=500_000)
    with pytest.raises(LedgerError, match=r"share 1,000,000 bytes, not 7; give all the same"):
        join(tmp_path, floor=0, budget=7)
    header = path.read_bytes()[: layout.SLOT]
    spoil(tmp_path, 16, struct.pack("<I", 2))
    with pytest.raises(LedgerError, match=r"another version of ellm-sgl \(format 2, not 1\); remo"):
        member.publish(0)
    spoil(tmp_path, 0, header)
    spoil(tmp_path, layout.SLOT + 8, b"nonsense")
    with pytest.raises(LedgerError, match=rf"{path}: is corrupt; remove it \(rm {path}\) once no"):
        member.publish(0)
    (listed,) = list_budgets(folder=tmp_path)
    assert listed.problem is not None and "is corrupt" in listed.problem
    path.write_bytes(b"something else")
    with pytest.raises(LedgerError, match="is corrupt"):
        join(tmp_path)
    path.unlink()
    with pytest.raises(LedgerError, match=r"was removed or replaced .*; restart the servers"):
        member.publish(0)
    path.symlink_to("/etc/passwd")
    with pytest.raises(LedgerError, match="cannot be opened"):
        join(tmp_path)
    with pytest.raises(LedgerError, match="its folder does not exist; make it"):
        join(tmp_path / "nowhere")


def test_a_ledger_that_was_begun_anew_is_not_this_one(tmp_path: Path) -> None:
    member = join(tmp_path)
    LedgerFile(path_of("test", tmp_path), create=True).begin(BUDGET)
    with pytest.raises(LedgerError, match="was begun anew meanwhile; restart"):
        member.debit(1)


def test_one_who_is_stopped_with_the_lock_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "LOCK_S", 0.05)
    member = join(tmp_path)
    other = LedgerFile(path_of("test", tmp_path), create=False)
    with other.locked(), pytest.raises(LedgerBusyError, match="locked by another process for"):
        member.publish(0)
    member.publish(0)


def test_a_full_ledger_takes_nobody_more(tmp_path: Path) -> None:
    for _ in range(layout.ROWS):
        join(tmp_path, floor=0)
    with pytest.raises(LedgerError, match="63 servers share it, and no more can"):
        join(tmp_path, floor=0)


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(LedgerError, match=r"cannot be opened \(Permission denied\); give another"):
        join(tmp_path)


# -- processes ------------------------------------------------------------------------------


def test_a_row_that_nobody_holds_is_free(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever process has its number by now."""
    member = join(tmp_path, "a")
    own = rows(tmp_path)[0]
    with caplog.at_level(logging.INFO):
        ghost = Row(own.pid, 30_000, "ghost", FLOOR, committed=BUDGET)
        LedgerFile(path_of("test", tmp_path), create=False).write(5, ghost)
        (listed,) = list_budgets(folder=tmp_path)
        assert [sharer.alive for sharer in listed.sharers] == [True, False]
        assert member.publish(BUDGET).free == BUDGET
    assert f"ghost (pid {own.pid}) is gone; its {BUDGET} bytes are free" in caplog.text
    assert [row.label for row in rows(tmp_path)] == ["a"]


def test_a_row_is_free_only_once_all_processes_of_its_server_are_gone(tmp_path: Path) -> None:
    member, other = join(tmp_path, "a"), join(tmp_path, "b")
    rank_1 = hold("test", member.index, tmp_path)
    assert member.debit(BUDGET)
    member._file.close()
    assert other.publish(0).free == 0
    rank_1.close()
    assert other.publish(0).free == BUDGET


def test_following_sees_what_publishing_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others write at once, a death after a while; else the file is left alone."""
    member, other, now = join(tmp_path, "a"), join(tmp_path, "b"), [100.0]
    monkeypatch.setattr(ledger, "time", SimpleNamespace(monotonic=lambda: now[0]))
    lock = LedgerFile._lock

    def followed(want: int, locked: bool) -> Standing:
        with mock.patch.object(LedgerFile, "_lock", autospec=True, side_effect=lock) as locks:
            standing = member.follow(want)
        assert locks.called == locked
        return standing

    first = followed(BUDGET, True)
    assert followed(BUDGET, False) == first == member.publish(BUDGET)
    assert followed(0, True).share == FLOOR  # another want
    assert other.debit(BUDGET // 2)
    assert followed(0, True).free == BUDGET // 2 == followed(0, False).free
    member.debit(10)
    assert followed(0, True).committed == 10
    other._file.close()
    now[0] += ledger.DEATHS_S / 2
    assert followed(0, False).free == BUDGET // 2 - 10
    now[0] += ledger.DEATHS_S
    assert followed(0, True).free == BUDGET - 10


class Sharing:
    """A process of `sharing.py`."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.holding = folder / f"holding-{seed}"
        self.holding.write_bytes(bytes(8))
        script = [sys.executable, sharing.__file__, str(folder), str(self.holding), str(seed)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.process = subprocess.Popen(script, stdout=subprocess.PIPE, env=environment)

    def joined(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"joined\n"

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


@pytest.mark.slow
def test_processes_killed_at_any_moment_never_have_more_than_the_budget(tmp_path: Path) -> None:
    """Three servers share, one of them is killed and another begun in its place, 20 times: what all
    have debited is in the budget, and nobody has more than was debited."""
    rng = random.Random(1)
    servers = [Sharing(tmp_path, seed) for seed in range(3)]
    try:
        for server in servers:
            server.joined()
        watcher = LedgerFile(path_of("test", tmp_path), create=False)
        for seed in range(3, 23):
            deadline = time.monotonic() + 0.02 + 0.1 * rng.random()
            while time.monotonic() < deadline:
                check(watcher, servers)
                time.sleep(0.002)
            victim = servers.pop(rng.randrange(3))
            victim.kill()
            pid = victim.process.pid
            deadline = time.monotonic() + 60
            while any(row.pid == pid for row in rows(tmp_path)):
                assert time.monotonic() < deadline, "its row is still there after a minute"
                time.sleep(0.005)
            servers.append(Sharing(tmp_path, seed))
            servers[-1].joined()
        assert all(server.process.poll() is None for server in servers)
    finally:
        for server in servers:
            server.kill()
    survivor = join(tmp_path, "survivor")
    assert survivor.publish(BUDGET).free == BUDGET and len(rows(tmp_path)) == 1


def check(watcher: LedgerFile, servers: list[Sharing]) -> None:
    with watcher.locked():
        budget, found = watcher.read()
        holdings = {s.process.pid: struct.unpack("<Q", s.holding.read_bytes()) for s in servers}
    living = [row for row in found if row is not None]
    assert budget == BUDGET and sum(row.committed for row in living) <= BUDGET
    for row in living:
        (held,) = holdings.get(row.pid, (0,))
        assert held <= row.committed, row


def test_budgets_of_other_users_are_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their files cannot be read, which is nothing to fail for."""
    join(tmp_path)
    assert list_budgets(folder=tmp_path)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert list_budgets(folder=tmp_path) == []
