"""The replay client against small servers that speak what it needs."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from ellm_sgl.client.replay import Outcome, Request, replay
from ellm_sgl.client.summary import summarize


class Handler(http.server.BaseHTTPRequestHandler):
    """Three tokens per request; a prompt of 7s makes it fail after the first."""

    bodies: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        self.send_response(200)
        self.end_headers()
        if self.path == "/abort_request":
            return
        native = self.path == "/generate"
        dies = (body["input_ids"] if native else body["prompt"])[0] == 7
        for count in (1, 2, 3):
            chunk = self.native(count) if native else self.openai(count)
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            if dies:
                self.wfile.write(b"data: {this is no JSON\n\n")
                return
        self.wfile.write(b"data: [DONE]\n\n")

    @staticmethod
    def native(count: int) -> dict[str, Any]:
        finish = {"type": "length"} if count == 3 else None
        meta = {"completion_tokens": count, "finish_reason": finish}
        return {"output_ids": list(range(count)), "meta_info": meta}

    @staticmethod
    def openai(count: int) -> dict[str, Any]:
        return {"choices": [{"text": "x", "finish_reason": "length" if count == 3 else None}]}

    def log_message(self, *_: Any) -> None:
        """Silence."""


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    bodies: list[dict[str, Any]] = []
    handler = type("Own", (Handler,), {"bodies": bodies})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}", bodies
        running.shutdown()
        thread.join()


@pytest.mark.parametrize("model", [None, "m"])
def test_tokens_are_counted_and_timed(server, model):
    url, bodies = server
    outcomes = replay(url, [Request(0.0, (1, 2), 3), Request(0.01, (3,), 3)], model)
    assert [len(o.token_s) for o in outcomes] == [3, 3]
    assert all(o.complete for o in outcomes)
    assert summarize(outcomes).output_tokens == 6
    asked = [b["prompt"] if model else b["input_ids"] for b in bodies]
    assert sorted(asked) == [[1, 2], [3]]


def test_running_counts_of_an_openai_server_are_believed(server, monkeypatch):
    def counted(count: int) -> dict[str, Any]:
        return {"choices": [{"text": ""}], "usage": {"completion_tokens": 2 * count}}

    monkeypatch.setattr(Handler, "openai", staticmethod(counted))
    (outcome,) = replay(server[0], [Request(0.0, (1,), 6)], openai_model="m")
    assert len(outcome.token_s) == 6


def test_one_request_that_goes_wrong_leaves_the_others_figures(server):
    outcomes = replay(server[0], [Request(0.0, (7,), 3), Request(0.0, (1,), 3)])
    assert [o.complete for o in outcomes] == [False, True]
    assert "JSONDecodeError" in outcomes[0].finish and len(outcomes[0].token_s) == 1
    assert summarize(outcomes).failed == 1


def test_a_server_that_is_gone_is_told_per_request():
    outcomes = replay("http://127.0.0.1:9", [Request(0.0, (1,), 3)])
    assert "ConnectError" in outcomes[0].finish


def test_after_ctrl_c_finished_requests_are_kept(server, monkeypatch):
    def interrupt(ended: Outcome) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Outcome, "cut", interrupt)
    outcomes = replay(server[0], [Request(0.0, (1,), 3), Request(60.0, (1,), 3)])
    assert [o.finish for o in outcomes] == ["length", "interrupted"]


def test_a_client_that_has_enough_aborts(server: tuple[str, list[dict[str, Any]]]) -> None:
    url, bodies = server
    [outcome] = replay(url, [Request(0.0, (5, 6), 100, exact=False, stop_after=2)])
    assert outcome.complete and len(outcome.token_s) == 2 and outcome.output_ids == [0, 1]
    assert [body["rid"] for body in bodies] == [bodies[0]["rid"]] * 2
    assert "sampling_params" not in bodies[1], "the second is the abort"
