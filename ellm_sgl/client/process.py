"""A server as a child process: start, wait until it answers, stop. For demo, verify and tests."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx

from ellm_sgl.client.preload import Process, copy
from ellm_sgl.client.state import accepted, resize_of, settled

START_TIMEOUT_S = 240.0
RESIZE_S = 60.0
LAST_LINES = 15
"""Of a log, as much as an error shows."""
EXIT_S = 5.0
"""A server whose connections have broken has exited after so long, or has not meant to."""
DEMO_MODEL = Path(__file__).parent.parent / "demo_model"
DEMO_ARGUMENTS = ("--model-path", str(DEMO_MODEL), "--dtype", "float32")
"""fp32, so that a different order of additions cannot tip the choice of a token."""
LAUNCH = "ellm_sgl.serve.launch"
CONNECTIONS = httpx.Limits(max_connections=None, max_keepalive_connections=0)
"""No bound on connections: a request that waits for one has not arrived. A new one for each: a
server may close one that is idle just when a request is sent on it, and httpx's asynchronous pool
(httpcore 1.0) itself closes some on which another task has begun to send, a ReadError there."""
SERVER_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "THP_MEM_ALLOC_ENABLE": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1",
}
"""Unless the user says otherwise. Threads that spin while they wait take the core that another
thread needs to finish: with one more busy process on two cores, 5 times the tokens per second.
PyTorch's larger tensors lie in huge pages: a KV pool in small ones costs decode attention up to
40 % (docs/performance.md). Threads that NumPy and SciPy start when they are imported, for products
of a size that no server has, would keep a server's processes from being copies of one
(sglang/processes.py). SGLang notices that a client has gone before its first token once in so many
seconds: meanwhile its prompt would go on being computed."""


def has_tokenizer(model: str | Path) -> bool:
    """Whether a model's folder has a tokenizer. Without one a server takes token ids alone, and
    has to be told `--skip-tokenizer-init`."""
    return any(Path(model).glob("tokenizer*"))


class ServerError(RuntimeError):
    """The server did not start, or went away; the message ends with what it last said."""


def environment_with(variables: Mapping[str, str]) -> dict[str, str]:
    """A server's environment, with these variables beside those of this process."""
    # A proxy is for other hosts; SGLang too asks itself whether it has started. Some clients read
    # the one name before the other.
    known = {name: os.environ.get(name) for name in ("no_proxy", "NO_PROXY")}
    direct = {name: f"{hosts},127.0.0.1" if hosts else "127.0.0.1" for name, hosts in known.items()}
    return {**SERVER_ENVIRONMENT, **os.environ, **direct, **variables}


