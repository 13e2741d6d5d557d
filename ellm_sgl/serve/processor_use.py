"""Who else used the processor while something was measured."""

from __future__ import annotations

import os
import time

import psutil


class ProcessorUse:
    """From now on: how busy programs other than this one and a server keep the processor.

    Args:
        server: process id; its children count as the server.
    """

    def __init__(self, server: int) -> None:
        self._ours = (os.getpid(), server)
        self._begin = self._look()

    def others(self) -> float:
        """Cores that other programs kept busy, on average since the start."""
        begin_s, busy, own = self._begin
        now_s, busy_now, own_now = self._look()
        return max(0.0, ((busy_now - busy) - (own_now - own)) / (now_s - begin_s))

    def _look(self) -> tuple[float, float, float]:
        """Clock, and processor seconds of the whole machine and of our processes."""
        machine = psutil.cpu_times()
        waiting = machine.idle + getattr(machine, "iowait", 0.0)
        guests = getattr(machine, "guest", 0.0) + getattr(machine, "guest_nice", 0.0)
        return time.monotonic(), sum(machine) - waiting - guests, sum(map(_seconds, self._tree()))

    def _tree(self) -> list[psutil.Process]:
        this, server = map(psutil.Process, self._ours)
        return [this, server, *server.children(recursive=True)]


def _seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)
