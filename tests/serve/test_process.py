"""How a server's process is spoken to; that it starts and stops is tested in tests/e2e."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from ellm_sgl.client.process import (
    CONNECTIONS,
    ServerProcess,
    environment_with,
    hold_port,
    port_of,
    stop_on_signals,
)


class Server(ThreadingHTTPServer):
    """Keeps connections, and counts them."""

    connections = 0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        assert isinstance(self.server, Server)
        self.server.connections += 1
        super().setup()

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_no_connection_is_used_twice(server: Server) -> None:
    """One that is idle may be closed just when a request is sent on it."""
    url = f"http://127.0.0.1:{server.server_port}"

    async def load() -> None:
        async with httpx.AsyncClient(limits=CONNECTIONS, trust_env=False) as client:

            async def one() -> None:
                for _ in range(5):
                    await client.get(url)

            await asyncio.gather(*(one() for _ in range(10)))

    asyncio.run(load())
    assert server.connections == 50
    with httpx.Client(limits=CONNECTIONS, trust_env=False) as client:
        client.get(url)
        client.get(url)
    assert server.connections == 52


def test_the_first_error_is_shown_before_the_end() -> None:
    """A worker's comes first, and is why the main process ends."""
    process = ServerProcess(())
    end = [f"line {number}" for number in range(15)]
    worker = [
        "[12:00] Scheduler hit an exception: Traceback (most recent call last):",
        *(f"  frame {number}" for number in range(30)),
        "OSError: address in use",
    ]
    main = [
        "Traceback (most recent call last):",
        "  frame",
        "RuntimeError: a worker ended",
        "  said",
    ]
    process.log.write_text("\n".join(["started", *worker, "", *main, *end]))
    assert process.last_words().splitlines() == [*worker[-15:], "...", *end]
    sentence = "ellm-sgl: error: no room for a pool"
    process.log.write_text("\n".join(["started", sentence, *worker, *end]))
    assert process.last_words().splitlines() == [sentence, "...", *end]
    process.log.write_text("\n".join(["started", *end]))
    assert process.last_words().splitlines() == end
    process.log.write_text("\n".join([*worker[:3], *end[:14]]))
    assert process.last_words().splitlines() == [*worker[:2], "...", *worker[2:3], *end[:14]]
    process.stop()


def test_a_broken_connection_tells_how_the_server_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    process = ServerProcess(())
    process.log.write_text("its last words")
    killed = subprocess.Popen(["sh", "-c", "kill -9 $$"])
    monkeypatch.setattr(process, "_process", killed)
    error = str(process.lost(httpx.ReadError("reset")))
    assert error.startswith("the server exited (-9): ReadError('reset')")
    assert error.endswith("its last words")
    with subprocess.Popen(["sleep", "60"]) as alive:
        monkeypatch.setattr(process, "_process", alive)
        monkeypatch.setattr("ellm_sgl.client.process.EXIT_S", 0.1)
        assert str(process.lost("no answer")).startswith("the connection broke: 'no answer'")
        alive.kill()
    monkeypatch.setattr(process, "_process", None)
    process.stop()
    assert not process.log.exists()


def test_an_error_beside_a_server_tells_what_it_last_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log goes with it."""
    ended = subprocess.Popen(["sh", "-c", "exit 3"])
    ended.wait()
    process = ServerProcess(())
    process.log.write_text("its last words")
    monkeypatch.setattr(process, "_process", ended)
    monkeypatch.setattr(process, "start", lambda: None)
    with pytest.raises(ZeroDivisionError) as raised, process:
        _ = 1 / 0
    assert raised.value.__notes__ == ["The server had exited (3). It last said:\nits last words"]
    assert not process.log.exists()


def test_a_held_port_is_nobody_elses_but_a_server_can_listen_on_it() -> None:
    with hold_port() as held:
        port = port_of(held)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with Server(("127.0.0.1", port), Handler) as server:
            assert server.allow_reuse_address and server.server_port == port


def test_whoever_presses_ctrl_c_again_leaves_nothing_behind() -> None:
    """A server that does not end on the first is waited for; on the second it is killed."""

    class Stubborn(ServerProcess):
        def launch(self) -> None:
            ignores = "import signal, time; signal.signal(2, signal.SIG_IGN)"
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"{ignores}; print(flush=True); time.sleep(60)"],
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            assert self._process.stdout is not None
            self._process.stdout.readline()
            self._serves = True

    server = Stubborn(())
    server.launch()
    child = server._process
    assert child is not None
    timer = threading.Timer(0.5, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        server.stop()
    assert child.poll() == -signal.SIGKILL and not server.log.exists()


def test_a_signal_that_is_ignored_stays_so() -> None:
    """As nohup has it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals():
            signal.raise_signal(signal.SIGHUP)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_server_asks_itself_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of the two names its client reads."""
    monkeypatch.setenv("no_proxy", "localhost,.corp")
    monkeypatch.delenv("NO_PROXY", raising=False)
    found = environment_with({})
    assert found["no_proxy"] == "localhost,.corp,127.0.0.1" and found["NO_PROXY"] == "127.0.0.1"


def test_servers_that_were_stopped_hold_no_files() -> None:
    def held() -> int:
        return len(os.listdir("/proc/self/fd"))

    ServerProcess(()).stop()
    before = held()
    for _ in range(5):
        ServerProcess(()).stop()
    assert held() == before


def test_a_client_that_goes_is_noticed_within_a_second_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang looks every four seconds by itself."""
    name = "SGLANG_REQUEST_STATE_WAIT_TIMEOUT"
    monkeypatch.delenv(name, raising=False)
    assert environment_with({})[name] == "1"
    monkeypatch.setenv(name, "3")
    assert environment_with({})[name] == "3"
