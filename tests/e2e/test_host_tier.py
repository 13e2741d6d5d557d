"""The host tier in a real server: outputs exact, copies returned, a full tier no obstacle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ellm_sgl.serve.process import DEMO_ARGUMENTS, ServerProcess
from tests.e2e.conftest import STRICT
from tests.e2e.load import ask, greedy, prompts, token_ids

pytestmark = pytest.mark.slow
POOL = 1024


def server(device: int, host: int, *more: str) -> ServerProcess:
    arguments = [*DEMO_ARGUMENTS, "--ellm-policy", "fixed-ratio", "--ellm-layer-group", "1",
                 "--ellm-device-kv-tokens", str(device), "--ellm-host-kv-tokens", str(host),
                 "--random-seed", "1", *more]  # fmt: skip
    return ServerProcess(arguments, STRICT)


@pytest.fixture(scope="module")
def bodies() -> list[dict[str, object]]:
    return [greedy(p, 40) for p in prompts(10, 60, 260, seed=3)]


@pytest.fixture(scope="module")
def expected(bodies: list[dict[str, object]]) -> Iterator[list[list[int]]]:
    with server(32_000, 0) as ample:
        yield token_ids(ask(ample.url, bodies))


@pytest.mark.parametrize(
    ("host", "more"),
    [(16_384, ()), (16_384, ("--ellm-overlap", "off")), (256, ())],
    ids=["ample host", "overlap off", "host full"],
)
def test_requests_that_outgrow_the_device_end_as_they_should(
    bodies: list[dict[str, object]],
    expected: list[list[int]],
    host: int,
    more: tuple[str, ...],
    tmp_path: Path,
) -> None:
    file = ["--ellm-host-path", str(tmp_path / "host")] if not more else []
    with server(POOL, host, *more, *file) as small:
        small.switch_policy("fixed-ratio", ratio=0.75)
        assert token_ids(ask(small.url, bodies)) == expected
        state = small.state()
        assert state["integrity"] == "ok" and state["retractions_total"] == 0
        assert state["fetched_units_total"] > 0 and state["saved_units_total"] > 0
        if host < POOL:  # what the host cannot keep is recomputed
            assert state["recomputed_tokens_total"] > 0
        small.flush_cache()
        state = small.state()
        assert state["host_units_free"] == state["host_units_total"]
        assert state["device_units_free"] == state["device_units_total"]
        assert small.alive(), small.last_words()


def test_a_request_of_sixteen_times_the_device() -> None:
    (prompt,) = prompts(1, 2000, 2000, seed=9)
    body = greedy(prompt, 48)
    with server(16_384, 0) as ample:
        expected = token_ids(ask(ample.url, [body]))
    with server(128, 4096, "--chunked-prefill-size", "256") as small:
        assert token_ids(ask(small.url, [body])) == expected
        state = small.state()
        assert state["integrity"] == "ok" and state["retractions_total"] == 0
        assert state["fetched_units_total"] > 0
