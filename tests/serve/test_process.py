"""How a server's process is spoken to; that it starts and stops is tested in tests/e2e."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from ellm_sgl.client.process import IDLE_CONNECTION_S, ServerProcess


def test_an_idle_connection_is_given_up_before_the_server_does() -> None:
    connections = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # keeps connections

        def setup(self) -> None:
            connections.append(self.client_address)
            super().setup()

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    process = ServerProcess(())
    server = ThreadingHTTPServer(("127.0.0.1", process.port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert process.answers() and process.answers()
        assert len(connections) == 1
        time.sleep(IDLE_CONNECTION_S + 0.2)
        assert process.answers()
        assert len(connections) == 2
    finally:
        server.shutdown()
        server.server_close()
        process._http.close()
        process.log.unlink()
