"""What goes wrong around a server while it serves, and that the others notice nothing.

One server at a time, for all of it: those that end a server come last, in the order of this file.
"""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil
import pytest

from ellm_sgl.client.process import DEMO_ARGUMENTS, ServerProcess
from tests.e2e.load import ask, greedy, prompts, token_ids
from tests.servers import STRICT, still_there

pytestmark = pytest.mark.slow

TIGHT, AMPLE, MOST = 2_000, 20_000, 80_000
"""Tokens of KV: half of what the bodies need; all of it; the most that the pool holds, 330 MB."""
HOST_TOKENS = 4_000
PATIENCE_S = 120.0
"""For what takes a second on a machine that does nothing else."""
AT_ONCE_S = 5.0
"""For clients to hear of a process that was killed: SGLang's main process looks once a second for a
scheduler that has gone, and would sleep for five before it ends the server (`EllmCpuPlatform`)."""
MIB = 1 << 20


def arguments(host_file: Path) -> list[str]:
    return [
        *DEMO_ARGUMENTS,
        "--ellm-policy", "fixed-ratio",
        "--ellm-device-kv-tokens", str(AMPLE),
        "--ellm-max-device-kv-tokens", str(MOST),
        "--ellm-host-kv-tokens", str(HOST_TOKENS),
        "--ellm-host-path", str(host_file),
        "--random-seed", "1",
    ]  # fmt: skip


class Family:
    """A server that is started again when a test has ended it, always with the same arguments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._server: ServerProcess | None = None

    @property
    def server(self) -> ServerProcess:
        # One that has ended can be there for a moment longer: as long as any thread of it is.
        if self._server is None or not (self._server.alive() and self._server.answers()):
            self.stop()
            self._server = ServerProcess(arguments(self.folder / "kv"), STRICT)
            self._server.start()
        return self._server

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()

    def processes(self) -> list[psutil.Process]:
        main = psutil.Process(self.server.pid)
        return [main, *main.children(recursive=True)]

    def scheduler(self) -> psutil.Process:
        [found] = [p for p in self.processes() if "sglang::scheduler" in " ".join(p.cmdline())]
        return found


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    found = Family(tmp_path_factory.mktemp("host"))
    try:
        yield found
    finally:
        found.stop()


@pytest.fixture(scope="module")
def bodies() -> list[dict[str, Any]]:
    return [greedy(prompt, 60) for prompt in prompts(10, 300, 400, seed=31)]


@pytest.fixture(scope="module")
def expected(family: Family, bodies: list[dict[str, Any]]) -> list[list[int]]:
    """The answers with ample memory and no fault."""
    return token_ids(ask(family.server.url, bodies))


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def wait_until(holds: Callable[[], bool], what: str) -> float:
    """Returns seconds that it took."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < PATIENCE_S, what
        time.sleep(0.02)
    return time.monotonic() - began


def running(server: ServerProcess) -> int:
    return int(server.state(integrity=False)["running"])


def steps_taken(server: ServerProcess) -> int:
    return int(server.state(integrity=False)["steps_total"])


def check_nothing_leaked(server: ServerProcess) -> None:
    """Nobody runs or waits, and once flushed every unit is free, on the device and on the host."""

    def idle() -> bool:
        state = server.state(integrity=False)
        return state["running"] == 0 and state["waiting"] == 0

    wait_until(idle, "requests that never end")
    server.flush_cache()
    state = server.state()
    assert state["integrity"] == "ok"
    assert state["device_units_free"] == state["device_units_total"]
    assert state["host_units_free"] == state["host_units_total"]


def test_three_hundred_clients_that_vanish_in_mid_stream(
    family: Family, bodies: list[dict[str, Any]], expected: list[list[int]]
) -> None:
    """Not one of them has to be served to its end, which would take minutes."""
    server = family.server
    server.adjust(ellm_device_kv_tokens=TIGHT)
    server.flush_cache()

    async def run() -> list[list[int]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=600, limits=limits) as client:
            vanished = [
                asyncio.create_task(_vanish(client, server.url, greedy(prompt, 4000)))
                for prompt in prompts(300, 4, 8, seed=32)
            ]
            others = [client.post(f"{server.url}/generate", json=body) for body in bodies]
            answers = asyncio.gather(*others)
            await asyncio.gather(*vanished)
            return token_ids([answer.raise_for_status().json() for answer in await answers])

    assert asyncio.run(run()) == expected
    check_nothing_leaked(server)


async def _vanish(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> None:
    """Ask for a stream, and close the connection at its first piece."""
    async with client.stream("POST", f"{url}/generate", json=body | {"stream": True}) as answer:
        async for _ in answer.aiter_bytes():
            return


def test_a_reader_that_stops_reading(
    family: Family, bodies: list[dict[str, Any]], expected: list[list[int]]
) -> None:
    """Its request goes on without it and gives its memory back; what it was sent is waiting."""
    server = family.server
    server.adjust(ellm_device_kv_tokens=TIGHT)
    # Pieces that are not taken are put together: logprobs make each large.
    body = bodies[0] | {"stream": True, "return_logprob": True, "top_logprobs_num": 3}
    body["sampling_params"] = body["sampling_params"] | {"max_new_tokens": 500}
    text = json.dumps(body).encode()
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(("127.0.0.1", server.port))
        reader.settimeout(PATIENCE_S)
        before = steps_taken(server)
        head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n"
        reader.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + text)
        wait_until(lambda: steps_taken(server) > before, "it does not begin")
        assert token_ids(ask(server.url, bodies)) == expected
        check_nothing_leaked(server)
        received = b""
        while b"data: [DONE]" not in received[-200:]:
            piece = reader.recv(1 << 20)
            assert piece, "the stream broke off"
            received += piece
    last = [line for line in received.split(b"\n") if line.startswith(b"data: {")][-1]
    found = json.loads(last.removeprefix(b"data: "))
    assert len(received) > 2 * MIB
    assert found["meta_info"]["completion_tokens"] == 500
    assert found["output_ids"][: len(expected[0])] == expected[0]


