"""Requests that sit steps out: in mixed steps too, when they are aborted, when memory ends."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from ellm_sgl.client.process import ServerProcess
from tests.e2e.conftest import AMPLE_TOKENS, SERVER_ARGUMENTS
from tests.e2e.load import ask, greedy, prompts, token_ids
from tests.e2e.scripted_policies import install
from tests.e2e.test_memory_pressure import wait_for
from tests.servers import STRICT

pytestmark = pytest.mark.slow

HELD = 201
"""Output tokens of the requests that the policy holds back."""
LONG = 1000
"""Output tokens of those that run meanwhile."""
CHUNK = 64
"""Rows of a step that computes a prompt."""


class Stream:
    """A request whose tokens are counted as they come. Its name is its own: SGLang aborts requests
    of that name two seconds after its stream has ended, in case its client has gone."""

    def __init__(self, server: ServerProcess, body: dict[str, Any]) -> None:
        self.rid = uuid.uuid4().hex
        self._url, self._body = server.url, body | {"stream": True, "rid": self.rid}
        self.output_ids: list[int] = []
        self.finish: dict[str, Any] | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with httpx.stream("POST", f"{self._url}/generate", json=self._body, timeout=300) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    self.output_ids = event["output_ids"]
                    self.finish = event["meta_info"]["finish_reason"]

    def ended(self, timeout_s: float = 60) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


@pytest.fixture(scope="module")
def mixing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    environment = STRICT | install(tmp_path_factory.mktemp("policies"))
    mixed = ("--enable-mixed-chunk", "--chunked-prefill-size", str(CHUNK))
    # A step can recompute as many tokens as the longer of both.
    recomputed = ("--context-length", "2048", "--max-prefill-tokens", "2048")
    patient = ("--ellm-policy-budget-ms", "1000")  # a late answer would let everybody take part
    with ServerProcess([*SERVER_ARGUMENTS, *mixed, *recomputed, *patient], environment) as server:
        yield server
        assert server.alive(), server.last_words()
        assert server.state()["integrity"] == "ok"


@pytest.fixture
def server(mixing: ServerProcess) -> Iterator[ServerProcess]:
    mixing.switch_policy("stock")
    mixing.flush_cache()
    yield mixing
    mixing.adjust(ellm_device_kv_tokens=AMPLE_TOKENS)


def hold(server: ServerProcess, bodies: list[dict[str, Any]], **options: Any) -> list[Stream]:
    """Start these, the last of which is to be paused, and wait until it is."""
    server.switch_policy("holds", tokens=HELD, **options)
    before = server.state()["pauses_total"]
    streams = [Stream(server, body) for body in bodies]
    # One step more: under overlap scheduling a result is entered after the next step has begun.
    wait_for(server, lambda state: state["pauses_total"] > before)
    steps = server.state()["steps_total"]
    wait_for(server, lambda state: state["steps_total"] > steps + 1)
    return streams


def computed(server: ServerProcess) -> dict[str, int]:
    """Output tokens by request, as the server had them half a second ago at most."""
    rows = httpx.get(f"{server.url}/ellm/requests", timeout=60).raise_for_status().json()
    return {row["rid"]: row["tokens"] - row["prompt_tokens"] for row in rows["requests"]}


def test_a_request_aborted_while_it_sits_out_ends_at_once(server: ServerProcess) -> None:
    """It would be paused until the other has ended."""
    first, second = prompts(2, 40, 60, seed=1)
    runs, sits = hold(server, [greedy(first, LONG), greedy(second, HELD)], ratio=0.9)
    recomputed = server.state()["recomputed_tokens_total"]
    answer = httpx.post(f"{server.url}/abort_request", json={"rid": sits.rid}, timeout=30)
    assert answer.status_code == 200
    assert sits.ended() and len(sits.output_ids) < HELD
    assert sits.finish is not None and sits.finish["type"] == "abort"
    wait_for(server, lambda state: state["pool"]["sequences"] <= 1)
    assert not runs.ended(timeout_s=0)
    assert server.state()["recomputed_tokens_total"] == recomputed  # nothing restored for it
    assert runs.ended() and len(runs.output_ids) == LONG


def test_who_sits_out_gets_no_token_in_mixed_steps(server: ServerProcess) -> None:
    """A prompt of 24 chunks is computed beside one that decodes and one that is paused."""
    [one, other, prompt] = prompts(1, 40, 40) + prompts(1, 50, 50) + prompts(1, 1500, 1500)
    bodies = [greedy(one, LONG), greedy(other, HELD), greedy(prompt, 8)]
    expected = [token_ids(ask(server.url, [body]))[0] for body in bodies]
    server.flush_cache()
    runs, sits = hold(server, bodies[:2])
    before, last = computed(server), server.steps()[-1]
    [answer] = ask(server.url, bodies[2:])
    steps = server.steps()
    since = steps[steps.index(last) + 1 :]
    chunks = [step for step in since if step["prefill_rows"]]
    # SGLang leaves a row for each that runs, of whom one takes its own.
    assert len(chunks) >= 24 and max(step["prefill_rows"] for step in chunks) == CHUNK - 2
    assert {step["decode_rows"] for step in chunks} == {1}
    wait_for(server, lambda _: computed(server)[runs.rid] > before[runs.rid] + 20)
    assert computed(server)[sits.rid] == before[sits.rid] < HELD
    assert runs.ended() and sits.ended()
    assert [runs.output_ids, sits.output_ids, answer["output_ids"]] == expected


@pytest.mark.parametrize("running", [1, 2])
def test_a_prompt_with_penalties_comes_while_somebody_sits_out(
    server: ServerProcess, running: int
) -> None:
    """Nobody pauses beside penalties: who did comes back into a mixed step, at the position where
    it was, and into a batch that counts tokens, with as many rows as it has requests.
    (What the prompt itself says depends on when it comes, on stock SGLang too: `ask_as_one`.)"""
    bodies = [greedy(p, LONG) for p in prompts(running, 40, 60, seed=5)]
    bodies.append(greedy(prompts(1, 50, 50, seed=6)[0], HELD))
    expected = [token_ids(ask(server.url, [body]))[0] for body in bodies]
    server.flush_cache()
    streams = hold(server, bodies)
    counting = [
        greedy(p, 20, frequency_penalty=0.8, min_new_tokens=10)
        for p in prompts(2, 300, 400, seed=7)
    ]
    assert [len(tokens) for tokens in token_ids(ask(server.url, counting))] == [20, 20]
    assert all(stream.ended() for stream in streams)
    assert [stream.output_ids for stream in streams] == expected


def test_memory_that_those_who_sit_out_hold_is_had_by_retracting_them(
    server: ServerProcess,
) -> None:
    """Twenty are paused and ten run when the pool shrinks to what can be evicted; the ten grow to
    more than a step can recompute."""
    bodies = [greedy(p, 500) for p in prompts(10, 40, 44, seed=2)]
    bodies += [greedy(p, HELD) for p in prompts(20, 40, 44, seed=3)]
    expected = token_ids(ask(server.url, bodies))
    server.flush_cache()
    server.switch_policy("holds", tokens=HELD, ratio=0.99)
    before = server.state()
    with ThreadPoolExecutor(1) as background:
        answers = background.submit(ask, server.url, bodies)
        wait_for(server, lambda state: state["pauses_total"] >= before["pauses_total"] + 20)
        server.adjust(ellm_device_kv_tokens=20 * 16)
        wait_for(server, lambda state: state["retractions_total"] > before["retractions_total"])
        time.sleep(2)  # in which those who are left grow further
        server.adjust(ellm_device_kv_tokens=AMPLE_TOKENS)
        assert token_ids(answers.result()) == expected
