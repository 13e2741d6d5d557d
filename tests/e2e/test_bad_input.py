"""Bad input: one clear error each; the server goes on serving the others."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from ellm_sgl.client.process import DEMO_ARGUMENTS, DEMO_MODEL, ServerProcess
from tests.e2e.load import ask, ask_as_one, greedy, prompts, token_ids
from tests.e2e.odd_requests import ODD, ODD_FIELDS
from tests.servers import refused, still_there

pytestmark = pytest.mark.slow

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
CONTEXT = 8192
LOGPROBS = {"text": "some text", "return_logprob": True}
DEMO_CONFIG = json.loads((DEMO_MODEL / "config.json").read_text())
LONG_ROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 4096,
    "short_factor": [1.0] * 16,
    "long_factor": [2.0] * 16,
}
DEEP = '{"a": ' * 500 + "1" + "}" * 500


def slos(**fields: Any) -> str:
    return json.dumps({"text": "x", "tpot_slo_ms": 5} | fields)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", "{not json"),
        ("/generate", '{"text": '),
        ("/v1/chat/completions", json.dumps(CHAT | {"max_tokens": -5})),
        ("/v1/completions", json.dumps({"model": "d", "prompt": "x", "max_tokens": 10**12})),
        ("/v1/completions", json.dumps({"model": "d", "prompt": "x" * (CONTEXT + 10)})),
        ("/generate", json.dumps({"input_ids": [65] * (CONTEXT + 10), "sampling_params": {}})),
        ("/generate", json.dumps({"input_ids": [10**7], "sampling_params": {}})),
        ("/generate", json.dumps({"text": "x", "sampling_params": {"max_new_tokens": -1}})),
        ("/generate", json.dumps({"text": "x", "sampling_params": {"temperature": -2}})),
        ("/generate", json.dumps({"input_embeds": [[0.0] * 192], "sampling_params": {}})),
        ("/generate", json.dumps({})),
        ("/generate", json.dumps({"input_ids": [[]]})),
        ("/generate", json.dumps({"input_ids": [[65, 66], []]})),
        ("/generate", json.dumps({"text": ""})),
        ("/generate", json.dumps({"text": ["x", ""]})),
        ("/v1/completions", json.dumps({"model": "d", "prompt": [[65, 66], []]})),
        ("/generate", json.dumps(LOGPROBS | {"logprob_start_len": -5})),
        ("/generate", json.dumps(LOGPROBS | {"top_logprobs_num": 10**6})),
        ("/generate", json.dumps(LOGPROBS | {"top_logprobs_num": -1})),
        ("/v1/chat/completions", json.dumps(CHAT | {"logprobs": True, "top_logprobs": 10**6})),
        ("/generate", slos(sampling_params={"custom_params": "x"})),
        ("/generate", slos(sampling_params="x")),
        ("/generate", slos(sampling_params=[])),
        *(("/generate", json.dumps({"text": "x", "sampling_params": params})) for params in ODD),
        *(("/generate", json.dumps({"text": "x"} | fields)) for fields in ODD_FIELDS),
        *(
            ("/vertex_generate", json.dumps({"instances": [{"text": "a"}], "parameters": fields}))
            for fields in ({"rid": [5]}, {"priority": "x"}, {"received_time": "x"})
        ),
        *((f"/{each}_expert_distribution_record", "") for each in ("start", "stop", "dump")),
        ("/start_profile", json.dumps({"activities": ["CUDA_PROFILER"]})),
        ("/slow_down", json.dumps({"forward_sleep_time": math.nan})),
        ("/update_weights_from_tensor", json.dumps({"serialized_named_tensors": []})),
        ("/v1/chat/completions", json.dumps(CHAT | {"top_k": 2**31})),
        ("/v1/completions", json.dumps({"model": "d", "prompt": "x", "logit_bias": {"5": 1e39}})),
        ("/generate", slos(tpot_slo_ms=10**400)),
        ("/generate", '{"text": "x", "tpot_slo_ms": 1e999}'),
        ("/generate", '{"text": "x", "tpot_slo_ms": ' + "[" * 100_000),
        ("/generate", '{"text": "x", "sampling_params": {"custom_params": ' + DEEP + "}}"),
        ("/generate", b'{"tpot_slo_ms": 5, "text": "\xff"}'),
        ("/v1/completions", slos(model="d", prompt="x", custom_params="x")),
        ("/v1/completions", slos(model="d", prompt="x", custom_params=3)),
        ("/v1/completions", json.dumps({"model": "d", "prompt": "x", "custom_params": [1]})),
        ("/v1/chat/completions", slos(**CHAT, custom_params=[1])),
    ],
    ids=lambda value: value[:60],
)
def test_bad_request_gets_a_4xx_and_disturbs_nobody(
    server: ServerProcess, path: str, body: str | bytes
) -> None:
    [good] = [greedy(p, 24) for p in prompts(1, 100, 100)]
    expected = ask(server.url, [good])[0]["output_ids"]
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{server.url}{path}", content=body, headers=headers, timeout=60)
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.text.strip(), "an error without a message"
    assert ask(server.url, [good])[0]["output_ids"] == expected
    server.flush_cache()
    state = server.state()
    assert state["device_units_free"] == state["device_units_total"], "memory leaked"


@pytest.mark.parametrize("odd", [[264], [-1], [10**6], [10**30, 7], [None, 7], ["7"]], ids=str)
def test_stop_tokens_that_are_none_stop_nothing(server: ServerProcess, odd: list[Any]) -> None:
    """As stock SGLang takes them, also where a request of the same step, or the same request, has
    `min_new_tokens`, for which a step looks at the stop tokens of all."""
    plain = [greedy(p, 12) for p in prompts(8, 20, 20, seed=1)]
    expected = ask(server.url, plain)
    least: dict[str, Any] = {"min_new_tokens": 12}
    more = [least, {"stop_token_ids": odd}, least | {"stop_token_ids": odd}, {}] * 2
    bodies = [greedy(body["input_ids"], 12, **has) for body, has in zip(plain, more, strict=True)]
    assert token_ids(ask_as_one(server.url, bodies)) == token_ids(expected)
    assert token_ids(ask(server.url, bodies)) == token_ids(expected)


@pytest.mark.parametrize("most", [10**6, -1])
def test_log_probabilities_that_nobody_asks_for_disturb_nobody(
    server: ServerProcess, most: int
) -> None:
    """A step computes those of all its requests where one of them asks for some."""
    count = 16
    body = {
        "input_ids": prompts(count, 20, 20, seed=2),
        "return_logprob": [True, False] * (count // 2),
        "top_logprobs_num": [2, most] * (count // 2),
        "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
    }
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    told = [one["meta_info"].get("output_top_logprobs") for one in answer.json()]
    assert [[len(top) for top in tops] for tops in told[::2]] == [[2] * 4] * (count // 2)
    assert not any(told[1::2])


def test_a_host_that_nobody_goes_on_at_changes_nothing(server: ServerProcess) -> None:
    """A field of servers that compute prompts for others; here the prompt has several chunks."""
    [body] = [greedy(p, 4) for p in prompts(1, 6000, 6000, seed=4)]
    expected = ask(server.url, [body])
    server.flush_cache()
    answer = httpx.post(f"{server.url}/generate", json=body | {"bootstrap_host": "2.2.2.2"},
                        timeout=60)  # fmt: skip
    assert answer.json()["output_ids"] == expected[0]["output_ids"]
    server.flush_cache()
    state = server.state()
    assert state["device_units_free"] == state["device_units_total"], "memory leaked"


def test_chats_without_log_probabilities_disturb_nobody(server: ServerProcess) -> None:
    asked: list[dict[str, Any]] = [{"logprobs": True}, {"logprobs": False, "top_logprobs": 10**6}]

    def chat(more: dict[str, Any]) -> httpx.Response:
        body = CHAT | {"max_tokens": 8} | more
        return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)

    with ThreadPoolExecutor(16) as at_once:
        answers = list(at_once.map(chat, asked * 8))
    assert [answer.status_code for answer in answers] == [200] * 16


def test_log_probabilities_of_named_tokens_disturb_nobody(server: ServerProcess) -> None:
    """Beside requests that name none, as they come and go."""
    bodies = [greedy(prompt, 8 + i) for i, prompt in enumerate(prompts(8, 20, 20, seed=3))]
    expected = ask(server.url, bodies)
    named = {"return_logprob": True, "token_ids_logprob": [65, 66]}
    answers = ask(server.url, [body | (named if i % 2 else {}) for i, body in enumerate(bodies)])
    assert token_ids(answers) == token_ids(expected)
    for i in range(1, 8, 2):
        told = answers[i]["meta_info"]["output_token_ids_logprobs"]
        assert [[token_id for _, token_id, _ in step] for step in told] == [[65, 66]] * (8 + i)


class Session:
    """Turns of one session."""

    def __init__(self, server: ServerProcess) -> None:
        self._url = server.url
        body = {"capacity_of_str_len": 10_000}
        self._id = httpx.post(f"{self._url}/open_session", json=body, timeout=60).json()

    def turn(self, name: str, prompt: list[int], **params: Any) -> httpx.Response:
        """As one of a list: alone, SGLang 0.5.17 refuses a prompt of no token."""
        of = {"input_ids": [prompt], "rid": [name], "session_params": {"id": self._id} | params}
        return httpx.post(f"{self._url}/generate", json=greedy([], 8) | of, timeout=60)


@pytest.mark.parametrize(
    "params", [{}, {"replace": True}, {"rid": "first", "offset": -1000}], ids=str
)
def test_a_turn_of_nothing_gets_a_4xx_and_disturbs_nobody(
    server: ServerProcess, params: dict[str, Any]
) -> None:
    """Nor does anybody go on from it; a turn with something before it is served."""
    session = Session(server)
    assert session.turn("nothing", [], **params | {"rid": None}).status_code == 400
    assert session.turn("first", [65, 66, 67]).status_code == 200
    answer = session.turn("nothing", [], **params)
    assert answer.status_code == 400 and "a prompt of no token" in answer.text
    assert session.turn("next", [68], rid="nothing").status_code == 400
    again = session.turn("again", [], rid="first", drop_previous_output=True)
    assert again.status_code == (400 if "replace" in params else 200), again.text


def test_a_turn_that_replaces_all_before_it_is_served(server: ServerProcess) -> None:
    session = Session(server)
    [first] = session.turn("first", [65, 66, 67]).raise_for_status().json()
    for _ in range(2):  # of one name
        assert session.turn("second", [68], rid="first").status_code == 200
    assert session.turn("other", [69], rid="first", replace=True).status_code == 200
    assert session.turn("fourth", [68], rid="second").status_code == 400
    [again] = session.turn("third", [65, 66, 67], replace=True).raise_for_status().json()
    assert again["output_ids"] == first["output_ids"]
    assert session.turn("fourth", [68], rid="other").status_code == 400
    assert session.turn("fourth", [68], rid="third").status_code == 200


@pytest.mark.parametrize(
    "params", [{"id": ["x"]}, {"rid": [1]}, {"rid": "first", "offset": "x"}], ids=str
)
def test_a_turn_of_nonsense_gets_a_4xx(server: ServerProcess, params: dict[str, Any]) -> None:
    session = Session(server)
    assert session.turn("first", [65, 66, 67]).status_code == 200
    answer = session.turn("second", [68], **params)
    assert answer.status_code == 400 and f"session_params: {[*params][-1]}: " in answer.text
    assert session.turn("second", [68], rid="first").status_code == 200


@pytest.mark.parametrize(
    "values",
    [{"ellm_ratio": 1.5}, {"ellm_ratio": -0.1}, {"ellm_device_kv_tokens": 3},
     {"ellm_device_kv_tokens": 10**9}],
    ids=str,
)  # fmt: skip
def test_bad_adjustments_are_refused(server: ServerProcess, values: dict[str, Any]) -> None:
    before = server.state()
    with pytest.raises(ValueError, match="refused"):
        server.adjust(**values)
    after = server.state()
    assert after["device_units_total"] == before["device_units_total"]


@pytest.mark.parametrize("field", ["ellm_device_kv_tokens", "ellm_ratio"])
@pytest.mark.parametrize(
    "value",
    ["1e999", "-1e999", "NaN", "1" + "0" * 400, "1" + "0" * 30, '"inf"', '"nan"', '"-Infinity"',
     "-5.5", "true", '"much"', "null", "[8]", "[" * 100_000],
    ids=lambda value: value[:20],
)  # fmt: skip
def test_nonsense_for_set_internal_state_is_refused_and_the_server_goes_on(
    server: ServerProcess, field: str, value: str
) -> None:
    """SGLang answers 400 to what is no JSON and no number, and false where eLLM refuses."""
    before = server.state()
    said = len(server.log.read_text())
    body = f'{{"server_args": {{"{field}": {value}}}}}'
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(
        f"{server.url}/set_internal_state", content=body, headers=headers, timeout=60
    )
    assert (answer.status_code, answer.json()) == (200, [False]) or answer.status_code == 400
    if answer.status_code == 200:
        assert (
            f"set_internal_state refused, nothing has changed: {field} "
            in (server.log.read_text()[said:])
        )
    after = server.state()
    assert after["device_units_total"] == before["device_units_total"]
    assert after["policy"] == before["policy"]


def test_the_state_has_no_integrity_unless_it_is_asked_for(server: ServerProcess) -> None:
    plain = httpx.get(f"{server.url}/ellm/state", timeout=60).json()
    info = httpx.get(f"{server.url}/get_server_info", timeout=60).json()
    assert "integrity" not in plain and "integrity" not in info["internal_states"][0]["ellm"]
    assert plain.keys() == info["internal_states"][0]["ellm"].keys()
    assert server.state(integrity=False).keys() == plain.keys()
    assert server.state()["integrity"] == "ok"
    odd = httpx.get(f"{server.url}/ellm/state", params={"integrity": "perhaps"}, timeout=60)
    assert odd.status_code == 400


STARTS = {
    "--ellm-ratio 1.5": "--ellm-ratio 1.5",
    "--ellm-ratio much": "much",
    "--speculative-algorithm EAGLE": "--speculative-algorithm",
    "--model-path /no/such/model": "/no/such/model",
}
REFUSED = {
    # Beside those of STARTS, without a process for each.
    "--ellm-layer-group 0": "--ellm-layer-group 0",
    "--ellm-block-tokens 0": "--ellm-block-tokens 0",
    "--ellm-device-kv-tokens 8": "--ellm-device-kv-tokens 8",
    "--ellm-policy nonsense": "nonsense",
    "--ellm-host-path /no/such/folder/file --ellm-host-kv-tokens 512": "--ellm-host-path",
    "--ellm-host-path /dev/null --ellm-host-kv-tokens 512": "/dev/null",
    "--ellm-host-path /tmp/no-room --ellm-host-kv-tokens 2000000000": "bytes are needed",
    "--ellm-host-path file": "--ellm-host-kv-tokens",
    "--ellm-host-kv-tokens -1": "--ellm-host-kv-tokens -1",
    "--ellm-overlap maybe": "--ellm-overlap 'maybe'",
    "--ellm-policy-options [1]": "--ellm-policy-options",
    "--ellm-policy fcfs --ellm-ratio 0.5": "--ellm-ratio",
    "--ellm-latency-model magic": "magic",
    "--page-size 64": "--page-size 64",
    "--enable-lora": "--enable-lora",
    "--pipeline-parallel-size 2": "--pipeline-parallel-size",
    "--data-parallel-size 2 --ellm-kv-store /tmp/kv": "--ellm-kv-store /tmp/kv can be one",
    "--dp-size 2 --ellm-host-kv-tokens 512 --ellm-host-path /tmp/tier": "--ellm-host-path /tmp/t",
    "--dp-size 2 --nccl-port 31000": "--nccl-port 31000 can be one",
    "--data-parallel-size 2 --tp 2 --enable-dp-attention": "--enable-dp-attention",
    "--kv-cache-dtype fp8_e4m3": "--kv-cache-dtype",
    "--grammar-backend xgrammar": "--grammar-backend xgrammar",
    "--enable-hierarchical-cache": "--enable-hierarchical-cache",
    "--attention-backend triton": "--attention-backend triton",
    "--tokenizer-worker-num 2": "--tokenizer-worker-num",
    "--disaggregation-mode prefill": "--disaggregation-mode",
    "--smg-grpc-mode": "--smg-grpc-mode",
    "--quantization fp8": "--quantization fp8: a scale for all activations",
    "--torchao-config fp8dq-per_tensor": "--torchao-config fp8dq-per_tensor",
    "--enable-return-routed-experts": "--enable-return-routed-experts",
    "--enable-priority-scheduling": "add --disable-priority-preemption",
    "--forward-hooks [{}]": "--forward-hooks",
    "--cpu-offload-gb 1": "--cpu-offload-gb 1",
}
REFUSE_ALL = """
import contextlib, io, json, sys
from ellm_sgl.serve import launch
from ellm_sgl.client.process import DEMO_ARGUMENTS
said = {}
for arguments in json.loads(sys.argv[1]):
    stderr = io.StringIO()
    argv = [*DEMO_ARGUMENTS, "--ellm-policy", "fixed-ratio", *arguments.split()]
    try:
        with contextlib.redirect_stderr(stderr):
            launch.main(argv)
    except SystemExit as end:  # with a message, or after printing it
        said[arguments] = end.code if isinstance(end.code, str) else stderr.getvalue()
