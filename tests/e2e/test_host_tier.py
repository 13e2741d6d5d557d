"""The host tier in a real server: outputs exact, copies returned, a full tier no obstacle."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ellm_sgl.client.process import DEMO_ARGUMENTS, ServerProcess
from tests.e2e.load import ask, greedy, prompts, token_ids
from tests.servers import STRICT

pytestmark = pytest.mark.slow
POOL = 1024
HOST = 16_384


def start(host: int, *more: str) -> ServerProcess:
    arguments = [*DEMO_ARGUMENTS, "--ellm-policy", "fixed-ratio", "--ellm-layer-group", "1",
                 "--ellm-device-kv-tokens", str(POOL), "--ellm-host-kv-tokens", str(host),
                 "--random-seed", "1", *more]  # fmt: skip
    return ServerProcess(arguments, STRICT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the host tier's file is."""
    return tmp_path_factory.mktemp("tier")


@pytest.fixture(scope="module")
def small(folder: Path) -> Iterator[ServerProcess]:
    """A small device and a host tier, in a file, for all."""
    more = ["--chunked-prefill-size", "256", "--ellm-host-path", str(folder / "host")]
    with start(HOST, *more, "--ellm-host-scaling", "on") as server:
        yield server
    assert os.listdir(folder) == []


@pytest.fixture(scope="module")
def bodies() -> list[dict[str, object]]:
    """Their first tokens come too late, most of them."""
    return [greedy(p, 40) | {"ttft_slo_ms": 1} for p in prompts(10, 60, 260, seed=3)]


def check_bytes(state: dict[str, Any]) -> None:
    """Every byte has one owner, and what a step takes has been measured."""
    owners, token = state["bytes"], 2 * 2 * 32 * 4 * 8
    assert owners["kv"] + owners["staging"] == state["device_bytes_committed"] > 0
    assert HOST * token <= owners["host_tier"] < (HOST + 64) * token
    assert owners["hidden_states"] == 0
    each = state["activations"]
    # A layer of the demo model has at least its input, the residual stream and the MLP's
    # intermediate (512 wide, twice) of a row at once.
    assert each["row_bytes"] > (2 * 192 + 2 * 512) * 4
    assert 0 < owners["activations"] < each["row_bytes"] * 1e4 < owners["left"]


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
    state = check_that_requests_outgrow(server, small, bodies)
    check_bytes(state)
    assert 16 < state["host_logical_tokens"] <= HOST  # it begins with a block


def mapped_files(server: ServerProcess, folder: Path) -> list[list[str]]:
    """For each process of the server that maps any: files of this folder."""
    found = []
    for process in psutil.Process(server.pid).children(recursive=True):
        lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        names = {line.split(maxsplit=5)[5] for line in lines if f"{folder}/" in line}
        found += [sorted(name.removeprefix(f"{folder}/") for name in names)] if names else []
    return sorted(found)


def test_the_file_has_no_name_while_it_serves(small: ServerProcess, folder: Path) -> None:
    assert mapped_files(small, folder) == [["host (deleted)"]]
    assert os.listdir(folder) == []


def test_each_rank_has_files_of_its_own(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    binding = {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}
    arguments = [*DEMO_ARGUMENTS, "--ellm-policy", "fixed-ratio", "--ellm-layer-group", "1",
                 "--ellm-device-kv-tokens", str(POOL), "--ellm-host-kv-tokens", "256", "--tp", "2",
                 "--ellm-host-keeps", "2", "--ellm-host-path", str(tmp_path / "host")]  # fmt: skip
    with ServerProcess(arguments, {**STRICT, **binding}) as server:
        assert mapped_files(server, tmp_path) == [
            [f"host.rank{rank} (deleted)", f"host.rank{rank}.hidden (deleted)"] for rank in range(2)
        ]
        assert os.listdir(tmp_path) == []
        assert ask(server.url, [greedy([65, 66, 67], 4)])[0]["output_ids"]


def test_a_file_that_cannot_be_had_ends_the_server_with_one_line(tmp_path: Path) -> None:
    """What only allocating tells: there is room, but this user may not have it."""
    file = tmp_path / "host"
    command = [sys.executable, "-m", "ellm_sgl.serve.cli", "serve", "--ellm-host-kv-tokens",
               str(HOST), "--ellm-host-path", str(file)]  # fmt: skip
    limit = 1 << 24
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )  # fmt: skip
    assert done.returncode != 0
    (line,) = [
        line for line in done.stderr.splitlines() if "--ellm-host-path" in line and "needed" in line
    ]
    assert line.startswith(f"ellm-sgl: error: --ellm-host-path {file}: ")
    assert "(File too large)" in line
    assert "Traceback" not in done.stderr + done.stdout
    assert os.listdir(tmp_path) == []


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


def test_rotation_changes_no_output(server: ServerProcess, small: ServerProcess) -> None:
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
