"""How a server's process is spoken to; that it starts and stops is tested in tests/e2e."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from ellm_sgl.client.process import CONNECTIONS, ServerProcess, hold_port, port_of


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
