"""Calls that may hang: their results, their errors, and that nobody waits for them in the end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from ellm_sgl.worker import OverdueError, Worker, call_within, result_within

LONG_S = 30.0


def test_results_and_errors_come_back() -> None:
    assert call_within(LONG_S, divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        call_within(LONG_S, divmod, 7, 0)


def test_calls_run_one_after_the_other_on_one_other_thread() -> None:
    worker = Worker("test")
    futures = [worker.submit(threading.get_ident) for _ in range(3)]
    (thread,) = {future.result(LONG_S) for future in futures}
    worker.close()
    assert thread != threading.get_ident()


def test_a_worker_of_lower_priority_lowers_nobody_elses() -> None:
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    worker, own = Worker("test", nice=3), priority()
    assert worker.submit(priority).result(LONG_S) == min(own + 3, 19)
    worker.close()
    assert priority() == own


def test_a_call_that_takes_too_long_is_left_behind() -> None:
    release = threading.Event()
    worker = Worker("test")
    future = worker.submit(release.wait, LONG_S)
    with pytest.raises(OverdueError):
        result_within(0.01, future)
    release.set()
    assert result_within(LONG_S, future) is True
    worker.close()


def test_a_calls_own_timeout_is_an_error_like_any_other() -> None:
    def raises() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        call_within(LONG_S, raises)


def test_a_call_cannot_end_its_callers_process() -> None:
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        call_within(LONG_S, sys.exit, 3)


def test_a_call_for_which_there_is_no_thread_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker("test")
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", _no_thread)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            worker.submit(int).result(LONG_S)
    assert worker.submit(int).result(LONG_S) == 0
    worker.close()


def _no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_closed_worker_ends_its_thread() -> None:
    worker = Worker("test that ends")
    worker.submit(int).result(LONG_S)
    (thread,) = [t for t in threading.enumerate() if t.name == "test that ends"]
    worker.close()
    thread.join(LONG_S)
    assert not thread.is_alive()


def test_a_worker_that_was_never_asked_has_no_thread() -> None:
    before = threading.active_count()
    Worker("idle").close()
    assert threading.active_count() == before


HANGS = """
import threading, time
from ellm_sgl.worker import OverdueError, Worker, result_within
worker = Worker("hangs")
try:
    result_within(0.05, worker.submit(threading.Event().wait))
except OverdueError:
    print("left behind")
worker.close()
"""


def test_a_call_that_hangs_for_ever_keeps_no_process_from_ending() -> None:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=LONG_S, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "left behind\n", "")
    assert time.monotonic() - began < LONG_S
