"""One server with eLLM on each other version of SGLang, beside stock of the same version.

`make test-versions` runs it in an environment for each (docs/sglang-versions.md); on the first
version all other tests run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from ellm_sgl.client.process import DEMO_ARGUMENTS, ServerProcess
from ellm_sgl.sglang.versions import VERSIONS, installed
from tests.e2e.load import ask, greedy, prompts, token_ids
from tests.e2e.scripted_policies import install
from tests.e2e.started_from_python import PROMPT
from tests.e2e.test_from_python import run
from tests.e2e.test_memory_pressure import wait_for
from tests.e2e.test_paused_requests import Stream
from tests.e2e.test_watching import figures, settled
from tests.servers import STRICT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(installed() == VERSIONS[0], reason="all other tests run on this version"),
]

POOL, HOST = 1024, 16_384
BODIES = [greedy(p, 40) for p in prompts(10, 60, 260, seed=3)]
"""3,000 tokens or so: the pool holds a third."""


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """What stock SGLang of this version answers, with memory for all."""
    arguments = [*DEMO_ARGUMENTS, "--max-total-tokens", "8000", "--ellm-policy", "off"]
    with ServerProcess(arguments, STRICT) as stock:
        assert httpx.get(f"{stock.url}/ellm/state").status_code == 404
        return token_ids(ask(stock.url, BODIES))


@pytest.fixture(scope="module")
def small(
    expected: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """With host memory, chunked prompts and mixed steps; SGLang's strict checks after each step."""
    arguments = [*DEMO_ARGUMENTS, "--ellm-policy", "fixed-ratio", "--ellm-layer-group", "1",
                 "--ellm-device-kv-tokens", str(POOL), "--ellm-host-kv-tokens", str(HOST),
                 "--chunked-prefill-size", "64", "--enable-mixed-chunk",
                 "--ellm-policy-budget-ms", "1000", "--enable-metrics"]  # fmt: skip
    policies = install(tmp_path_factory.mktemp("policies"))
    with ServerProcess(arguments, STRICT | policies) as server:
        yield server
        assert server.alive(), server.last_words()
        assert server.state()["integrity"] == "ok"


@pytest.fixture
def server(small: ServerProcess) -> ServerProcess:
    small.flush_cache()
    return small


def gained(before: dict[str, Any], after: dict[str, Any], name: str) -> int:
    return int(after[f"{name}_total"] - before[f"{name}_total"])


@pytest.mark.parametrize(
    ("policy", "options", "pool"),
    [
        ("fixed-ratio", {"ratio": 0.75}, POOL),  # parts of all are restored in every step
        ("turns", {"of": 3, "ratio": 0.5}, POOL),  # requests pause, and come back
        ("fcfs", {}, 224),  # less than one of them needs, which has to restore then
    ],
)
def test_outputs_are_those_of_stock(
    server: ServerProcess,
    expected: list[list[int]],
    policy: str,
    options: dict[str, Any],
    pool: int,
) -> None:
    server.switch_policy(policy, **options)
    server.adjust(ellm_device_kv_tokens=pool)
    before = server.state()
    assert token_ids(ask(server.url, BODIES)) == expected
    after = server.state()
    assert after["integrity"] == "ok" and gained(before, after, "retractions") == 0
    assert gained(before, after, "evicted_units") > 0
    assert gained(before, after, "fetched_units") + gained(before, after, "recomputed_tokens") > 0
    assert gained(before, after, "pauses") > 0 or policy != "turns"
    assert gained(before, after, "compiled_steps") > 0 or policy != "fcfs"
    server.flush_cache()
    empty = server.state()
    assert empty["device_units_free"] == empty["device_units_total"]
    assert empty["host_units_free"] == empty["host_units_total"]
    server.adjust(ellm_device_kv_tokens=POOL)


def test_a_request_larger_than_the_pool_and_one_that_goes(server: ServerProcess) -> None:
    """Each has the same answer again from what is cached, and the one that goes leaves nothing."""
    server.switch_policy("fcfs")
    [long, other] = prompts(2, 1500, 1600, seed=7)
    [first] = ask(server.url, [greedy(long, 24)])
    gone = Stream(server, greedy(other, 3000))
    wait_for(server, lambda state: state["running"] == 1)
    httpx.post(f"{server.url}/abort_request", json={"rid": gone.rid}, timeout=30)
    assert gone.ended() and len(gone.output_ids) < 3000
    wait_for(server, lambda state: state["pool"]["sequences"] == 0)
    assert token_ids(ask(server.url, [greedy(long, 24)])) == token_ids([first])
    assert server.state()["integrity"] == "ok"


def test_a_prefix_is_found_again(server: ServerProcess) -> None:
    server.switch_policy("fixed-ratio", ratio=0.0)
    [prompt] = prompts(1, 400, 400, seed=9)
    [first] = ask(server.url, [greedy(prompt, 40)])
    [again] = ask(server.url, [greedy(prompt, 40)])
    assert again["output_ids"] == first["output_ids"]
    assert first["meta_info"]["cached_tokens"] == 0 and again["meta_info"]["cached_tokens"] >= 384


