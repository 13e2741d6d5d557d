"""Somebody has the page open: asks at once, and no more when it is closed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from ellm_sgl.eval.bench.scenarios.watched import (
    ROUTES,
    Watched,
    open_page,
    processor_seconds,
)

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
    assert servers["page open"] == servers["eLLM, metrics"] != servers["eLLM"]


def test_the_processors_time_is_that_of_all_processes() -> None:
    """Of a child that reckons for half a second of its own, waiting for nobody."""
    reckon = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ninput()"
    before = processor_seconds(os.getpid())
    with subprocess.Popen([sys.executable, "-c", reckon], stdin=-1, stdout=-1) as child:
        assert child.stdout is not None and child.stdin is not None
        child.stdout.readline()
        assert processor_seconds(os.getpid()) - before >= 0.4
        child.stdin.close()
