"""SGLang's features with half of every request's KV missing: the same answers as with all of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from ellm_sgl.client.process import DEMO_ARGUMENTS, ServerProcess
from tests.e2e.load import ask, ask_as_one, greedy, prompts, token_ids
from tests.servers import STRICT

pytestmark = pytest.mark.slow

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"enum": [1, 22, 333]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
MESSAGES: list[Any] = [
    {"role": "user", "content": "What does the method str.split do, and what does it return? " * 3}
]


def with_and_without(server: ServerProcess, run: Callable[[], Any]) -> tuple[Any, Any]:
    """Results of `run` with everything cached, and with r = 0.5."""
    everything = run()
    server.flush_cache()
    server.adjust(ellm_ratio=0.5)
    before = server.state()["recomputed_tokens_total"]
    half = run()
    assert server.state()["recomputed_tokens_total"] > before, "nothing was recomputed"
    return everything, half


def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_streaming_chat(server: ServerProcess) -> None:
    def run() -> str:
        stream = client(server).chat.completions.create(
            model="demo", messages=MESSAGES, max_tokens=60, temperature=0, stream=True
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)

    everything, half = with_and_without(server, run)
    assert everything == half != ""


def test_several_samples_of_one_prompt(server: ServerProcess) -> None:
    def run() -> list[str]:
        answer = client(server).completions.create(
            model="demo", prompt="The Python language " * 12, n=4, max_tokens=40, temperature=0
        )
        return [choice.text for choice in answer.choices]

    everything, half = with_and_without(server, run)
    assert everything == half and len(half) == 4


@pytest.mark.parametrize(("length", "tokens"), [(200, 24), (2500, 1)], ids=["short", "in chunks"])
def test_logprobs_of_prompt_and_output(server: ServerProcess, length: int, tokens: int) -> None:
    """Without a step that decodes, it is a prompt's own chunks that are recomputed."""

    def run() -> Any:
        body = greedy(prompts(1, length, length)[0], tokens)
        body |= {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 5}
        return ask(server.url, [body])[0]["meta_info"]

    everything, half = with_and_without(server, run)
    for name in ("input_token_logprobs", "output_token_logprobs"):
        pairs = zip(everything[name], half[name], strict=True)
        assert all(a[1] == b[1] and (a[0] or 0) == pytest.approx(b[0] or 0, abs=1e-4)
                   for a, b in pairs)  # fmt: skip
    tops = zip(everything["output_top_logprobs"], half["output_top_logprobs"], strict=True)
    assert all([x[1] for x in a] == [x[1] for x in b] for a, b in tops)


def test_penalties(server: ServerProcess) -> None:
    sampling = {"frequency_penalty": 0.7, "presence_penalty": 0.4, "min_new_tokens": 20}
    bodies = [greedy(p, 48, **sampling) for p in prompts(4, 60, 200, seed=1)]
    everything, half = with_and_without(server, lambda: token_ids(ask_as_one(server.url, bodies)))
    assert everything == half


def test_json_schema(server: ServerProcess) -> None:
    def run() -> list[str]:
        answer = client(server).chat.completions.create(
            model="demo",
            messages=MESSAGES,
            max_tokens=120,
            temperature=0,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "person", "schema": SCHEMA},
            },
        )
        return [answer.choices[0].message.content or ""]

    everything, half = with_and_without(server, run)
    assert everything == half
    assert set(json.loads(half[0])) == {"name", "age"}


def test_seeded_sampling(server: ServerProcess) -> None:
    """One request after the other draws the same tokens, of the same probabilities, from servers
    with the same seed; other tokens with another seed."""
    sampling: list[dict[str, Any]] = [
        {"temperature": 0.8},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "top_k": 5},
    ]
    bodies = [
        greedy(p, 32, **how) | {"return_logprob": True}
        for p, how in zip(prompts(3, 50, 150, seed=2), sampling, strict=True)
    ]
    likeliest = token_ids(ask(server.url, [greedy(body["input_ids"], 32) for body in bodies]))
    own = (*DEMO_ARGUMENTS, "--ellm-policy", "fixed-ratio", "--random-seed")
    drawn, likely = [], []
    for seed, ratio in (("7", "0"), ("7", "0.5"), ("8", "0.5")):
        with ServerProcess([*own, seed, "--ellm-ratio", ratio], STRICT) as other:
            answers = [ask(other.url, [body])[0] for body in bodies]
            assert (other.state()["recomputed_tokens_total"] > 0) == (ratio != "0")
        drawn.append(token_ids(answers))
        likely.append([[t[0] for t in a["meta_info"]["output_token_logprobs"]] for a in answers])
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(one != other for one, other in zip(drawn[0], likeliest, strict=True))
    for ours, theirs in zip(likely[1], likely[0], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


def test_abort_frees_everything(server: ServerProcess) -> None:
    server.adjust(ellm_ratio=0.5, ellm_device_kv_tokens=1024)
    body = greedy(prompts(1, 400, 400, seed=3)[0], 2000) | {"stream": True, "rid": "to-abort"}
    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=120) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data:")
        httpx.post(f"{server.url}/abort_request", json={"rid": "to-abort"}, timeout=30)
        last = [line for line in lines if line.startswith("data: {")][-1]
    finish = json.loads(last.removeprefix("data: "))["meta_info"]["finish_reason"]
    assert finish["type"] == "abort"
    server.flush_cache()
    state = server.state()
    assert state["device_units_free"] == state["device_units_total"]
