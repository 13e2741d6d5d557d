"""A third party's policy serves traffic: it decides, outputs stay exact, it can be switched."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from ellm_sgl.client.process import ServerProcess
from tests.e2e.conftest import AMPLE_TOKENS, SERVER_ARGUMENTS
from tests.e2e.load import ask, greedy, prompts, token_ids
from tests.policy_plugin import NAME, install_plugin
from tests.servers import STRICT

pytestmark = pytest.mark.slow

OPTIONS = '{"tokens_per_second": 1}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    environment = install_plugin(tmp_path_factory.mktemp("plugin"))
    arguments = list(SERVER_ARGUMENTS)
    arguments[arguments.index("--ellm-policy") + 1] = NAME
    arguments += ["--ellm-policy-options", OPTIONS, "--max-running-requests", "8"]
    arguments += ["--ellm-policy-budget-ms", "50"]  # others use this machine's cores, too
    with ServerProcess(arguments, {**STRICT, **environment}) as process:
        yield process
        assert process.alive(), process.last_words()
        assert process.state()["integrity"] == "ok"


def choose(server: ServerProcess, name: str, **options: Any) -> httpx.Response:
    body = {"name": name, "options": options}
    return httpx.post(f"{server.url}/ellm/policy", json=body, timeout=60, trust_env=False)


def wait_until(server: ServerProcess, condition: Callable[[dict[str, Any]], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition(state := server.state(integrity=False)):
        assert time.monotonic() < deadline, json.dumps(state)
        time.sleep(0.01)


def test_load_beyond_memory_completes_unchanged(server: ServerProcess) -> None:
    """12 requests of 128 to 400 + 128 tokens, eight at a time, in a pool of 1,500."""
    bodies = [greedy(p, 128) for p in prompts(12, 128, 400, seed=5)]
    expected = token_ids(ask(server.url, bodies))
    server.flush_cache()
    server.adjust(ellm_device_kv_tokens=1500)
    try:
        got = token_ids(ask(server.url, bodies))
    finally:
        server.adjust(ellm_device_kv_tokens=AMPLE_TOKENS)
    assert got == expected
    policy = server.state()["policy"]
    assert policy["name"] == NAME
    assert policy["decisions"] > 0
    # A busy machine may make it late now and then; nothing else may happen.
    assert set(policy["fallbacks"]) <= {"late"}
    assert policy["fallbacks"].get("late", 0) < policy["decisions"] / 2


def test_a_short_request_overtakes_a_long_one(server: ServerProcess) -> None:
    """All eight places are taken; of two that wait, the one that came last is shorter."""
    # More than they get to: one is ended when both wait, and its place is the only one.
    occupants = [
        greedy(p, 3000) | {"rid": f"occupant {i}"} for i, p in enumerate(prompts(8, 64, 64, seed=6))
    ]
    [long], [short] = prompts(1, 1500, 1500, seed=7), prompts(1, 40, 40, seed=8)
    finished: dict[str, float] = {}

    def end(occupant: int) -> None:
        body = {"rid": f"occupant {occupant}"}
        httpx.post(f"{server.url}/abort_request", json=body, timeout=60).raise_for_status()

    def one(name: str, prompt: list[int]) -> None:
        ask(server.url, [greedy(prompt, 64)])
        finished[name] = time.monotonic()

    server.flush_cache()
    with ThreadPoolExecutor(3) as background:
        busy = background.submit(ask, server.url, occupants)
        wait_until(server, lambda state: state["running"] == 8)
        later = [background.submit(one, "long", long)]
        wait_until(server, lambda state: state["waiting"] == 1)
        later.append(background.submit(one, "short", short))
        wait_until(server, lambda state: state["waiting"] == 2)
        end(0)
        steps = server.state(integrity=False)["steps_total"]

        def ended(state: dict[str, Any]) -> bool:
            assert state["steps_total"] < steps + 2000, f"{finished}, {json.dumps(state)}"
            return all(future.done() for future in later)

        wait_until(server, ended)
        for future in later:
            future.result()
        for occupant in range(1, 8):
            end(occupant)
        kinds = [answer["meta_info"]["finish_reason"]["type"] for answer in busy.result()]
    assert kinds == ["abort"] * 8
    assert finished["short"] < finished["long"]


def test_switching_while_it_serves(server: ServerProcess) -> None:
    # Seconds of steps: an answer that is late may keep the last three waiting for one of them.
    bodies = [greedy(p, 2000) for p in prompts(4, 100, 200, seed=9)]
    expected = token_ids(ask(server.url, bodies))
    server.flush_cache()
    with ThreadPoolExecutor(1) as background:
        answers = background.submit(ask, server.url, bodies)

        def in_time(holds: bool) -> bool:
            assert holds or not answers.done(), f"it was over first: {answers.exception()}"
            return holds

        wait_until(server, lambda state: in_time(state["running"] == 4))
        assert choose(server, "fixed-ratio", ratio=0.5).status_code == 200
        wait_until(server, lambda state: in_time(state["uncached_tokens"] > 0))
        assert server.state()["policy"]["name"] == "fixed-ratio"
        assert choose(server, NAME, tokens_per_second=2).status_code == 200
        assert token_ids(answers.result()) == expected
    assert server.state()["policy"]["name"] == NAME


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("longest-first", {}, f"no policy 'longest-first'; installed: .*{NAME}"),
        (NAME, {"tokens_per_second": -1}, "tokens_per_second is -1; give more than 0"),
        (NAME, {"pace": 1}, "unexpected keyword argument 'pace'"),
    ],
)
def test_a_switch_that_cannot_be_made_changes_nothing(
    server: ServerProcess, name: str, options: dict[str, Any], told: str
) -> None:
    answer = choose(server, name, **options)
    assert answer.status_code == 400
    assert re.search(told, answer.json()["error"])
    assert server.state()["policy"]["name"] == NAME
