"""Which process a number means: numbers are used again, (number, start) pairs are not."""

from __future__ import annotations

from pathlib import Path

_STATE, _THREADS, _STARTED = 0, 17, 19
"""Fields of /proc/PID/stat behind the name, which may hold anything but the last parenthesis."""


def started(pid: int) -> int | None:
    """When a process began, in clock ticks since the machine did; None if it is no more.

    One that has ended and waits for its parent has no memory any longer: it is no more.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if fields[_STATE] in "ZX" and int(fields[_THREADS]) <= 1:
        return None
    return int(fields[_STARTED])
