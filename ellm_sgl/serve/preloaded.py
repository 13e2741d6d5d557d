"""Imports all that a server needs, and makes copies of itself: see `client.preload`.

`python -m ellm_sgl.serve.preloaded FD FD` is two processes: one for stock servers and one, its
child, for those with eLLM, whose hooks it has. Each answers requests from one of the sockets FD
until its other end is closed. They have one thread each: a process with two may not be copied.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from setproctitle import getproctitle, setproctitle

from ellm_sgl.client.preload import MOST_BYTES
from ellm_sgl.serve import launch
from ellm_sgl.sglang.platform_entry import activate
from ellm_sgl.sglang.processes import prepare
from ellm_sgl.sglang.versions import VERSIONS, installed
from ellm_sgl.sglang.versions.signatures import differences


def copies(requests: socket.socket) -> list[str] | None:
    """Answer requests. Returns in each copy with the arguments of the server that it is to be, and
    in this process, with None, once nobody is left to ask: then all copies have ended."""
    running: dict[int, int | None] = {}
    """Exit status of each copy, None as long as it runs."""
    listened = True
    while listened and (asked := _next(requests)) is not None:
        number, answer = asked.pop("number"), None
        if "pid" in asked:
            answer = running[asked["pid"]] = _status(asked["pid"], running)
        else:
            try:
                pid = os.fork()
            except OSError:  # the machine has no more processes
                pid = -1
            if pid == 0:
                try:
                    _become(**asked)
                finally:  # once it is a process of its own: until then it could not be told to end
                    _answer(requests, number, os.getpid())
                    requests.close()
                return list(asked["argv"])
            if pid > 0:
                running[pid] = None
                continue
        listened = _answer(requests, number, answer)
    _end(running)
    return None


def _next(requests: socket.socket) -> dict[str, Any] | None:
    """The next request; None if nobody is left to ask."""
    with contextlib.suppress(OSError):
        received = requests.recv(MOST_BYTES)
        return dict(json.loads(received)) if received else None
    return None


def _answer(requests: socket.socket, number: int, answer: int | None) -> bool:
    """Whether somebody was there to get it."""
    with contextlib.suppress(OSError):
        requests.send(json.dumps({"number": number, "answer": answer}).encode())
        return True
    return False


def _end(running: dict[int, int | None]) -> None:
    for pid, status in running.items():
        if status is None and _status(pid, running) is None:
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:  # it has no session of its own yet
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _status(pid: int, running: dict[int, int | None]) -> int | None:
    """As `subprocess.Popen.returncode`."""
    if running[pid] is not None:
        return running[pid]
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _become(argv: list[str], environment: dict[str, str], log: str, folder: str) -> None:
    """What a process that the shell starts has of its own."""
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(file, stream.fileno())
    os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [launch.__file__, *argv]
    setproctitle(" ".join([sys.executable, "-m", launch.__name__, *argv]))
    random.seed()


def main() -> None:
    stock, elastic = (socket.socket(fileno=int(each)) for each in sys.argv[1:])
    for each in (stock, elastic):
        os.set_inheritable(each.fileno(), False)
    if activate() is None:  # a device's driver does not survive a copy
        return
    getproctitle()  # finds the place of titles, by an environment that copies replace
    gc.disable()  # see `launch.main`, which enables it
    launch.load()
    from sglang.srt.plugins import load_plugins

    load_plugins()
    gc.freeze()
    if len(os.listdir("/proc/self/task")) > 1:  # nor do threads
        return
    if (argv := copies_of_two(stock, elastic, _with_ellm)) is not None:
        launch.main(argv)


def copies_of_two(
    stock: socket.socket, elastic: socket.socket, install: Callable[[], None]
) -> list[str] | None:
    """`copies` of this process on the first socket, and of a child that `install` has been called
    in on the second."""
    child = os.fork()
    requests, other = (stock, elastic) if child else (elastic, stock)
    other.close()
    if not child:
        install()
    argv = copies(requests)
    if child and argv is None:
        os.waitpid(child, 0)
    return argv


def _with_ellm() -> None:
    """Install eLLM's hooks, where servers will find that they fit."""
    if installed() in VERSIONS and not differences():
        prepare(enabled=True)
        gc.freeze()


if __name__ == "__main__":
    main()