class ServerProcess:
    """SGLang's server with `arguments`, on a free port of the loopback interface.

    Args:
        arguments: SGLang's and eLLM's flags, without host and port.
        environment: variables to set beside the current ones.
    """

    module = LAUNCH
    """What Python is to run."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self._arguments = list(arguments)
        self._environment = environment_with(environment or {})
        descriptor, log = tempfile.mkstemp(prefix="ellm-sgl-", suffix=".log")
        os.close(descriptor)
        self.log = Path(log)
        # SGLang would take the second of the ephemeral range, which any connection may take first.
        self._held = hold_port(), hold_port()
        self.port = port_of(self._held[0])
        self.url = f"http://127.0.0.1:{self.port}"
        self._http = httpx.Client(base_url=self.url, limits=CONNECTIONS, trust_env=False)
        self._process: Process | None = None
        self._serves = False
        """Until it does there is nothing to end in good order, and nobody who would listen."""

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:  # Ctrl-C included: `__exit__` is not called then
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: object
    ) -> None:
        if error and self._process and not isinstance(error, ServerError):  # has its own
            status = self._process.poll()
            how = "ran" if status is None else f"had exited ({status})"
            error.add_note(f"The server {how}. It last said:\n{self.last_words()}")
        self.stop()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start, and wait until the server answers requests.

        Raises:
            ServerError: it exited, or did not answer in time.
        """
        self.launch()
        self.wait_until_it_answers()

    def launch(self) -> None:
        """The first half of `start`: others may be launched before the second."""
        arguments = [*self._arguments, "--host", "127.0.0.1", "--port", str(self.port)]
        # Of replicas SGLang gives each its own, and has no flag for those.
        if "--data-parallel-size" not in self._arguments:
            arguments += ["--nccl-port", str(port_of(self._held[1]))]
        if self.module == LAUNCH:
            self._process = copy(arguments, self._environment, self.log)
        if self._process is None:
            self._process = self._spawned(arguments)

    def _spawned(self, arguments: Sequence[str]) -> Process:
        with self.log.open("wb") as out:
            return subprocess.Popen(
                [sys.executable, "-m", self.module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )

    def wait_until_it_answers(self) -> None:
        """The second half, whose errors are those of `start`."""
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.answers():
            if self._process.poll() is not None:
                raise ServerError(f"the server exited while starting:\n{self.last_words()}")
            if time.monotonic() > deadline:
                said = self.last_words()
                self.stop()  # its log goes with it
                raise ServerError(f"no answer after {START_TIMEOUT_S:.0f} s:\n{said}")
            time.sleep(0.25)
        self._serves = True
        self._freeze_gc()

    def _freeze_gc(self) -> None:
        """Let what start-up made be: collecting it would stop the server for half a second at some
        time. Where the server has keys, that is for whoever holds them to ask."""
        answer = self._http.post("/freeze_gc", timeout=60)
        if answer.status_code not in (httpx.codes.OK, httpx.codes.UNAUTHORIZED):
            raise ServerError(f"/freeze_gc: {answer.status_code} {answer.text}")

    def answers(self) -> bool:
        """Whether the server is up and its health check passes."""
        try:
            return self._http.get("/health", timeout=20).status_code == 200
        except httpx.TransportError:
            return False

    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process is not None and self._process.poll() is None

    def state(self, integrity: bool = True) -> dict[str, Any]:
        """`GET /ellm/state`.

        Args:
            integrity: have the page table checked as well. That stops the server for as long as it
                takes; leave it out where the state is asked for again and again.
        """
        found: dict[str, Any] = self._get("/ellm/state", {"integrity": integrity})
        return found

    def steps(self) -> list[dict[str, Any]]:
        """`GET /ellm/steps`: the last measured steps, in their order."""
        found: list[dict[str, Any]] = self._get("/ellm/steps")
        return found

    def attention_backend(self) -> str:
        """SGLang's name of the attention backend that runs."""
        return str(self._get("/get_server_info")["attention_backend"])

    def _get(self, path: str, asked: Mapping[str, Any] | None = None) -> Any:
        try:
            return self._http.get(path, params=asked, timeout=60).raise_for_status().json()
        except httpx.TransportError as error:
            error.add_note(self.last_words())
            raise

    def adjust(self, **values: float) -> None:
        """Set `ellm_ratio` or `ellm_device_kv_tokens` of the running server; returns once the pool
        has come to its size, or as near to it as it gets.

        Raises:
            ValueError: the server refused it.
            ServerError: the pool is still under way after a minute.
        """
        body = {"server_args": values}
        answer = self._http.post("/set_internal_state", json=body, timeout=60).json()
        if not accepted(answer):
            raise ValueError(f"the server refused {values}: {answer}")
        resize = resize_of(settled(lambda: self.state(integrity=False), RESIZE_S))
        if resize["outcome"] == "under way":
            raise ServerError(f"the pool does not come to its size: {resize}")

    def switch_policy(self, name: str, **options: Any) -> None:
        """Ask another policy from now on.

        Raises:
            ValueError: the server refused it.
        """
        body = {"name": name, "options": options}
        answer = self._http.post("/ellm/policy", json=body, timeout=60)
        if answer.status_code != 200:
            raise ValueError(f"the server refused policy {name}: {answer.text}")

    def flush_cache(self) -> None:
        """Empty the prefix cache; nothing may be running."""
        for _ in range(40):
            if self._http.post("/flush_cache", timeout=60).status_code == 200:
                return
            time.sleep(0.25)
        raise ServerError("the prefix cache could not be flushed: requests are still running")

    def lost(self, error: object) -> ServerError:
        """What to raise where a request has ended with `error` instead of an answer."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=EXIT_S)
        status = self._process.poll()
        what = "the connection broke" if status is None else f"the server exited ({status})"
        return ServerError(f"{what}: {error!r}:\n{self.last_words()}")

    def last_words(self) -> str:
        """The end of the log; before it the first error, where that was earlier: a worker's is the
        cause of what the main process says last."""
        lines = self.log.read_text(errors="replace").splitlines()
        earlier, end = lines[:-LAST_LINES], lines[-LAST_LINES:]
        cause = _first_error(earlier)[-LAST_LINES:]
        return "\n".join([*cause, *["..."] * bool(cause), *end])

    def stop(self) -> None:
        """End the server and all its worker processes."""
        for held in self._held:
            held.close()
        if self._process is None:
            self._http.close()
            self.log.unlink(missing_ok=True)
            return
        try:
            if self._serves:
                # To the main process alone: SGLang takes workers that end by themselves for a
                # crash.
                self._process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=15)
        finally:  # whoever presses Ctrl-C again does not want to wait
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
            self._http.close()
            self.log.unlink(missing_ok=True)


def _first_error(lines: Sequence[str]) -> list[str]:
    """One sentence, or a traceback up to its error; none without one."""
    for start, line in enumerate(lines):
        if line.startswith("ellm-sgl: error: "):
            return [line]
        if "Traceback (most recent call last)" in line:
            ends = (n for n in range(start + 1, len(lines)) if not lines[n].startswith(" "))
            return list(lines[start : next(ends, len(lines) - 1) + 1])
    return []


@contextlib.contextmanager
def stop_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP (a closed terminal) clean up as Ctrl-C does; not one that is ignored
    (nohup)."""
    both = (signal.SIGTERM, signal.SIGHUP)
    signals = [number for number in both if signal.getsignal(number) != signal.SIG_IGN]
    before = [signal.signal(number, signal.default_int_handler) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


def hold_port() -> socket.socket:
    """A port of the loopback interface, below the ephemeral range, that nobody uses: kept from all
    who look for one without SO_REUSEADDR, as this does, until the socket is closed. Servers listen
    with it, and so they can on this port (Linux, as long as the socket itself never listens)."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        held = socket.socket()
        try:
            held.bind(("127.0.0.1", port))
        except OSError:
            held.close()
            continue
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return held
    raise ServerError("no free port between 20,000 and 32,000: end some servers")


def port_of(held: socket.socket) -> int:
    """The port that is held."""
    return int(held.getsockname()[1])
