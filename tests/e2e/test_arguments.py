"""Many of SGLang's arguments on one server: its outputs are those of a server without them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from ellm_sgl.client.process import DEMO_ARGUMENTS, ServerProcess
from tests.e2e.load import ask, greedy, prompts, token_ids
from tests.e2e.test_features import with_and_without
from tests.servers import STRICT

pytestmark = pytest.mark.slow

POOL = 1024
ARGUMENTS = """
    --context-length 2048 --max-prefill-tokens 1024 --max-running-requests 10
    --chunked-prefill-size 512
    --max-queued-requests 64 --prefill-max-requests 3 --min-free-slots-delay 2
    --pp-max-micro-batch-size 9 --schedule-conservativeness 0.5 --scheduler-recv-interval 2
    --schedule-policy lof --enable-priority-scheduling --disable-priority-preemption
    --default-priority-value 1 --schedule-low-priority-values-first --retraction-policy priority
    --radix-eviction-policy lfu --enable-fp32-lm-head --enable-dynamic-batch-tokenizer
    --enable-metrics --enable-mfu-metrics --enable-custom-logit-processor
    --return-hidden-states-mode full --strip-thinking-cache
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[ServerProcess]:
    own = ["--ellm-policy", "fixed-ratio", "--max-total-tokens", str(POOL)]
    with ServerProcess([*DEMO_ARGUMENTS, *own, *ARGUMENTS.split()], STRICT) as other:
        yield other


@pytest.fixture
def special(shared: ServerProcess) -> Iterator[ServerProcess]:
    shared.adjust(ellm_ratio=0.0)
    shared.flush_cache()
    yield shared
    assert shared.alive(), shared.last_words()
    assert shared.state()["integrity"] == "ok"


def test_sglang_says_how_large_the_pool_is(special: ServerProcess) -> None:
    state = special.state()
    assert state["device_units_total"] == POOL // state["block_tokens"] * 2  # of 4 of 8 layers


def test_arguments_together_change_no_output(server: ServerProcess, special: ServerProcess) -> None:
    bodies = [greedy(p, 60) for p in prompts(14, 1, 300, seed=21)]
    urgent = [body | {"priority": i % 3} for i, body in enumerate(bodies)]
    sampling = bodies[0]["sampling_params"]
    text = {"text": "What does str.split do?", "sampling_params": sampling}
    expected = token_ids(ask(server.url, [*bodies, text]))
    assert token_ids(ask(special.url, [*urgent, text])) == expected
    special.adjust(ellm_ratio=0.5)
    assert token_ids(ask(special.url, [*urgent, text])) == expected
    assert special.state()["recomputed_tokens_total"] > 0


def test_hidden_states_are_those_of_a_full_cache(special: ServerProcess) -> None:
    bodies = [greedy(p, 16) | {"return_hidden_states": True} for p in prompts(3, 90, 120, seed=22)]

    def run() -> list[list[float]]:
        return [
            numbers(answer["meta_info"]["hidden_states"]) for answer in ask(special.url, bodies)
        ]

    everything, half = with_and_without(special, run)
    for a, b in zip(everything, half, strict=True):
        assert len(a) > 0 and b == pytest.approx(a, abs=1e-3)


def test_hidden_states_of_a_retracted_request_are_told_once(special: ServerProcess) -> None:
    body = greedy(prompts(1, 90, 120, seed=22)[0], 400) | {"return_hidden_states": True}
    special.flush_cache()
    [expected] = ask(special.url, [body])
    special.flush_cache()
    with ThreadPoolExecutor(1) as background:
        answer = background.submit(ask, special.url, [body])
        while special.state(integrity=False)["running"] == 0:
            time.sleep(0.05)
        time.sleep(0.2)
        pause = httpx.post(f"{special.url}/pause_generation", json={"mode": "retract"}, timeout=60)
        assert pause.status_code == 200 and special.state(integrity=False)["waiting"] == 1
        httpx.post(f"{special.url}/continue_generation", json={}, timeout=60).raise_for_status()
        [answered] = answer.result(timeout=120)
    assert token_ids([answered]) == token_ids([expected])
    once, twice = (numbers(a["meta_info"]["hidden_states"]) for a in (expected, answered))
    assert twice == pytest.approx(once, abs=1e-3)


def numbers(nested: Any) -> list[float]:
    """Of nested lists of any depth, in their order."""
    if isinstance(nested, list):
        return [number for inner in nested for number in numbers(inner)]
    return [float(nested)]


def test_a_custom_logit_processor_sees_its_own_rows(special: ServerProcess) -> None:
    from ellm_sgl.sglang.platform.torchvision_ops import declare

    declare()
    from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

    plain = [greedy(p, 24) for p in prompts(4, 60, 90, seed=23)]
    usual = token_ids(ask(special.url, plain))
    banned = sorted({tokens[3] for tokens in usual})
    bodies = [
        greedy(body["input_ids"], 24, custom_params={"token_ids": banned})
        | {"custom_logit_processor": DisallowedTokensLogitsProcessor.to_str()}
        for body in plain
    ]
    everything, half = with_and_without(special, lambda: token_ids(ask(special.url, bodies)))
    assert everything == half != usual
    assert not {token for tokens in half for token in tokens}.intersection(banned)


def test_a_logit_processor_that_is_none_gets_a_4xx(special: ServerProcess) -> None:
    body = greedy(prompts(1, 60, 90, seed=24)[0], 4)
    usual = ask(special.url, [body])
    for text in ("x", '{"callable": "00"}'):
        sent = body | {"custom_logit_processor": text}
        refused = httpx.post(f"{special.url}/generate", json=sent, timeout=60)
        assert refused.status_code == 400 and "custom_logit_processor: " in refused.text
    assert token_ids(ask(special.url, [body])) == token_ids(usual)


def test_metrics_are_told(special: ServerProcess) -> None:
    ask(special.url, [greedy(prompts(1, 40, 40)[0], 8)])
    told = httpx.get(f"{special.url}/metrics", timeout=60).text
    assert "sglang:num_running_reqs" in told and "sglang:prompt_tokens_total" in told


def test_scores_are_those_of_a_full_cache(server: ServerProcess, special: ServerProcess) -> None:
    """Requests without output: it is a prompt's own chunks that are recomputed."""
    query, *items = prompts(7, 700, 800, seed=24)
    body = {"query": query, "items": items, "label_token_ids": [65, 66, 67], "model": "demo"}

    def scores(of: ServerProcess) -> list[float]:
        answer = httpx.post(f"{of.url}/v1/score", json=body, timeout=120).raise_for_status()
        return numbers(answer.json()["scores"])

    expected = scores(server)
    special.adjust(ellm_ratio=0.5)
    before = special.state()["recomputed_tokens_total"]
    assert scores(special) == pytest.approx(expected, abs=1e-5)
    assert special.state()["recomputed_tokens_total"] > before


def test_a_session_goes_on_from_what_was_said(
    server: ServerProcess, special: ServerProcess
) -> None:
    turns = prompts(3, 60, 100, seed=25)

    def talk(of: ServerProcess) -> list[list[int]]:
        body = {"capacity_of_str_len": 10_000}
        session = httpx.post(f"{of.url}/open_session", json=body, timeout=60).json()
        said = []
        for turn in turns:
            request = greedy(turn, 30) | {"session_params": {"id": session}}
            said += token_ids(ask(of.url, [request]))
        httpx.post(f"{of.url}/close_session", json={"session_id": session}, timeout=60)
        return said

    expected = talk(server)
    assert talk(special) == expected
    special.adjust(ellm_ratio=0.5)
    assert talk(special) == expected
