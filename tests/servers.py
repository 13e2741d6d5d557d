"""How tests start servers, and see them end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import psutil

from ellm_sgl.client.process import ServerProcess

STRICT = {
    # SGLang's own memory checks after every step, fatal when they fail.
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "OMP_NUM_THREADS": "1",
}
"""A server's environment."""

ASKED_ABOUT_HEALTH = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "1"}
"""SGLang's own way for those who ask about a server's health again and again, such as a router:
each answer takes a second and a token. (Servers that are copies answer at once otherwise.)"""


def refused(
    arguments: Sequence[str], environment: Mapping[str, str] = STRICT
) -> tuple[int, list[str]]:
    """Exit status of a server that does not start, and the lines that it says."""
    server = ServerProcess(arguments, environment)
    try:
        server.launch()
        assert server._process is not None
        status = server._process.wait(timeout=180)
        return status, server.log.read_text().strip().splitlines()
    finally:
        server.stop()


def still_there(processes: Iterable[psutil.Process], seconds: float = 60.0) -> list[psutil.Process]:
    """Those that have not ended after so many seconds. One has, though nobody may ever ask how: on
    some machines nobody does for those whose parent went first."""
    deadline = time.monotonic() + seconds
    left = list(processes)
    while (left := [each for each in left if _runs(each)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
