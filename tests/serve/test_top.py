"""`ellm-sgl top`: a server that answers, one that does not, and names that clients chose."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import shutil
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ellm_sgl.serve.asking import AskError
from ellm_sgl.serve.cli import main
from ellm_sgl.serve.top import CELLS, Look, bar, draw

STATE: dict[str, Any] = {
    "policy": {"name": "fcfs", "fallbacks": {"late": 2}},
    "waiting": 1,
    "cached_ratio_mean": 0.75,
    "block_tokens": 16,
    "layer_groups": 2,
    "device_units_total": 100,
    "device_units_free": 25,
    "host_units_total": 0,
    "host_units_free": 0,
    "evicted_units_total": 7,
    "fetched_units_total": 0,
    "recomputed_tokens_total": 0,
    "pauses_total": 0,
    "retractions_total": 0,
}
RUNS: dict[str, Any] = {
    "rid": "\x1b[31m[red]chat", "state": "decoding", "tokens": 40, "tpot_ms": 60.0,
    "tpot_slo_ms": None, "spans": [[16, 2], [24, 0]], "prompt": None,
}  # fmt: skip
WAITS: dict[str, Any] = RUNS | {"rid": "other", "state": "waiting", "tpot_ms": None, "spans": []}
MADE = {
    "ago_ms": 12.0, "took_ms": 0.5, "running": 1, "waiting": 1, "admitted": 0, "paused": 0,
    "uncached_ratio": 0.25, "swap_layers": 1, "recompute_layers": 0, "delta": 0.5, "replaced": True,
}  # fmt: skip
SEEN: dict[str, Any] = {
    "requests": [RUNS, WAITS],
    "counts": {"decoding": 1, "paused": 0, "prefilling": 0, "waiting": 4},
    "left_out": 3,
    "kinds": ["cached", "host", "lost"],
    "tpot_slo_ms": 50.0,
    "uncached_ratio": 0.25,
    "decisions": [MADE],
    "steps": {"total": 9, "mean_ms": 8.0, "predicted_ms": 7.5, "batch": 1, "tokens_per_s": 120.0},
}
KEY = "secret"


class Served(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        known = self.headers.get("Authorization") == f"Bearer {KEY}"
        body = json.dumps({"/ellm/state": STATE, "/ellm/requests": SEEN}[self.path]).encode()
        self.send_response(200 if known else 401)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Served) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def top(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["top", *arguments])


def test_a_certificate_that_the_machine_trusts_is_trusted(tmp_path: Path) -> None:
    """As its environment says (SSL_CERT_FILE). Python cannot make a certificate: openssl does."""
    if (openssl := shutil.which("openssl")) is None:
        pytest.skip("no openssl on this machine")
    files = ["-keyout", "key.pem", "-out", "cert.pem", "-subj", "/CN=localhost"]
    made = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *files,
            "-addext", "subjectAltName=DNS:localhost"]  # fmt: skip
    subprocess.run(made, cwd=tmp_path, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    with ThreadingHTTPServer(("127.0.0.1", 0), Served) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        asked = "--url", f"https://localhost:{server.server_port}", "--once", "--api-key", KEY
        assert "CERTIFICATE_VERIFY_FAILED" in top(*asked).stderr
        trusts = {"SSL_CERT_FILE": str(tmp_path / "cert.pem")}
        assert "policy fcfs" in CliRunner(env=trusts).invoke(main, ["top", *asked]).stdout
        server.shutdown()


def test_a_terminal_is_as_before_once_it_is_told_to_end(url: str) -> None:
    ours, its = pty.openpty()
    command = [sys.executable, "-m", "ellm_sgl.serve.cli", "top", "--url", url, "--api-key", KEY]
    environment = os.environ | {"TERM": "xterm"}
    child = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=environment)
    os.close(its)
    said, told = b"", False
    with contextlib.suppress(OSError):  # EIO: nobody has the other end any more
        while part := os.read(ours, 4096):
            said += part
            if b"evicted units" in said and not told:  # twice could come while it ends
                child.terminate()
                told = True
    os.close(ours)
    child.wait(20)
    assert said.count(b"\x1b[?1049h") == said.count(b"\x1b[?1049l") == 1
    assert said.rindex(b"\x1b[?25h") > said.rindex(b"\x1b[?25l")


def test_it_says_what_the_page_says(url: str) -> None:
    done = top("--url", url, "--once", "--api-key", KEY)
    assert done.exit_code == 0
    for text in ("policy fcfs", "24/40", "> SLO 60.0 ms", "and 3 more", "replaced", "late 2",
                 "evicted units 7", "75%"):  # fmt: skip
        assert text in done.output, text
    assert "600 of 800" in done.output and "\x1b" not in done.output


@pytest.mark.parametrize("state", [{}, [], STATE | {"policy": None}])
def test_an_answer_of_another_shape_is_one_line(state: Any) -> None:
    with pytest.raises(AskError, match="another shape"):
        draw(Look(state, SEEN), [])


def test_a_long_prompt_says_how_far_it_is() -> None:
    prompt = {"done": 10, "tokens_per_s": 500.0, "left_ms": 4_200.0}
    seen = SEEN | {"requests": [RUNS | {"state": "prefilling", "tpot_ms": None, "prompt": prompt}]}
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(draw(Look(STATE, seen), [], 140))
    assert "25%, 4.2 s left" in console.export_text()


def test_replicas_are_told_apart() -> None:
    states = [STATE | {"replica": 0}, STATE | {"replica": 1, "evicted_units_total": 70}]
    seen = [SEEN | {"replica": 0}, SEEN | {"replica": 1}]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(draw(Look(STATE | {"replicas": states}, SEEN | {"replicas": seen}), [], 120))
    told = console.export_text()
    assert "policy fcfs, replica 0" in told and "policy fcfs, replica 1" in told
    assert "evicted units 70" in told


@pytest.mark.parametrize(("count", "height"), [(2, 50), (2, 30), (4, 50), (4, 30), (8, 40), (2, 8)])
def test_replicas_share_the_terminal(count: int, height: int) -> None:
    """As much of each as there is room for; those that are left out are counted."""
    states = [STATE | {"replica": i} for i in range(count)]
    many = SEEN | {"requests": [RUNS | {"rid": f"r{i}"} for i in range(200)]}
    seen = [many | {"replica": i} for i in range(count)]
    console = Console(width=140, height=height, record=True, file=io.StringIO())
    look = Look(STATE | {"replicas": states}, many | {"replicas": seen})
    picture = draw(look, [0.5] * 100, 140, height)
    lines = console.render_lines(picture)
    assert len(lines) <= max(height, 13)
    console.print(picture)
    told = console.export_text()
    shown = sum(f"policy fcfs, replica {i}" in told for i in range(count))
    assert shown == count or f"and {count - shown} more replicas" in told
    assert shown >= 1 and (shown == count) == (height >= 12 * count)


def test_json_is_one_document(url: str) -> None:
    done = top("--url", url, "--json", "--api-key", KEY)
    assert done.exit_code == 0
    assert json.loads(done.stdout) == {"state": STATE, **SEEN}


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [((), "give --api-key"), (("--url", "http://127.0.0.1:9"), "give --url"),
     (("--url", "http://[::1"), "Error"), (("--interval-s", "0"), "--interval-s")],
)  # fmt: skip
def test_what_is_wrong_is_one_line(url: str, arguments: tuple[str, ...], remedy: str) -> None:
    done = top("--once", *(arguments if "--url" in arguments else ("--url", url, *arguments)))
    assert done.exit_code != 0 and remedy in done.output and "Traceback" not in done.output
    assert isinstance(done.exception, SystemExit)


@pytest.mark.parametrize("height", [10, 24, 60])
def test_the_picture_fits_the_terminal(height: int) -> None:
    many = SEEN | {"requests": [RUNS | {"rid": f"r{i}"} for i in range(200)]}
    console = Console(width=140, height=height, file=None, record=True)
    lines = console.render_lines(draw(Look(STATE, many), [0.5] * 100, 140, height))
    assert len(lines) <= max(height, 24)


@given(st.lists(st.tuples(st.integers(1, 500), st.sampled_from(list(CELLS))), max_size=20),
       st.integers(1, 60))  # fmt: skip
def test_bars_are_as_wide_as_asked(spans: list[tuple[int, str]], width: int) -> None:
    drawn = bar(spans, width)
    assert len(drawn) == width
    kinds = {CELLS[kind][0] for _, kind in spans}
    assert set(drawn.plain) <= (kinds or {"·"})


def test_times_that_are_not_known_are_left_out() -> None:
    idle = SEEN | {"requests": [], "decisions": [], "left_out": 0, "tpot_slo_ms": None}
    assert isinstance(Look(STATE, idle).tpot_ms(), float)
    console = Console(width=120, file=None)
    with console.capture() as captured:
        console.print(draw(Look(STATE, idle), []))
    assert "Nobody is being served." in captured.get() and "nan" not in captured.get()
