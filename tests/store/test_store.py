"""Blocks on disk: found again, within a size, and never other than they were written."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ellm_sgl.store import Chain, StoreFullError, most_buffered
from ellm_sgl.store import store as store_module
from ellm_sgl.store.folder import LOCK
from ellm_sgl.store.records import RECORD_BYTES
from ellm_sgl.worker import Worker
from tests.store.scene import (
    BLOCK_BYTES,
    MARK,
    data_of,
    keys_of,
    let_go,
    opened,
    put,
    read,
)

ROOT = Path(__file__).resolve().parents[2]


def test_what_was_stored_is_found_after_a_restart(tmp_path: Path) -> None:
    store = opened(tmp_path)
    keys = keys_of(1, 20)
    assert put(store, keys) == 20
    assert read(store, keys) == 20
    let_go(store)  # without `close`: as if killed
    again = opened(tmp_path)
    assert read(again, keys) == 20
    assert read(again, keys_of(2, 3)) == 0


def test_blocks_can_be_found_once_they_are_written(tmp_path: Path) -> None:
    calls: list[tuple[Future[Any], Any, Any]] = []

    def later(function: Any, *arguments: Any) -> Future[Any]:
        calls.append((Future(), function, arguments))
        return calls[-1][0]

    store = opened(tmp_path, submit=later)
    keys = keys_of(1, 4)
    put(store, keys)
    assert store.leading(keys) == 0 and all(map(store.has, keys))
    future, function, arguments = calls[0]
    future.set_result(function(*arguments))
    assert store.leading(keys) == 4


def test_the_queue_to_the_disk_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "QUEUED_BYTES", 10 * BLOCK_BYTES)
    store = opened(tmp_path, submit=lambda *_: Future())
    assert store.room == 10
    put(store, keys_of(1, 7))
    assert store.room == 3


def test_what_comes_at_once_waits_in_the_queue_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "QUEUED_BYTES", 2 * BLOCK_BYTES)
    monkeypatch.setattr(store_module, "READ_BYTES", 3 * BLOCK_BYTES)
    store = opened(tmp_path, submit=lambda *_: Future(), at_once=5)
    assert store.room == 5
    put(store, keys_of(1, 4))
    assert store.room == 1
    assert most_buffered(BLOCK_BYTES, 5) == (5 + 3) * BLOCK_BYTES
    assert most_buffered(BLOCK_BYTES, 1) == (2 + 3) * BLOCK_BYTES


def test_a_block_finds_room_however_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "QUEUED_BYTES", BLOCK_BYTES - 1)
    store = opened(tmp_path, submit=lambda *_: Future())
    assert store.room == 1
    put(store, keys_of(1, 1))
    assert store.room == 0


def test_what_waits_is_written_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[tuple[Future[Any], Any]] = []
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)

    def later(function: Any) -> Future[Any]:
        jobs.append((Future(), function))
        return jobs[-1][0]

    store = opened(tmp_path, submit=later)
    for chain in range(5):
        put(store, keys_of(chain, 3))
    jobs[0][0].set_result(jobs[0][1]())
    assert [store.leading(keys_of(chain, 3)) for chain in range(5)] == [3, 0, 0, 0, 0]
    for future, function in jobs[1:]:
        future.set_result(function())
    assert all(read(store, keys_of(chain, 3)) == 3 for chain in range(5))
    assert len(synced) == 2  # data, records


def test_a_full_store_reads_nothing_for_what_it_cannot_take(tmp_path: Path) -> None:
    store = opened(tmp_path, blocks=4)
    stamp = store.begin()
    assert put(store, keys_of(1, 4), 0, stamp) == 4
    with pytest.raises(StoreFullError):
        store.put(keys_of(1, 2, 4), 4, stamp, lambda count: pytest.fail("copied for nothing"))


def test_the_order_of_use_survives_a_kill(tmp_path: Path) -> None:
    store = opened(tmp_path, blocks=8)
    for chain in (1, 2):
        put(store, keys_of(chain, 4))
    store.touch(keys_of(1, 4), store.begin())
    let_go(store)
    again = opened(tmp_path, blocks=8)
    put(again, keys_of(3, 4))
    assert read(again, keys_of(1, 4)) == 4 and read(again, keys_of(2, 4)) == 0


def test_what_is_under_way_is_there_after_a_kill(tmp_path: Path) -> None:
    """However often slots were written before."""
    jobs: list[tuple[Future[Any], Any]] = []

    def later(function: Any) -> Future[Any]:
        jobs.append((Future(), function))
        return jobs[-1][0]

    store = opened(tmp_path, blocks=8, submit=later)
    for chain in range(700):
        put(store, keys_of(chain, 2))
        if len(jobs) > 3:
            future, function = jobs.pop(0)
            future.set_result(function())
    for future, function in jobs:
        future.set_result(function())
    let_go(store)
    again = opened(tmp_path, blocks=8)
    assert all(read(again, keys_of(chain, 2)) == 2 for chain in range(696, 700))


def test_of_a_store_that_is_full_the_least_recent_goes_ends_first(tmp_path: Path) -> None:
    store = opened(tmp_path, blocks=8)
    old, young = keys_of(1, 4), keys_of(2, 4)
    put(store, old)
    put(store, young)
    store.touch(old, store.begin())
    assert put(store, keys_of(3, 2)) == 2
    assert read(store, old) == 4
    assert read(store, young) == 2
    assert read(store, keys_of(3, 2)) == 2


def test_a_request_larger_than_the_store_keeps_its_beginning(tmp_path: Path) -> None:
    store = opened(tmp_path, blocks=8)
    put(store, keys_of(1, 3))
    assert put(store, keys_of(2, 12)) == 8
    assert read(store, keys_of(2, 12)) == 8
    assert os.path.getsize(tmp_path / MARK / "blocks") == 8 * BLOCK_BYTES


def test_a_smaller_store_keeps_what_fits(tmp_path: Path) -> None:
    store = opened(tmp_path, blocks=16)
    put(store, keys_of(1, 16))
    let_go(store)
    smaller = opened(tmp_path, blocks=4)
    assert read(smaller, keys_of(1, 16)) == 4
    assert os.path.getsize(tmp_path / MARK / "blocks") == 4 * BLOCK_BYTES


@given(data=st.data())
def test_any_history_is_that_of_a_dictionary(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Puts, touches, reads, restarts: what is found was put, the newest request is found whole,
    and the store never outgrows its size."""
    path = tmp_path_factory.mktemp("store")
    blocks = data.draw(st.integers(2, 12))
    store = opened(path, blocks)
    put_before: set[bytes] = set()
    for _ in range(data.draw(st.integers(1, 25))):
        chain, length = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 14))
        keys = keys_of(chain, length)
        match data.draw(st.sampled_from(["put", "put", "read", "touch", "restart"])):
            case "put":
                stamp = store.begin()
                have = store.leading(keys)
                store.touch(keys, stamp)
                new = [k for k in keys[have:] if not store.has(k)]
                if new == keys[have:]:
                    taken = put(store, new, have, stamp) if new else 0
                    put_before.update(new[:taken])
                    assert read(store, keys) == min(length, blocks)
            case "read":
                assert read(store, keys) == store.leading(keys)
            case "touch":
                store.touch(keys, store.begin())
            case "restart":
                if data.draw(st.booleans()):
                    store.close()
                let_go(store)
                before = set(store.index._entries)
                store = opened(path, blocks)
                assert set(store.index._entries) == before
        assert set(store.index._entries) <= put_before
        slots = [entry.slot for entry in store.index._entries.values()]
        assert len(set(slots)) == len(slots) and all(1 <= slot <= blocks for slot in slots)
        assert os.path.getsize(path / MARK / "blocks") <= blocks * BLOCK_BYTES
    let_go(store)


