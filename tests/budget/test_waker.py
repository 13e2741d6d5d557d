"""Who sleeps beside a ledger: woken by whoever writes to it, in whatever process, or by its own."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ellm_sgl.budget import Member, Waker

LONG_S = 60.0
"""No test waits for as long: each sleep is cut short, or the test fails."""


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.write(descriptor, b"before")
    yield descriptor
    os.close(descriptor)


def write(path: Path) -> None:
    with path.open("r+b", buffering=0) as other:
        other.write(b"after")


def test_a_write_by_another_process_ends_the_sleep(file: int, tmp_path: Path) -> None:
    waker = Waker(file)
    assert not waker.sleep(0), "what was written before it was made is old"
    writer = multiprocessing.get_context("spawn").Process(target=write, args=(tmp_path / "file",))
    writer.start()
    assert waker.sleep(LONG_S)
    writer.join()
    assert not waker.sleep(0), "told once"


def test_what_comes_before_the_sleep_counts_once(file: int, tmp_path: Path) -> None:
    waker = Waker(file)
    assert waker.hears
    for tell in (waker.wake, lambda: write(tmp_path / "file")):
        tell()
        tell()
        assert waker.sleep(LONG_S)
        assert not waker.sleep(0)


def test_another_thread_ends_the_sleep() -> None:
    waker = Waker(None)
    timer = threading.Timer(0.05, waker.wake)
    timer.start()
    assert waker.sleep(LONG_S)
    timer.join()


def test_it_watches_the_file_not_its_name(file: int, tmp_path: Path) -> None:
    (tmp_path / "file").rename(tmp_path / "moved")
    waker = Waker(file)
    (tmp_path / "file").write_bytes(b"another")
    assert not waker.sleep(0)
    write(tmp_path / "moved")
    assert waker.sleep(LONG_S)


@pytest.mark.parametrize(
    "libc",
    [
        SimpleNamespace(),
        SimpleNamespace(inotify_init1=lambda _: -1),
        SimpleNamespace(
            inotify_init1=lambda _: os.open(os.devnull, os.O_RDONLY),  # to be read at any time
            inotify_add_watch=lambda *_: -1,
        ),
    ],
    ids=["not there", "no more of them", "no more watches"],
)
def test_without_inotify_it_looks_again_after_a_while(
    file: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, libc: SimpleNamespace
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: libc)
    waker = Waker(file)
    assert not waker.hears
    write(tmp_path / "file")
    assert not waker.sleep(0.01)
    waker.wake()
    assert waker.sleep(LONG_S)


def test_a_member_hears_of_another(tmp_path: Path) -> None:
    one, other = (Member("test", 1000, name, 100, folder=tmp_path) for name in "ab")
    waker = one.waker()
    other.publish(500)
    assert waker.sleep(LONG_S)
    assert one.follow(100).share < 900


def test_nobody_is_woken_by_who_says_nothing_new(tmp_path: Path) -> None:
    one, other = (Member("test", 1000, name, 100, folder=tmp_path) for name in "ab")
    other.publish(500)
    wakers = [one.waker(), other.waker()]
    for _ in range(3):
        one.publish(100)
        other.publish(500)
    assert [waker.sleep(0) for waker in wakers] == [True, True], "the first time it was new"
    one.publish(100)
    other.publish(500)
    assert [waker.sleep(0) for waker in wakers] == [False, False]
    other.publish(600)
    assert [waker.sleep(LONG_S) for waker in wakers] == [True, True]
