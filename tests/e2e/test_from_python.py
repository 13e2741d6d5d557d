"""Servers that a program starts in a child process: the same checks and routes as from a shell."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from ellm_sgl.client.process import SERVER_ENVIRONMENT, START_TIMEOUT_S, hold_port, port_of
from tests.e2e.load import ask, greedy, prompts

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "started_from_python.py"
ENVIRONMENT = {**SERVER_ENVIRONMENT, **os.environ, "NO_PROXY": "127.0.0.1", "OMP_NUM_THREADS": "1"}
OUTSIDE = "input_ids: 1000000 is not a token id"


@contextmanager
def started(way: str, log: Path) -> Iterator[str]:
    """URL of a server that `SCRIPT` has started in this way."""
    held = hold_port()
    port = port_of(held)
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, str(SCRIPT), way, str(port)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=ENVIRONMENT, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not answers(url):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.5)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        held.close()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=20).status_code == 200
    except httpx.TransportError:
        return False


def refusal(url: str, body: dict[str, Any]) -> str:
    """What a request that has to be refused is told."""
    answer = httpx.post(f"{url}/generate", json=body | {"sampling_params": {}}, timeout=60)
    assert answer.status_code == 400, answer.text
    return answer.text


def serves(url: str) -> bool:
    """Whether it generates, under eLLM."""
    [answer] = ask(url, [greedy(prompts(1, 40, 40)[0], 8)])
    state = httpx.get(f"{url}/ellm/state", params={"integrity": True}, timeout=60).json()
    return len(answer["output_ids"]) == 8 and state["integrity"] == "ok"


def test_a_server_in_a_child_process_checks_requests_and_has_the_routes(tmp_path: Path) -> None:
    with started("server", tmp_path / "log") as url:
        assert serves(url)
        assert OUTSIDE in refusal(url, {"input_ids": [65, 1_000_000]})
        assert "input_embeds" in refusal(url, {"input_embeds": [[0.0] * 192]})
        assert "tpot_slo_ms" in refusal(url, {"text": "a", "tpot_slo_ms": -1})
        policy = httpx.post(f"{url}/ellm/policy", json={"name": "fcfs"}, timeout=60)
        assert policy.json() == {"name": "fcfs", "options": {}}
        assert serves(url)


def test_the_scheduler_refuses_what_went_past_the_process_that_tokenizes(tmp_path: Path) -> None:
    with started("trusting", tmp_path / "log") as url:
        for _ in range(2):
            assert OUTSIDE in refusal(url, {"input_ids": [65, 1_000_000]})
            assert OUTSIDE.replace("1000000", "-7") in refusal(url, {"input_ids": [-7, 65]})
            assert "input_embeds" in refusal(url, {"input_embeds": [[0.0] * 192]})
            custom = {"text": "a", "custom_params": {"tpot_slo_ms": "soon"}}
            assert "tpot_slo_ms" in refusal(url, custom | {"tpot_slo_ms": "soon"})
            assert serves(url)
        state = httpx.get(f"{url}/ellm/state", timeout=60).json()
        assert state["running"] == state["waiting"] == 0


@pytest.fixture(scope="module")
def engines() -> dict[str, Any]:
    """What engines in child processes answered."""
    done = run("engine")
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return said


def test_an_engine_with_little_memory_answers_as_a_stock_one(engines: dict[str, Any]) -> None:
    said = engines
    assert said["ours"] == said["stock"]
    assert said["ours batch"] == said["ratio batch"] == said["stock batch"]
    assert said["later"]["evicted_units_total"] > 0 and said["steps"] > 0
    assert said["state"]["policy"]["name"] == "fcfs"
    assert said["later"]["policy"]["name"] == "fixed-ratio"
    assert said["state"]["integrity"] == said["later"]["integrity"] == "ok"
    assert said["grown"]["outcome"] == "applied"
    assert said["later"]["device_units_total"] > 30 * said["state"]["device_units_total"]


def test_an_engines_bad_settings_are_named(engines: dict[str, Any]) -> None:
    for name, told in {
        "unknown": "ellm_polcy is no setting of eLLM; did you mean ellm_policy?",
        "bad": "--ellm-overlap 'perhaps': give on or off",
        "unsupported": "--enable-memory-saver",
        "no policy": "no policy 'none'",
        "too large": "ellm_device_kv_tokens 320000",
    }.items():
        assert told in engines[name]


def test_an_engine_of_sglangs_checks_requests_and_forgets_old_weights(
    engines: dict[str, Any],
) -> None:
    said = engines
    assert said["policy"] == "fixed-ratio"
    assert OUTSIDE in said["outside"] and "positional_embed_overrides" in said["embeddings"]
    assert said["updated"][0], said["updated"]
    assert said["new"] == said["flushed"] != said["old"]


def test_an_engine_does_not_outlive_the_program_that_made_it() -> None:
    with script("killed") as process:
        assert process.stdout is not None
        while (line := process.stdout.readline()).strip() != "works":
            assert line, "it ended before it worked"
        workers = psutil.Process(process.pid).children(recursive=True)
        assert len(workers) >= 2, "a scheduler and a detokenizer"
        process.kill()
        _, alive = psutil.wait_procs(workers, timeout=30)
    assert alive == [], "nobody has told them"


def test_arguments_that_eLLM_has_not_seen_are_refused() -> None:  # noqa: N802 (its name)
    done = run("unprepared")
    [told] = [line for line in done.stderr.splitlines() if line.startswith("ellm-sgl: error")]
    assert "before eLLM was enabled" in told and "ellm_sgl.enabled" in told


def run(way: str) -> subprocess.CompletedProcess[str]:
    """The script to its end."""
    with script(way) as process:
        out, error = process.communicate(timeout=2 * START_TIMEOUT_S)
    return subprocess.CompletedProcess(process.args, process.returncode, out, error)


@contextmanager
def script(way: str) -> Iterator[subprocess.Popen[str]]:
    """The script, started; whatever happens none of its processes stays."""
    held = hold_port()
    with (
        held,
        subprocess.Popen(
            [sys.executable, str(SCRIPT), way, str(port_of(held))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