# -- damage ---------------------------------------------------------------------------------


def test_a_flipped_byte_is_found(tmp_path: Path) -> None:
    store = opened(tmp_path)
    keys = keys_of(1, 6)
    put(store, keys)
    flip(tmp_path / MARK / "blocks", 3 * BLOCK_BYTES + 17)
    assert read(store, keys) == 3
    assert store.totals.damaged_blocks == 1 and not store.has(keys[3])
    assert put(store, keys[3:4], 3) == 1
    assert read(store, keys) == 6


@pytest.mark.parametrize("place", range(0, RECORD_BYTES, 5))
def test_a_damaged_record_loses_its_block_alone(tmp_path: Path, place: int) -> None:
    store = opened(tmp_path)
    keys = keys_of(1, 6)
    put(store, keys)
    let_go(store)
    flip(tmp_path / MARK / "records", 2 * RECORD_BYTES + place)
    again = opened(tmp_path)
    assert [again.has(key) for key in keys] == [True, True, False, True, True, True]


def test_records_that_are_torn_are_read_up_to_where_they_are_whole(tmp_path: Path) -> None:
    store = opened(tmp_path)
    keys = keys_of(1, 6)
    put(store, keys)
    let_go(store)
    os.truncate(tmp_path / MARK / "records", 4 * RECORD_BYTES + 11)
    again = opened(tmp_path)
    assert read(again, keys) == 4
    assert put(again, keys[4:], 4) == 2
    let_go(again)
    assert read(opened(tmp_path), keys) == 6


