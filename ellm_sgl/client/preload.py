"""Servers as copies of a process that has imported all that they need.

What starts one server after the other (`ellm-sgl verify`, the tests) pays for importing PyTorch and
SGLang once instead of every time, which is more than half of a start. (Not what measures: copies
have the same addresses, and each server is to have its own; nor have they warmed up.)

```
 this process ──requests──→ preloaded process ──fork──→ server ──fork──→ its workers
     │        ←──answers──┘  (serve.preloaded)   as `python -m ellm_sgl.serve.launch`
     │                          │ fork
     └───the same with──→ one with eLLM's hooks ──fork──→ server with eLLM ──fork──→ its workers
```

SGLang looks for each hook's function in all modules there are: for all of eLLM's that is a second.

Only for servers whose environment is that of the preloaded process but for variables that nobody
reads while importing; all others are started as ever.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import psutil

from ellm_sgl.config import OFF

MODULE = "ellm_sgl.serve.preloaded"
READ_LATE = ("ELLM_SGL_", "SGLANG_CPU_OMP_", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION",
             "SGLANG_ENABLE_STRICT_MEM_CHECK", "PYTEST_")  # fmt: skip
"""Beginnings of names of variables that are read once a server starts, or by no server."""
NO_WARM_UP = "--skip-server-warmup"
"""SGLang's own is a request, after it has slept for a second."""
SHORT_START = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0", "ELLM_SGL_CALIBRATION_S": "1",
               "ELLM_SGL_CPU_PREFETCH": "t0:1"}  # fmt: skip
"""Unless the environment says otherwise: without the second that SGLang waits in each answer about
its health, and most of those for which a server measures its machine. No output depends on it."""
POLL_S = 0.05
ANSWER_S = 240.0
"""Of the first request: until then it imports."""
MOST_BYTES = 1 << 20
"""Of a request: most of it is an environment."""


class Process(Protocol):
    """As much of `subprocess.Popen` as is asked of a server's process."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...


class Preloaded:
    """The processes that servers are copies of: they start with the first of them, and end, and
    all servers with them, when `close` is called or this process is no more.

    Args:
        environment: their own, and but for `READ_LATE` their servers'.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._stock, self._elastic = Channel(), Channel()
        """To the process that stock servers are copies of; to the one with eLLM's hooks."""
        self._lock = threading.Lock()

    def takes(self, environment: Mapping[str, str]) -> bool:
        """Whether a server with this environment may be a copy."""
        return _read_early(environment) == _read_early(self._environment)

    def start(self, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> Process:
        """A server with these arguments of `serve.launch`, in a session of its own.

        Raises:
            OSError: nothing on this machine may be copied, or what could be is gone.
        """
        with self._lock:
            if self._process is None:
                self._process = self._launched()
        asked = {"argv": list(argv), "environment": dict(environment), "log": str(log),
                 "folder": str(Path.cwd())}  # fmt: skip
        channel = self._elastic if enables_ellm(argv) else self._stock
        try:
            pid = channel.ask(asked)
        except TimeoutError:  # a copy that comes after all would be a second server
            self._process.kill()
            raise
        if pid is None:
            raise ChildProcessError(f"{MODULE} cannot copy itself")
        return _Copy(channel, int(pid))

    def _launched(self) -> subprocess.Popen[bytes]:
        with self._stock.theirs as stock, self._elastic.theirs as elastic:
            passed = stock.fileno(), elastic.fileno()
            return subprocess.Popen(
                [sys.executable, "-m", MODULE, *map(str, passed)],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # that is the command's own
                stderr=subprocess.DEVNULL,  # where it fails, a server that is started says why
                pass_fds=passed,
                start_new_session=True,
            )

    def close(self) -> None:
        channels = self._stock, self._elastic
        for channel in channels:
            channel.close()
        if self._process is not None:
            # Until it has answered it imports, and has no copy that would have to end.
            if not any(channel.answered for channel in channels):
                self._process.kill()
            self._process.wait()


class Channel:
    """Requests to one process, and its answers. From whichever thread."""

    def __init__(self) -> None:
        self._socket, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(ANSWER_S)
        self._lock = threading.Lock()
        self._asked = 0
        self.answered = False
        """Once, at least."""

    def ask(self, asked: dict[str, Any]) -> Any:
        """The answer.

        Raises:
            OSError: nobody is there, or nobody answered in time.
        """
        with self._lock:
            self._asked += 1
            self._socket.send(json.dumps(asked | {"number": self._asked}).encode())
            answer = {"number": 0}
            while answer["number"] != self._asked:  # one that nobody waited for may come first
                received = self._socket.recv(MOST_BYTES)
                if not received:
                    raise ConnectionError(f"{MODULE} has ended")
                answer = json.loads(received)
            self.answered = True
        return answer["answer"]

    def status(self, pid: int) -> int | None:
        """How a server ended, as `Popen.returncode` has it; None: it has not."""
        try:
            found = self.ask({"pid": pid})
        except OSError:  # its parent is gone, and with that how it ended
            found = None if _runs(pid) else -signal.SIGKILL
        return None if found is None else int(found)

    def close(self) -> None:
        self.theirs.close()
        self._socket.close()


def enables_ellm(argv: Sequence[str]) -> bool:
    """Whether a server with these arguments has eLLM enabled, or ends with what is wrong with
    them. Where it cannot be told, as of a flag that is abbreviated, no: such a server starts too,
    and has its hooks later."""
    off = any(each.endswith(OFF) for each in argv)
    return not {"--ellm-policy", "--ellm-mode"}.isdisjoint(argv) and not off


def _runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


class _Copy:
    """A server that is another process's child."""

    def __init__(self, parent: Channel, pid: int) -> None:
        self.pid = pid
        self._parent = parent
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None:
            self._status = self._parent.status(self.pid)
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(MODULE, timeout or 0)
            time.sleep(POLL_S)
        return status

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)


_current: Preloaded | None = None


@contextlib.contextmanager
def preloaded(environment: Mapping[str, str]) -> Iterator[None]:
    """Servers that start inside this context, from whichever thread, are copies of one process,
    where their environment allows it: of the one there is, if that takes this environment."""
    global _current
    if _current is not None and _current.takes(environment):
        yield
        return
    before, _current = _current, Preloaded(environment)
    try:
        yield
    finally:
        _current.close()
        _current = before


def copy(argv: Sequence[str], environment: Mapping[str, str], log: Path) -> Process | None:
    """A server as a copy; None: it may not be one, and has to be started."""
    if _current is None or not _current.takes(environment):
        return None
    with contextlib.suppress(OSError):
        return _current.start([*argv, NO_WARM_UP], {**SHORT_START, **environment}, log)
    return None


def _read_early(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(READ_LATE)}
