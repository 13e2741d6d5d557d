"""A server under load, as those see it who watch it: Prometheus, and Grafana's dashboard."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ellm_sgl.client.process import DEMO_ARGUMENTS, ServerProcess, free_port
from tests.e2e.load import ask, greedy, prompts
from tests.sglang.test_metrics import queries

pytestmark = pytest.mark.slow

ADMIN_KEY = "for the administrator"
ARGUMENTS = (
    *DEMO_ARGUMENTS,
    "--ellm-policy", "fcfs", "--ellm-tpot-slo-ms", "200",
    "--ellm-device-kv-tokens", "2400", "--ellm-host-kv-tokens", "6000",
    "--ellm-layer-group", "1",
    "--enable-metrics", "--admin-api-key", ADMIN_KEY,
)  # fmt: skip


@pytest.fixture(scope="module")
def watched() -> Iterator[ServerProcess]:
    with ServerProcess(ARGUMENTS, {"OMP_NUM_THREADS": "1"}) as server:
        yield server
        assert server.state()["integrity"] == "ok"


def put_under_load(server: ServerProcess, requests: int = 16, tokens: int = 120) -> None:
    """More KV than the device holds, some of it with SLOs."""
    slos = {"tpot_slo_ms": 1000, "ttft_slo_ms": 0.001}
    bodies = [greedy(p, tokens) for p in prompts(requests, 100, 150)]
    ask(server.url, [body | (slos if i % 2 else {}) for i, body in enumerate(bodies)])


def figures(server: ServerProcess) -> dict[str, float]:
    """What `/metrics` says of eLLM, by name, summed over labels."""
    text = httpx.get(f"{server.url}/metrics", timeout=60).raise_for_status().text
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("ellm_"):
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def test_metrics_are_what_the_state_says(watched: ServerProcess) -> None:
    before = figures(watched)  # SGLang's own first request
    put_under_load(watched)
    deadline, same = time.monotonic() + 30, False
    while not same:  # the last figures come with the next turn of an idle scheduler
        assert time.monotonic() < deadline
        time.sleep(0.2)
        state, told = watched.state(integrity=False), figures(watched)
        same = told["ellm_evicted_units_total"] == state["evicted_units_total"]
        same = same and told["ellm_requests"] == 0
    for name in ("restored_units", "saved_units", "recomputed_tokens", "retractions", "pauses"):
        assert told[f"ellm_{name}_total"] == state[f"{name}_total"], name
    assert told["ellm_evicted_units_total"] > 0 and told["ellm_fetched_bytes_total"] > 0
    assert told["ellm_step_seconds_count"] == state["steps_total"]
    assert told["ellm_device_committed_bytes"] == state["device_bytes_committed"]
    ended = told["ellm_slo_requests_total"] - before["ellm_slo_requests_total"]
    assert ended == 16 + 8, "a TPOT SLO for all, a TTFT SLO for half"


@pytest.fixture
def prometheus(watched: ServerProcess, tmp_path: Path) -> Iterator[str]:
    """The URL of a Prometheus that scrapes the server."""
    if (program := shutil.which("prometheus")) is None:
        pytest.skip("no prometheus: apt-get install prometheus")
    config = tmp_path / "prometheus.yml"
    config.write_text(
        "scrape_configs:\n"
        "- job_name: sglang\n"
        "  scrape_interval: 1s\n"
        f"  static_configs: [{{targets: ['127.0.0.1:{watched.port}']}}]\n"
    )
    address = f"127.0.0.1:{free_port()}"
    command = [program, f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--web.listen-address={address}"], stdout=log, stderr=log
        )
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait()


def results(prometheus: str, query: str) -> list[dict[str, Any]]:
    answer = httpx.get(f"{prometheus}/api/v1/query", params={"query": query}, trust_env=False)
    assert answer.status_code == 200, f"{query}: {answer.text}"
    found: list[dict[str, Any]] = answer.json()["data"]["result"]
    return [one for one in found if one["value"][1] != "NaN"]


def test_every_query_of_the_dashboard_has_an_answer(
    watched: ServerProcess, prometheus: str
) -> None:
    filled = {"$model": ".*", "$instance": ".*", "$__rate_interval": "1m"}
    asked = list(queries())
    for variable, value in filled.items():
        asked = [query.replace(variable, value) for query in asked]
    assert len(asked) > 20 and not any("$" in query for query in asked)
    with ThreadPoolExecutor(1) as background:
        deadline = time.monotonic() + 60
        load = background.submit(put_under_load, watched)
        while asked := [query for query in asked if not answered(prometheus, query)]:
            assert time.monotonic() < deadline, asked
            if load.done():
                load = background.submit(put_under_load, watched)
            time.sleep(1)


def answered(prometheus: str, query: str) -> bool:
    try:
        return bool(results(prometheus, query))
    except httpx.TransportError:  # it has not started yet
        return False