def test_it_is_watched(server: ServerProcess) -> None:
    """The page is there, and metrics say what the state says."""
    server.switch_policy("fixed-ratio", ratio=0.75)
    before = figures(server)
    ask(server.url, BODIES)
    told = settled(server)
    for name in ("ellm_evicted_units_total", "ellm_step_seconds_count"):
        assert told[name] > before[name]
    assert told["ellm_policy_info"] == 1 and told["ellm_device_committed_bytes"] > 0
    assert server.state()["integrity"] == "ok"
    page = httpx.get(f"{server.url}/ellm/", timeout=60)
    assert page.status_code == 200 and "<title>eLLM</title>" in page.text
    for name in ("page.js", "requests", "policies", "steps"):
        assert httpx.get(f"{server.url}/ellm/{name}", timeout=60).status_code == 200, name


def test_an_engine_answers_as_the_server(server: ServerProcess) -> None:
    server.switch_policy("fixed-ratio", ratio=0.0)
    [expected] = ask(server.url, [greedy(PROMPT, 24)])
    done = run("restoring")
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["output_ids"] == expected["output_ids"]
    assert said["state"]["integrity"] == "ok" and said["state"]["recomputed_tokens_total"] > 0


def test_recomputed_rows_in_a_pass_of_their_own(expected: list[list[int]]) -> None:
    """Versions differ in how layers pass on what they add."""
    arguments = [*DEMO_ARGUMENTS, "--ellm-policy", "fixed-ratio", "--ellm-ratio", "0.75",
                 "--ellm-layer-group", "2", "--ellm-device-kv-tokens", str(POOL),
                 "--chunked-prefill-size", "64", "--ellm-fusion", "off"]  # fmt: skip
    with ServerProcess(arguments, STRICT) as server:
        before = server.state()
        assert token_ids(ask(server.url, BODIES)) == expected
        assert gained(before, server.state(), "recomputed_tokens") > 0
        assert server.state()["integrity"] == "ok"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (greedy([65, 66], 4, beam_width=2), "beam_width"),
        (greedy([65, 1_000_000], 4), "is not a token id"),
        pytest.param(
            greedy([65, 66], 0) | {"token_indices_to_pool": [1]},
            "token_indices_to_pool",
            marks=pytest.mark.skipif(installed() == "0.5.20", reason="it has no such field"),
        ),
    ],
)
def test_what_cannot_be_served_is_refused(
    server: ServerProcess, body: dict[str, Any], told: str
) -> None:
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=60)
    assert answer.status_code == 400 and told in answer.text


def test_a_turn_of_a_session_may_bring_no_tokens(server: ServerProcess) -> None:
    """It asks for another answer to what was said before, as stock SGLang takes it."""
    session = httpx.post(
        f"{server.url}/open_session", json={"capacity_of_str_len": 10_000}, timeout=60
    ).json()
    asked: dict[str, Any] = {"session_params": {"id": session}}
    [first] = ask(server.url, [greedy(PROMPT, 24) | asked])
    of = {"id": session, "rid": first["meta_info"]["id"], "drop_previous_output": True}
    [again] = ask(server.url, [greedy([], 24) | {"session_params": of}])
    assert again["output_ids"] == first["output_ids"]
    answer = httpx.post(f"{server.url}/generate", json=greedy([], 4), timeout=60)
    assert answer.status_code == 400 and "an empty list of prompts" in answer.text
    nothing = greedy([], 4) | {"input_ids": [[]]} | asked
    answer = httpx.post(f"{server.url}/generate", json=nothing, timeout=60)
    assert answer.status_code == 400 and "token" in answer.text
    asked = {"session_params": {"id": session, "replace": True}}
    [again] = ask(server.url, [greedy(PROMPT, 24) | asked])
    assert again["output_ids"] == first["output_ids"]
    httpx.post(f"{server.url}/close_session", json={"session_id": session}, timeout=60)


def test_what_nobody_reads_of_a_request_disturbs_nobody(server: ServerProcess) -> None:
    """A step would look at it on behalf of others."""
    bodies = [greedy(prompt, 8) for prompt in prompts(16, 20, 20, seed=11)]
    expected = token_ids(ask(server.url, bodies))
    least, unread = {"min_new_tokens": 8}, {"stop_token_ids": [1_000_000]}
    body = {
        "input_ids": [body["input_ids"] for body in bodies],
        "sampling_params": [
            body["sampling_params"] | (unread if i % 2 else least) for i, body in enumerate(bodies)
        ],
        "return_logprob": [True, False] * 8,
        "top_logprobs_num": [0, 1_000_000] * 8,
    }
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=60)
    assert answer.status_code == 200 and token_ids(answer.json()) == expected


def test_log_probabilities_of_named_tokens_disturb_nobody(server: ServerProcess) -> None:
    """Beside requests that name none, as they come and go."""
    bodies = [greedy(prompt, 8 + i) for i, prompt in enumerate(prompts(8, 20, 20, seed=12))]
    expected = token_ids(ask(server.url, bodies))
    named = {"return_logprob": True, "token_ids_logprob": [65, 66]}
    odd = [body | (named if i % 2 else {}) for i, body in enumerate(bodies)]
    assert token_ids(ask(server.url, odd)) == expected
