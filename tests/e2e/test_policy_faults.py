"""Whatever a policy does, the server keeps serving and its outputs stay exact."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from ellm_sgl.client.process import ServerProcess
from ellm_sgl.engine.policy_guard import FIRST_ANSWER_S
from tests.e2e.conftest import AMPLE_TOKENS, SERVER_ARGUMENTS
from tests.e2e.load import ask, ask_as_one, greedy, prompts, token_ids
from tests.e2e.scripted_policies import install
from tests.e2e.test_memory_pressure import wait_for
from tests.servers import STRICT

pytestmark = pytest.mark.slow
ADMIN = "an admin's key"


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    environment = STRICT | install(tmp_path_factory.mktemp("policies"))
    # Long enough for who has to wait for a core, and far too short for one that sleeps.
    patient = ("--ellm-policy-budget-ms", "200")
    with ServerProcess([*SERVER_ARGUMENTS, *patient], environment) as server:
        yield server
        assert server.alive(), server.last_words()


def switch(server: ServerProcess, name: str, **options: Any) -> httpx.Response:
    return post_policy(server, {"name": name, "options": options})


def post_policy(server: ServerProcess, body: Any, key: str | None = None) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{server.url}/ellm/policy", json=body, headers=headers, timeout=60)


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 1


@pytest.fixture(scope="module")
def bodies() -> list[dict[str, Any]]:
    return [greedy(p, 24) for p in prompts(8, 40, 200, seed=5)]


@pytest.fixture(scope="module")
def expected(scripted: ServerProcess, bodies: list[dict[str, Any]]) -> list[list[int]]:
    switch(scripted, "stock").raise_for_status()
    return token_ids(ask(scripted.url, bodies))


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("raise", "exception"),
        ("nan", "nan"),
        ("sleep", "late"),
        ("b = -1", "range"),
        ("r = 2", "range"),
        ("all pause", "stall"),
        ("nobody is admitted", "stall"),
    ],
)
def test_a_faulty_policy_costs_its_own_steps_only(
    scripted: ServerProcess,
    bodies: list[dict[str, Any]],
    expected: list[list[int]],
    how: str,
    kind: str,
) -> None:
    switch(scripted, "faulty", how=how).raise_for_status()
    assert token_ids(ask(scripted.url, bodies)) == expected
    state = scripted.state()
    assert state["policy"]["name"] == "faulty"
    assert state["policy"]["fallbacks"][kind] > 0
    assert state["integrity"] == "ok"


@pytest.mark.parametrize("how", ["hang", "hang before any question"])
def test_a_policy_that_hangs_at_first_is_done_without_and_can_be_replaced(
    scripted: ServerProcess, bodies: list[dict[str, Any]], expected: list[list[int]], how: str
) -> None:
    began = time.monotonic()
    switch(scripted, "faulty", how=how).raise_for_status()
    assert time.monotonic() - began < 3 * FIRST_ANSWER_S
    assert "policy Faulty has not answered its first question after" in scripted.log.read_text()
    assert token_ids(ask(scripted.url, bodies)) == expected
    policy = scripted.state()["policy"]
    assert policy["name"] == "faulty" and policy["fallbacks"].keys() == {"late"}
    assert policy["fallbacks"]["late"] == policy["decisions"] + 1
    began = time.monotonic()
    switch(scripted, "stock").raise_for_status()
    assert time.monotonic() - began < FIRST_ANSWER_S
    assert token_ids(ask(scripted.url, bodies)) == expected
    assert scripted.state()["policy"]["fallbacks"] == {}


def test_a_policy_that_hangs_while_it_is_made_is_refused(
    scripted: ServerProcess, bodies: list[dict[str, Any]], expected: list[list[int]]
) -> None:
    switch(scripted, "stock").raise_for_status()
    answer = switch(scripted, "faulty", how="hang when made")
    assert answer.status_code == 400 and "is not ready after" in answer.json()["error"]
    assert scripted.state()["policy"]["name"] == "stock"
    assert token_ids(ask(scripted.url, bodies)) == expected


def test_a_server_starts_with_a_policy_that_hangs_at_first(
    tmp_path: Path, bodies: list[dict[str, Any]], expected: list[list[int]]
) -> None:
    options = ["--ellm-policy", "faulty", "--ellm-policy-options", '{"how": "hang"}']
    environment = STRICT | install(tmp_path)
    with ServerProcess([*SERVER_ARGUMENTS, *options], environment) as server:
        assert token_ids(ask(server.url, bodies)) == expected
        assert server.state()["policy"]["fallbacks"].keys() == {"late"}


@pytest.mark.parametrize(
    ("name", "options"), [("fcfs", {"forecast": False}), ("fcfs", {}), ("slo-priority", {})]
)
def test_policies_of_this_package_change_nothing_under_pressure(
    scripted: ServerProcess, bodies: list[dict[str, Any]], name: str, options: dict[str, Any]
) -> None:
    """Memory becomes short while half of them or more run: 1,024 tokens, where the four that need
    least have 1,483 when the first of them ends."""
    longer = [greedy(body["input_ids"], 400) | {"priority": i % 2} for i, body in enumerate(bodies)]
    switch(scripted, "stock").raise_for_status()
    scripted.adjust(ellm_device_kv_tokens=AMPLE_TOKENS)
    alone = token_ids(ask(scripted.url, longer))
    switch(scripted, name, **options).raise_for_status()
    scripted.flush_cache()
    before = scripted.state()["evicted_units_total"]
    try:
        with ThreadPoolExecutor(1) as background:
            answers = background.submit(ask, scripted.url, longer)
            wait_for(scripted, lambda state: state["running"] >= len(longer) // 2)
            scripted.adjust(ellm_device_kv_tokens=1024)
            assert token_ids(answers.result()) == alone
        state = scripted.state()
        assert state["integrity"] == "ok"
        assert state["evicted_units_total"] > before
        assert set(state["policy"]["fallbacks"]) <= {"late"}
    finally:
        scripted.adjust(ellm_device_kv_tokens=AMPLE_TOKENS)


def test_a_policy_that_is_idle_without_pressure_is_not_asked_while_all_fits(
    scripted: ServerProcess, bodies: list[dict[str, Any]], expected: list[list[int]]
) -> None:
    def asked(name: str, tokens: int) -> int:
        switch(scripted, name).raise_for_status()
        scripted.flush_cache()
        scripted.adjust(ellm_device_kv_tokens=tokens)
        assert token_ids(ask_as_one(scripted.url, bodies)) == expected
        return int(scripted.state()["policy"]["decisions"])

    needed = sum(len(b["input_ids"]) for b in bodies) + sum(map(len, expected))
    steps = max(map(len, expected))
    try:
        assert asked("fcfs", AMPLE_TOKENS) < steps / 4
        assert asked("fcfs", needed // 2) > steps / 2
        assert asked("turns", AMPLE_TOKENS) >= steps
    finally:
        scripted.adjust(ellm_device_kv_tokens=AMPLE_TOKENS)


@pytest.mark.parametrize("ratio", [0.0, 0.6])
def test_requests_that_sit_out_steps_are_not_changed(
    scripted: ServerProcess, bodies: list[dict[str, Any]], expected: list[list[int]], ratio: float
) -> None:
    """Lengths differ, and log-probabilities are asked of some."""
    varied = [dict(body) for body in bodies]
    for i, body in enumerate(varied):
        body["sampling_params"] = body["sampling_params"] | {"max_new_tokens": 10 + 7 * i}
        body["return_logprob"] = i % 2 == 0
    switch(scripted, "stock").raise_for_status()
    alone = ask(scripted.url, varied)
    switch(scripted, "turns", of=3, ratio=ratio).raise_for_status()
    before = scripted.state()
    in_turns = ask(scripted.url, varied)
    after = scripted.state()
    assert token_ids(in_turns) == token_ids(alone)
    for ours, theirs in zip(in_turns, alone, strict=True):
        if "output_token_logprobs" in theirs["meta_info"]:
            logprobs = [t[0] for t in theirs["meta_info"]["output_token_logprobs"]]
            got = [t[0] for t in ours["meta_info"]["output_token_logprobs"]]
            assert got == pytest.approx(logprobs, abs=1e-4)
    counted = {
        name: after[name] - before[name] for name in ("pauses_total", "recomputed_tokens_total")
    }
    assert counted["pauses_total"] >= len(varied)
    assert (counted["recomputed_tokens_total"] > 0) == (ratio > 0)
    assert after["policy"]["fallbacks"].keys() <= {"late"}


def test_penalties_are_counted_right_though_others_would_sit_out(scripted: ServerProcess) -> None:
    penalised = [
        greedy(p, 20 + (i == 0), repetition_penalty=1.3, min_new_tokens=4)
        for i, p in enumerate(prompts(4, 40, 90, seed=8))
    ]
    switch(scripted, "stock").raise_for_status()
    alone = token_ids(ask_as_one(scripted.url, penalised))
    switch(scripted, "holds", tokens=20, ratio=0.6).raise_for_status()
    before = scripted.state()
    assert token_ids(ask_as_one(scripted.url, penalised)) == alone
    after = scripted.state()
    assert after["pauses_total"] == before["pauses_total"]
    assert after["evicted_units_total"] == before["evicted_units_total"]


def test_requests_can_be_aborted_while_they_sit_out(scripted: ServerProcess) -> None:
    switch(scripted, "turns", of=2).raise_for_status()
    bodies = [greedy(p, 3000) | {"rid": f"sits-{i}"} for i, p in enumerate(prompts(4, 30, 60))]
    answers: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: answers.extend(ask(scripted.url, bodies)))
    asking.start()
    deadline = time.monotonic() + 60
    while (running := scripted.state(integrity=False)["running"]) < 4:
        assert time.monotonic() < deadline, running
        time.sleep(0.05)
    for body in bodies:
        httpx.post(f"{scripted.url}/abort_request", json={"rid": body["rid"]}, timeout=60)
    asking.join(120)
    assert [a["meta_info"]["finish_reason"]["type"] for a in answers] == ["abort"] * 4
    scripted.flush_cache()
    state = scripted.state()
    assert state["device_units_free"] == state["device_units_total"]


def test_only_an_administrator_may_switch_where_there_is_one() -> None:
    with ServerProcess([*SERVER_ARGUMENTS, "--admin-api-key", ADMIN], STRICT) as server:
        assert post_policy(server, {"name": "stock"}).status_code == 401
        assert post_policy(server, {"name": "stock"}, "a guess").status_code == 401
        assert server.state()["policy"]["name"] == "fixed-ratio"
        assert post_policy(server, {"name": "stock"}, ADMIN).status_code == 200
        assert server.state()["policy"]["name"] == "stock"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"name": "nonsense"}, "no policy 'nonsense'"),
        ({"name": "fixed-ratio", "options": {"ratio": 2}}, "ratio"),
        ({"name": "fixed-ratio", "options": {"speed": 2}}, "speed"),
        ({"name": 5}, "give"),
        ({}, "give"),
        ({"name": "stock", "option": {}}, "give"),
        ({"name": "slo-priority", "options": {"loss": 1e300}}, "loss"),
        ({"name": "fcfs", "options": {"pause": 1}}, "pause"),
        ({"name": "fcfs", "options": {"pause": nested(500)}}, "nested more than 100 deep"),
    ],
)
def test_a_bad_switch_changes_nothing(
    scripted: ServerProcess, body: dict[str, Any], says: str
) -> None:
    before = scripted.state()["policy"]["name"]
    answer = post_policy(scripted, body)
    assert answer.status_code == 400 and says in answer.json()["error"]
    assert scripted.state()["policy"]["name"] == before


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("field", ["tpot_slo_ms", "ttft_slo_ms"])
def test_slos_are_taken_and_nonsense_is_refused(
    scripted: ServerProcess, path: str, field: str
) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 2}},
        "/v1/completions": {"model": "m", "prompt": "a", "max_tokens": 2},
        "/v1/chat/completions": {
            "model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2,
        },
    }  # fmt: skip
    body = bodies[path]
    good = httpx.post(f"{scripted.url}{path}", json=body | {field: 40}, timeout=60)
    assert good.status_code == 200, good.text
    bad = httpx.post(f"{scripted.url}{path}", json=body | {field: "soon"}, timeout=60)
    assert bad.status_code == 400 and field in bad.text