def test_a_slot_written_over_by_a_crash_holds_nobodys_block(tmp_path: Path) -> None:
    """Data reached the disk, its record did not: the block that was there before is gone."""
    store = opened(tmp_path, blocks=2)
    put(store, keys_of(1, 2))
    let_go(store)
    with open(tmp_path / MARK / "blocks", "r+b") as file:
        file.write(data_of(keys_of(2, 1)).tobytes())
    again = opened(tmp_path, blocks=2)
    assert read(again, keys_of(1, 2)) == 0
    assert again.totals.damaged_blocks == 1


KILLED = """
    import sys
    from pathlib import Path
    from ellm_sgl.worker import Worker
    from ellm_sgl.store import store as module
    from tests.store.scene import BLOCK_BYTES, keys_of, opened, put
    module.QUEUED_BYTES = 80 * BLOCK_BYTES
    store = opened(Path(sys.argv[1]), blocks=400, submit=Worker("write").submit)
    first = int(sys.argv[2])
    for chain in range(first, 10**8):
        while store.room < 8:
            pass
        put(store, keys_of(chain, 8))
        if store.leading(keys_of(first + 10, 8)) == 8:
            print("ready", flush=True)
"""


def test_a_writer_killed_at_any_moment_leaves_only_whole_blocks(tmp_path: Path) -> None:
    """Whatever is found afterwards is what was put there (`read` compares)."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    chance = random.Random(5)
    for run in range(3):
        command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path), f"{run}000000"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as writer:
            assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
            time.sleep(chance.uniform(0.05, 0.25))
            writer.send_signal(signal.SIGKILL)
        store = opened(tmp_path, blocks=400)
        keys = list(store.index._entries)
        found = sum(read(store, [key]) for key in keys)
        assert found >= 80
        assert found + store.totals.damaged_blocks == len(keys)
        let_go(store)


def test_a_full_disk_stops_storing_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The limit on the size of a file stands for the disk's: the same error path of `write`."""
    import resource

    store = opened(tmp_path)
    put(store, keys_of(1, 4))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6 * BLOCK_BYTES, limits[1]))
    try:
        put(store, keys_of(2, 4))
        assert store.leading(keys_of(2, 4)) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert store.room == 0 and store.problem is not None
    assert "File too large" in store.problem
    assert caplog.text.count("nothing more is stored") == 1
    assert read(store, keys_of(1, 4)) == 4
    store.close()
    let_go(store)
    again = opened(tmp_path)
    assert read(again, keys_of(1, 4)) == 4 and again.problem is None


def test_a_part_that_cannot_be_opened_is_a_store_without_blocks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / LOCK).touch()
    (tmp_path / MARK).touch()  # a file
    store = opened(tmp_path)
    assert store.room == 0 and store.leading(keys_of(1, 2)) == 0
    assert "File exists" in str(store.problem) and str(store.problem) in caplog.text
    store.close()


def test_a_thread_writes_beside_its_caller(tmp_path: Path) -> None:
    store = opened(tmp_path, blocks=512, submit=Worker("write").submit)
    for chain in range(20):
        put(store, keys_of(chain, 10))
    store.close()
    let_go(store)
    again = opened(tmp_path, blocks=512)
    assert all(read(again, keys_of(chain, 10)) == 10 for chain in range(20))


# -- names ----------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2**40), max_size=60), st.integers(0, 60), st.integers(1, 16))
def test_a_chain_is_the_same_however_it_grew(tokens: list[int], cut: int, block: int) -> None:
    whole, parts = Chain(block), Chain(block)
    whole.extend(np.array(tokens, np.int64))
    parts.extend(np.array(tokens[:cut], np.int64))
    parts.extend(np.array(tokens[parts.tokens :], np.int64))
    assert whole.keys == parts.keys and len(whole.keys) == len(tokens) // block
    assert len(set(whole.keys)) == len(whole.keys)


def test_chains_differ_by_namespaces_and_by_what_is_before() -> None:
    """Whatever a request may say: a lone surrogate is no text that can be encoded."""
    spaces = [(), (None,), ("a", None), (None, "a"), ("a", "a"), ("\ud800", None), ()]
    chains = [Chain(2, names) for names in spaces]
    for chain in chains[:-1]:
        chain.extend(np.array([1, 2, 3, 4]))
    chains[-1].extend(np.array([9, 2, 3, 4]))
    assert len({chain.keys[1] for chain in chains}) == len(spaces)


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))
