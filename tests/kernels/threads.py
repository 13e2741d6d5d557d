"""What the other threads of this process are doing."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path


def others() -> set[str]:
    """All but the one that asks."""
    return set(os.listdir("/proc/self/task")) - {str(threading.get_native_id())}


def wait_until_asleep() -> None:
    """Until all others are: the last of them may be on its way to bed."""
    threads, deadline = others(), time.monotonic() + 30
    while [thread for thread in threads if _state(thread) != "S"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _state(thread: str) -> str:
    try:
        return Path(f"/proc/self/task/{thread}/stat").read_text().rsplit(")")[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # of another test's: it has ended
        return "S"
