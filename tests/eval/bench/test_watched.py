"""Somebody has the page open: asks at once, and no more when it is closed."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from ellm_sgl.eval.bench.scenarios.watched import ROUTES, Watched, open_page

ASKED: list[str] = []


class Noting(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        ASKED.append(self.path)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_a_page_asks_while_it_is_open() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Noting) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        deadline = time.monotonic() + 30
        with open_page(f"http://127.0.0.1:{server.server_port}"):
            while len(ASKED) < len(ROUTES):
                assert time.monotonic() < deadline
                time.sleep(0.01)
        asked = list(ASKED)
        server.shutdown()
    assert asked[: len(ROUTES)] == list(ROUTES) and asked == ASKED


def test_the_page_is_open_on_the_server_that_it_is_held_against() -> None:
    servers = {setting.name: setting.server for setting in Watched().settings()}
    assert servers["page open"] == servers["metrics"] != servers["unwatched"]