print(json.dumps(said))
"""


@pytest.mark.parametrize(("arguments", "named"), STARTS.items(), ids=STARTS)
def test_bad_start_is_one_line(arguments: str, named: str) -> None:
    """Through `ellm-sgl serve`: exit status 1 or 2, and a last line that names the culprit."""
    command = [sys.executable, "-m", "ellm_sgl.serve.cli", "serve", *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode in (1, 2)
    last = done.stderr.strip().splitlines()[-1]
    assert named in last
    assert "Traceback" not in done.stderr
    assert "rror" in last


def test_every_combination_that_is_not_supported_is_refused_by_name() -> None:
    command = [sys.executable, "-c", REFUSE_ALL, json.dumps(list(REFUSED))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    said = json.loads(done.stdout.strip().splitlines()[-1])
    for arguments, named in REFUSED.items():
        last = said[arguments].strip().splitlines()[-1]
        assert "ellm-sgl: error" in last and named in last, f"{arguments}: {last}"


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, "GPT2LMHeadModel"),
        (
            DEMO_CONFIG
            | {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}},
            "quantised with fp8",
        ),
        (
            DEMO_CONFIG | {"rope_parameters": LONG_ROPE | {"rope_theta": 10000.0}},
            "rotated by LongRoPE",
        ),
        (DEMO_CONFIG | {"rope_scaling": LONG_ROPE}, "give --context-length 4096, or use"),
    ],
    ids=["architecture", "quantised", "long rope", "long rope of version 4"],
)
def test_model_that_is_not_supported_is_refused(
    config: dict[str, Any], named: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    status, said = refused(
        ["--model-path", str(tmp_path), "--skip-tokenizer-init", "--ellm-policy", "fcfs"]
    )
    assert status == 2 and named in said[-1]


def test_ctrl_c_leaves_no_process_behind() -> None:
    """Of the server's own doing: what `ServerProcess` does beside it comes later."""
    with ServerProcess([*DEMO_ARGUMENTS, "--ellm-policy", "fixed-ratio"]) as other:
        main = psutil.Process(other.pid)
        family = [main, *main.children(recursive=True)]
        assert len(family) > 2
        main.send_signal(signal.SIGINT)
        assert not still_there(family)
