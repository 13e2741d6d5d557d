"""Compiled layers answer what SGLang's layers do, to the bit; other models are left to these."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from ellm_sgl.client.process import DEMO_ARGUMENTS, ServerProcess
from ellm_sgl.eval.tiny_models import write
from ellm_sgl.sglang.compiled_layers import VARIABLE
from tests.e2e.load import ask, greedy, prompts
from tests.e2e.retrained import retrained_into
from tests.servers import STRICT

pytestmark = pytest.mark.slow

POOL = ["--ellm-policy", "fixed-ratio", "--ellm-device-kv-tokens", "6000"]
HOST = ["--ellm-host-kv-tokens", "12000", "--ellm-layer-group", "3"]
"""Three groups, the last one smaller."""
BY_LAYER = ["--ellm-host-kv-tokens", "12000", "--ellm-layer-group", "1"]
CHUNKS = ["--chunked-prefill-size", "32"]
"""Never more rows at once than the compiled products take, whichever requests share a step: beyond
that PyTorch's decide what is added in which order."""
BODIES = [greedy(p, 30) | {"return_logprob": True} for p in prompts(12, 40, 160, seed=31)]


def outcomes(server: ServerProcess) -> list[Any]:
    """Tokens and their log-probabilities."""
    answers = ask(server.url, BODIES)
    return [answer["meta_info"]["output_token_logprobs"] for answer in answers]


def tokens(found: list[Any]) -> list[list[int]]:
    return [[token for _, token, *_ in of] for of in found]


def update(server: ServerProcess, model: Path) -> None:
    body = {"model_path": str(model)}
    answer = httpx.post(f"{server.url}/update_weights_from_disk", json=body, timeout=60)
    assert answer.json()["success"], answer.text


@pytest.mark.parametrize("more", [[], HOST], ids=["device", "host tier"])
def test_outputs_are_the_same_to_the_bit(more: list[str], tmp_path: Path) -> None:
    other_weights = retrained_into(tmp_path)
    arguments = [*DEMO_ARGUMENTS, *POOL, *CHUNKS, *more]
    with ServerProcess(arguments, STRICT | {VARIABLE: "off"}) as server:
        expected = outcomes(server)
        server.flush_cache()
        update(server, other_weights)
        expected_of_others = outcomes(server)
        assert server.state()["compiled_steps_total"] == 0
    assert tokens(expected) != tokens(expected_of_others)
    with ServerProcess(arguments, STRICT) as server:
        # What a start checks is not counted; SGLang's warm-up is, where a server is no copy.
        started = server.state()
        before = started["compiled_steps_total"]
        assert before <= started["steps_total"]
        assert outcomes(server) == expected
        state = server.state()
        assert state["compiled_steps_total"] >= before + 60 and state["integrity"] == "ok"
        # Steps that restore are compiled, too.
        server.flush_cache()
        server.adjust(ellm_ratio=0.5)
        restored = outcomes(server)
        after = server.state()
        assert after["compiled_steps_total"] > state["compiled_steps_total"] + 30
        if more:
            assert restored == expected
            assert after["fetched_units_total"] > state["fetched_units_total"]
        else:
            assert tokens(restored) == tokens(expected)
            assert after["recomputed_tokens_total"] > 0
        server.flush_cache()
        server.adjust(ellm_ratio=0.0)
        update(server, other_weights)
        assert outcomes(server) == expected_of_others
        assert server.state()["compiled_steps_total"] > after["compiled_steps_total"]


@pytest.mark.parametrize(("model", "dtype"), [("demo", "float16"), ("llama-24m", "bfloat16")])
def test_models_of_16_bits_are_compiled(model: str, dtype: str, tmp_path: Path) -> None:
    """Their products take fewer rows: no more than 16 of the demo model's short sums."""
    arguments = [*DEMO_ARGUMENTS, *POOL, "--chunked-prefill-size", "16", "--dtype", dtype]
    if model != "demo":
        written = str(write(model, tmp_path / model))
        arguments += ["--model-path", written, "--skip-tokenizer-init"]
    with ServerProcess(arguments, STRICT | {VARIABLE: "off"}) as server:
        expected = outcomes(server)
    with ServerProcess(arguments, STRICT) as server:
        assert "eLLM layers: compiled" in server.log.read_text()
        assert outcomes(server) == expected
        state = server.state()
        assert state["compiled_steps_total"] == state["steps_total"]


@pytest.mark.parametrize(("model", "more"), [("mixtral", BY_LAYER), ("qwen3-moe", [])])
def test_experts_run_between_compiled_layers(model: str, more: list[str], tmp_path: Path) -> None:
    """One request at a time: PyTorch's products of experts depend on how many rows there are."""
    written = str(write(model, tmp_path / model))
    arguments = ["--model-path", written, "--skip-tokenizer-init", "--dtype", "float32"]
    arguments += [*POOL, *CHUNKS, *more]

    def answers(server: ServerProcess, ratio: float) -> list[Any]:
        server.flush_cache()
        server.adjust(ellm_ratio=ratio)
        found = [ask(server.url, [body])[0] for body in BODIES[:3]]
        return [answer["meta_info"]["output_token_logprobs"] for answer in found]

    with ServerProcess(arguments, STRICT | {VARIABLE: "off"}) as server:
        expected = [answers(server, ratio) for ratio in (0.0, 0.5)]
    with ServerProcess(arguments, STRICT) as server:
        assert "eLLM layers: compiled" in server.log.read_text()
        before = server.state()
        assert [answers(server, ratio) for ratio in (0.0, 0.5)] == expected
        state = server.state()
        steps = state["steps_total"] - before["steps_total"]
        assert state["compiled_steps_total"] - before["compiled_steps_total"] > steps / 2
        restored = "fetched_units_total" if more else "recomputed_tokens_total"
        assert state[restored] > 0 and state["integrity"] == "ok"


def test_a_pool_of_one_block_and_a_context_to_match() -> None:
    """Smaller than any step that calibration and the check would take by themselves."""
    small = ["--ellm-policy", "fcfs", "--ellm-device-kv-tokens", "16", "--context-length", "32",
             "--skip-server-warmup"]  # fmt: skip
    with ServerProcess([*DEMO_ARGUMENTS, *small], STRICT) as server:
        assert "eLLM layers: compiled" in server.log.read_text()
        [answer] = ask(server.url, [greedy([65, 66, 67], 8)])
        state = server.state()
        assert len(answer["output_ids"]) == 8 and state["integrity"] == "ok"
        assert state["device_units_total"] == state["layer_groups"]