def test_memory_that_the_machine_does_not_give(
    family: Family,
    bodies: list[dict[str, Any]],
    expected: list[list[int]],
    background: ThreadPoolExecutor,
) -> None:
    """Of their own they may have no more (`ulimit -d`) while requests run: the pool stays as large
    as it got, steps keep what they need, and all go on."""
    server = family.server
    server.adjust(ellm_device_kv_tokens=AMPLE)
    server.flush_cache()
    scheduler = family.scheduler()
    longer = [greedy(body["input_ids"], 2400) for body in bodies[:5]]
    answers = background.submit(ask, server.url, longer)
    wait_until(lambda: running(server) > 0, "they do not begin")
    before = scheduler.rlimit(resource.RLIMIT_DATA)
    units = server.state()["device_units_total"]
    # Room for a quarter of the growth beside what steps keep.
    scheduler.rlimit(resource.RLIMIT_DATA, (_data(scheduler) + 256 * MIB, before[1]))
    try:
        server.adjust(ellm_device_kv_tokens=MOST)
        state = server.state()
    finally:
        scheduler.rlimit(resource.RLIMIT_DATA, before)
    assert state["resize"]["outcome"] == "ceiling"
    assert state["device_units_total"] > units
    assert not answers.done(), "they ended before the pool had grown"
    found = token_ids(answers.result())
    assert [tokens[:60] for tokens in found] == expected[:5]
    check_nothing_leaked(server)
    server.adjust(ellm_device_kv_tokens=MOST)
    assert server.state()["resize"]["outcome"] == "applied"
    assert server.state()["device_units_total"] > state["device_units_total"]
    assert token_ids(ask(server.url, bodies)) == expected
    check_nothing_leaked(server)


def _data(process: psutil.Process) -> int:
    """Bytes that count towards RLIMIT_DATA."""
    [line] = [
        line
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines()
        if line.startswith("VmData:")
    ]
    return int(line.split()[1]) * 1024


def test_a_clock_that_jumps(
    family: Family,
    bodies: list[dict[str, Any]],
    expected: list[list[int]],
    background: ThreadPoolExecutor,
) -> None:
    """A scheduler that stood still for three seconds, as when a machine is suspended or moved, has
    seen one long step: neither outputs nor what it expects of the next steps depend on it."""
    server = family.server
    server.adjust(ellm_device_kv_tokens=TIGHT)
    server.flush_cache()
    scheduler = family.scheduler()
    before = steps_taken(server)
    longer = [greedy(body["input_ids"], 400) for body in bodies[:4]]
    answers = background.submit(ask, server.url, longer)
    wait_until(lambda: running(server) > 0, "they do not begin")
    scheduler.suspend()
    assert not answers.done()
    time.sleep(3)
    scheduler.resume()
    assert [tokens[:60] for tokens in token_ids(answers.result())] == expected[:4]
    check_nothing_leaked(server)
    steps = server.steps()[before - steps_taken(server) :]
    (at,) = (i for i, step in enumerate(steps) if step["seconds"] > 2.0)
    later = [step for step in steps[at + 1 :] if not step["prefill_rows"]]
    assert median(step["predicted_s"] / step["seconds"] for step in later) < 3.0
    assert token_ids(ask(server.url, bodies)) == expected


def test_sigterm_lets_requests_finish(
    family: Family,
    bodies: list[dict[str, Any]],
    expected: list[list[int]],
    background: ThreadPoolExecutor,
) -> None:
    server = family.server
    server.adjust(ellm_device_kv_tokens=TIGHT)
    processes = family.processes()
    answers = background.submit(ask, server.url, bodies)
    wait_until(lambda: running(server) > 0, "they do not begin")
    processes[0].terminate()
    assert token_ids(answers.result()) == expected
    assert not still_there(processes, PATIENCE_S)
    assert list(family.folder.iterdir()) == []


@pytest.mark.parametrize("who", ["scheduler", "main process"])
def test_a_process_that_is_killed(
    family: Family,
    bodies: list[dict[str, Any]],
    expected: list[list[int]],
    background: ThreadPoolExecutor,
    who: str,
) -> None:
    """Clients get an error at once, nothing stays behind, and a restart serves again."""
    server = family.server
    server.adjust(ellm_device_kv_tokens=TIGHT)
    processes = family.processes()
    victim = processes[0] if who == "main process" else family.scheduler()
    long = [greedy(body["input_ids"], 2000) for body in bodies]
    lost: list[Future[Any]] = [background.submit(_error_of, server.url, body) for body in long[:4]]
    wait_until(lambda: running(server) > 0, "they do not begin")
    victim.send_signal(signal.SIGKILL)
    began = time.monotonic()
    assert not wait(lost, timeout=AT_ONCE_S).not_done, "clients that hear nothing"
    print(f"\nclients have heard of a killed {who} after {time.monotonic() - began:.1f} s")
    assert all(isinstance(each.result(), httpx.TransportError) for each in lost)
    assert not still_there(processes, PATIENCE_S)
    assert list(family.folder.iterdir()) == []
    assert token_ids(ask(family.server.url, bodies)) == expected
    assert family.server.pid not in {process.pid for process in processes}
    check_nothing_leaked(family.server)


def _error_of(url: str, body: dict[str, Any]) -> Exception | None:
    """What a client sees."""
    try:
        httpx.post(f"{url}/generate", json=body, timeout=600)
    except httpx.HTTPError as error:
        return error
    return None
