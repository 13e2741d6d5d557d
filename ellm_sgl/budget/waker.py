"""Sleeps until somebody writes to a ledger's file, or this process has something to say.

Linux tells of writes (inotify), between containers too; where it has no more watches to give, who
sleeps looks again after a while, as it would without any.
"""

from __future__ import annotations

import ctypes
import os
import select

_IN_MODIFY = 0x2
_EVENTS = 4096
"""Bytes read at once: more than one writer leaves."""


class Waker:
    """For one thread that sleeps; any may wake it.

    Args:
        file: descriptor of what to watch; None: nothing.
    """

    def __init__(self, file: int | None) -> None:
        self._told = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._told, select.POLLIN)
        self._written = -1 if file is None else _watch(file)
        self.hears = self._written >= 0
        """Of writes: else who sleeps has to look."""
        if self.hears:
            self._poll.register(self._written, select.POLLIN)

    def wake(self) -> None:
        """On any thread: whoever sleeps goes on, or does not fall asleep the next time."""
        os.eventfd_write(self._told, 1)

    def sleep(self, seconds: float) -> bool:
        """Until the file is written to, `wake` is called, or so much time is over; what came before
        counts if no earlier sleep has seen it. Returns whether anything came."""
        told = self._poll.poll(seconds * 1e3)
        for found, _ in told:
            if found == self._told:
                os.eventfd_read(found)
            else:
                os.read(found, _EVENTS)
        return bool(told)


def _watch(file: int) -> int:
    """A descriptor that can be read once the file is written to; negative: there is none."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "inotify_init1"):
        return -1
    found = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    path = f"/proc/self/fd/{file}".encode()  # the file itself, whatever has its name by now
    if found >= 0 and libc.inotify_add_watch(found, path, _IN_MODIFY) < 0:
        os.close(found)
        return -1
    return found
