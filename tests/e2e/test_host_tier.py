"""The host tier in a real server: outputs exact, copies returned, a full tier no obstacle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ellm_sgl.serve.process import DEMO_ARGUMENTS, ServerProcess
from tests.e2e.conftest import STRICT
from tests.e2e.load import ask, greedy, prompts, token_ids

pytestmark = pytest.mark.slow
POOL = 1024
HOST = 16_384


def start(host: int, *more: str) -> ServerProcess:
    arguments = [*DEMO_ARGUMENTS, "--ellm-policy", "fixed-ratio", "--ellm-layer-group", "1",
                 "--ellm-device-kv-tokens", str(POOL), "--ellm-host-kv-tokens", str(host),
                 "--random-seed", "1", *more]  # fmt: skip
    return ServerProcess(arguments, STRICT)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A small device and a host tier, in a file, for all."""
    file = tmp_path_factory.mktemp("tier") / "host"
    with start(HOST, "--chunked-prefill-size", "256", "--ellm-host-path", str(file)) as server:
        yield server


@pytest.fixture(scope="module")
def bodies() -> list[dict[str, object]]:
    return [greedy(p, 40) for p in prompts(10, 60, 260, seed=3)]


def check_that_requests_outgrow(
    ample: ServerProcess, small: ServerProcess, bodies: list[dict[str, object]]
) -> dict[str, Any]:
    """The outputs are those of ample memory, and all memory is given back; returns the state."""
    expected = token_ids(ask(ample.url, bodies))
    small.switch_policy("fixed-ratio", ratio=0.75)
    assert token_ids(ask(small.url, bodies)) == expected
    state = small.state()
    assert state["integrity"] == "ok" and state["retractions_total"] == 0
    assert state["fetched_units_total"] > 0
    small.flush_cache()
    after = small.state()
    assert after["host_units_free"] == after["host_units_total"]
    assert after["device_units_free"] == after["device_units_total"]
    assert small.alive(), small.last_words()
    return state


def test_requests_that_outgrow_the_device_end_as_they_should(
    server: ServerProcess, small: ServerProcess, bodies: list[dict[str, object]]
) -> None:
    check_that_requests_outgrow(server, small, bodies)


@pytest.mark.parametrize(
    ("overlap", "keeps"), [("off", "kv"), ("on", "hidden")], ids=["overlap off", "hidden states"]
)
def test_so_they_do_with_a_full_host(
    server: ServerProcess, bodies: list[dict[str, object]], overlap: str, keeps: str
) -> None:
    hidden = keeps == "hidden"  # captured when computed, not saved when evicted
    where = ["--ellm-hidden-on", "device"] if hidden else []
    with start(256, "--ellm-overlap", overlap, "--ellm-host-keeps", keeps, *where) as small:
        state = check_that_requests_outgrow(server, small, bodies)
    # 17 blocks (one is scratch) of 192 numbers per token and layer in the pool's own memory, a unit
    # of which holds 128.
    taken = 17 * 8 * 192 // 128 if hidden else 0
    assert state["device_units_total"] == POOL // 16 * 8 - taken
    assert (state["projected_units_total"] > 0, state["saved_units_total"] > 0) == (
        hidden, not hidden,
    )  # fmt: skip
    assert state["recomputed_tokens_total"] > 0  # what the host cannot keep


def test_a_request_of_sixteen_times_the_device(server: ServerProcess, small: ServerProcess) -> None:
    (prompt,) = prompts(1, 2000, 2000, seed=9)
    body = greedy(prompt, 48)
    expected = token_ids(ask(server.url, [body]))
    small.switch_policy("fixed-ratio")
    small.adjust(ellm_device_kv_tokens=128)
    fetched = small.state()["fetched_units_total"]
    try:
        assert token_ids(ask(small.url, [body])) == expected
        state = small.state()
    finally:
        small.adjust(ellm_device_kv_tokens=POOL)
    assert state["integrity"] == "ok" and state["retractions_total"] == 0
    assert state["fetched_units_total"] > fetched


def test_turns_on_the_device_change_no_output(server: ServerProcess, small: ServerProcess) -> None:
    lengths = (16, 32, 48, 64, 80)
    bodies = [greedy(p, lengths[i % 5]) for i, p in enumerate(prompts(15, 60, 160, seed=4))]
    expected = token_ids(ask(server.url, bodies))
    small.switch_policy("fcfs", rotate=True)
    before = small.state()
    # An SLO so far off that time decides nothing: whoever has a token may leave for another.
    assert token_ids(ask(small.url, [b | {"tpot_slo_ms": 60_000} for b in bodies])) == expected
    state = small.state()
    assert state["integrity"] == "ok" and state["retractions_total"] == 0
    assert state["saved_units_total"] > before["saved_units_total"]
    assert state["fetched_units_total"] > before["fetched_units_total"]
