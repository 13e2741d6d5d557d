"""Two replicas in one server: outputs as of one scheduler, and what is asked reaches both."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from ellm_sgl.client.process import DEMO_ARGUMENTS, DEMO_MODEL, ServerProcess
from tests.e2e import browser
from tests.e2e.conftest import AMPLE_TOKENS
from tests.e2e.load import ask, greedy, prompts, token_ids
from tests.servers import STRICT, still_there

pytestmark = pytest.mark.slow

PRESSURE = 640
ARGUMENTS = (*DEMO_ARGUMENTS, "--data-parallel-size", "2", "--ellm-policy", "fixed-ratio",
             "--ellm-device-kv-tokens", str(AMPLE_TOKENS), "--ellm-host-kv-tokens", "4000",
             "--random-seed", "1", "--disable-radix-cache", "--enable-metrics")  # fmt: skip


@pytest.fixture(scope="module")
def replicas() -> Iterator[ServerProcess]:
    with ServerProcess(ARGUMENTS, STRICT) as server:
        yield server


def of_both(server: ServerProcess) -> list[dict[str, Any]]:
    state = server.state()
    both: list[dict[str, Any]] = state["replicas"]
    assert [one["replica"] for one in both] == [0, 1]
    assert state["policy"] == both[0]["policy"]
    return both


def test_replicas_serve_as_one_scheduler_does(replicas: ServerProcess) -> None:
    bodies = [greedy(p, 24) for p in prompts(12, 60, 200, seed=5)]
    # With room for all, each by one scheduler alone.
    expected = token_ids(ask(replicas.url, [body | {"routed_dp_rank": 0} for body in bodies]))
    replicas.adjust(ellm_ratio=0.5, ellm_device_kv_tokens=PRESSURE)
    assert [one["resize"]["wanted_tokens"] for one in of_both(replicas)] == [PRESSURE] * 2
    before = of_both(replicas)
    assert token_ids(ask(replicas.url, bodies)) == expected
    replicas.switch_policy("slo-priority")
    assert token_ids(ask(replicas.url, bodies)) == expected
    for one, was in zip(of_both(replicas), before, strict=True):
        assert one["integrity"] == "ok" and one["policy"]["name"] == "slo-priority"
        assert one["steps_total"] > was["steps_total"], "both served"
        assert one["saved_units_total"] > 0 and one["fetched_units_total"] > 0
        assert one["device_units_free"] == one["device_units_total"]


def test_no_replica_counts_on_a_port_that_others_may_take(replicas: ServerProcess) -> None:
    told = httpx.get(f"{replicas.url}/get_server_info", timeout=60, follow_redirects=True).json()
    assert told["nccl_port"] == 0


def test_who_looks_sees_both(replicas: ServerProcess) -> None:
    seen = httpx.get(f"{replicas.url}/ellm/requests", timeout=60).json()
    assert [one["replica"] for one in seen["replicas"]] == [0, 1]
    assert {step["replica"] for step in replicas.steps()} == {0, 1}
    metrics = httpx.get(f"{replicas.url}/metrics", timeout=60, follow_redirects=True).text
    steps = [line for line in metrics.splitlines() if line.startswith("ellm_units{")]
    assert {rank for rank in "01" for line in steps if f'dp_rank="{rank}"' in line} == {"0", "1"}


def test_the_page_shows_the_replica_that_is_chosen(replicas: ServerProcess, tmp_path: Path) -> None:
    """By keyboard: the request of the second one is seen there, and nowhere else."""
    if (problem := browser.lacking()) is not None:
        pytest.skip(problem)
    choice = "document.getElementById('replica')"
    listed = "[...document.querySelectorAll('#list .rid')].map((one) => one.title.split(',')[0])"
    long = greedy(prompts(1, 60, 60)[0], 8000) | {"rid": "of the second", "routed_dp_rank": 1}
    replicas.adjust(ellm_device_kv_tokens=AMPLE_TOKENS)
    with browser.chromium(tmp_path / "log") as window, ThreadPoolExecutor(1) as background:
        window.open(f"{replicas.url}/ellm/")
        window.wait(f"return !{choice}.hidden && {choice}.options.length === 2")
        running = background.submit(ask, replicas.url, [long])
        window.run(f"{choice}.focus()")
        window.press("Down")
        window.wait(f"return {listed}.includes('of the second')")
        assert window.run(f"return {choice}.selectedIndex") == 1
        window.press("Up")
        window.wait(f"return {listed}.length === 0")
        assert window.run(f"return {choice}.selectedIndex") == 0
        assert not running.done(), "it goes on: the first one has none"
        httpx.post(f"{replicas.url}/abort_request", json={"rid": "of the second"}, timeout=60)
        running.result()


def test_what_no_replica_can_do_is_refused_once(replicas: ServerProcess) -> None:
    with pytest.raises(ValueError, match="nonsense") as refused:
        replicas.switch_policy("nonsense")
    assert "replica" not in str(refused.value)
    assert {one["policy"]["name"] for one in of_both(replicas)} == {"slo-priority"}


def test_new_weights_are_for_all_replicas_or_for_none(replicas: ServerProcess) -> None:
    """One has KV of the present weights, the other none."""
    body = greedy(prompts(1, 60, 200, seed=7)[0], 1500) | {"routed_dp_rank": 0}
    update = {"model_path": str(DEMO_MODEL)}
    with ThreadPoolExecutor(1) as background:
        answer = background.submit(ask, replicas.url, [body])
        while of_both(replicas)[0]["running"] == 0:
            time.sleep(0.05)
        httpx.post(f"{replicas.url}/pause_generation", json={"mode": "in_place"}, timeout=60)
        refused = httpx.post(f"{replicas.url}/update_weights_from_disk", json=update, timeout=60)
        assert refused.status_code == 400
        assert "(requests of replica 0: 1, replica 1: 0)" in refused.json()["message"]
        httpx.post(f"{replicas.url}/continue_generation", json={}, timeout=60)
        assert len(token_ids(answer.result(timeout=60))[0]) == 1500
    done = httpx.post(f"{replicas.url}/update_weights_from_disk", json=update, timeout=60)
    assert done.status_code == 200, done.text


def test_the_end_of_a_replica_is_the_servers(replicas: ServerProcess) -> None:
    """Of one that is killed only the kernel knows. Clients of both get an error at once."""
    main = psutil.Process(replicas.pid)
    processes = [main, *main.children(recursive=True)]
    schedulers = [each for each in processes if "sglang::scheduler" in " ".join(each.cmdline())]
    assert len(schedulers) == 2
    bodies = [greedy(prompt, 4000) for prompt in prompts(4, 60, 200, seed=6)]
    with ThreadPoolExecutor(4) as background:
        lost = [background.submit(error_of, replicas.url, body) for body in bodies]
        deadline = time.monotonic() + 60
        while any(one["running"] == 0 for one in of_both(replicas)):
            assert time.monotonic() < deadline, "they do not begin"
            time.sleep(0.05)
        schedulers[1].kill()
        for each in lost:
            assert isinstance(each.result(timeout=60), httpx.TransportError)
    assert not still_there(processes)
    told = f"eLLM: process {schedulers[1].pid}, a replica's scheduler, has ended"
    assert replicas.log.read_text().count(told) == 1


def error_of(url: str, body: dict[str, Any]) -> Exception | None:
    """What a client sees."""
    try:
        httpx.post(f"{url}/generate", json=body, timeout=600)
    except httpx.HTTPError as error:
        return error
    return None
