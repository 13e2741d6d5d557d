"""Run other people's code, which may never return, without ever having to wait for it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

_Call = Callable[[], None]


class OverdueError(Exception):
    """A call has not returned in its time. It goes on, and nobody waits for it."""


class Worker:
    """One thread that runs calls one after the other; it starts with the first.

    A daemon, unlike an executor's threads, which Python joins when it ends: a call that hangs for
    ever keeps no process from ending.

    Args:
        name: of the thread.
        nice: by how much its priority is lower than that of others (Linux's nice value, 0 to 19).
    """

    def __init__(self, name: str, nice: int = 0) -> None:
        self._name, self._nice = name, nice
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._started = False

    def submit(
        self, function: Callable[P, T], *arguments: P.args, **options: P.kwargs
    ) -> Future[T]:
        """Run a call as soon as those before it have returned.

        Whatever it raises is the future's exception, and so is that there can be no thread. One
        that is no `Exception` (`sys.exit`) is meant to end the caller's process, which is not its
        own: it becomes a RuntimeError.
        """
        future: Future[T] = Future()

        def call() -> None:
            try:
                future.set_result(function(*arguments, **options))
            except Exception as error:
                future.set_exception(error)
            except BaseException as error:
                future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))

        if not self._started:
            try:
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
            except RuntimeError as error:  # there are no more; the next call may find one
                future.set_exception(error)
                return future
            self._started = True
        self._calls.put(call)
        return future

    def close(self) -> None:
        """End the thread once the call in progress has returned; this does not wait for it."""
        self._calls.put(None)

    def _run(self) -> None:
        if self._nice:
            own = threading.get_native_id()
            with contextlib.suppress(OSError):  # a sandbox may forbid it
                nice = os.getpriority(os.PRIO_PROCESS, own) + self._nice
                os.setpriority(os.PRIO_PROCESS, own, nice)  # Linux's own limit is 19
        while (call := self._calls.get()) is not None:
            call()


def call_within(seconds: float, function: Callable[..., T], *arguments: Any) -> T:
    """What `function(*arguments)` returns, or raises.

    Args:
        seconds: how long to wait for it.

    Raises:
        OverdueError: it has not returned by then.
    """
    worker = Worker(f"ellm-{getattr(function, '__name__', 'call')}")
    future = worker.submit(function, *arguments)
    worker.close()
    return result_within(seconds, future)


def result_within(seconds: float, future: Future[T]) -> T:
    """As `call_within`, of a call that was submitted before."""
    try:
        return future.result(seconds)
    except TimeoutError:
        if future.done():  # the call's own TimeoutError
            raise
        raise OverdueError from None
