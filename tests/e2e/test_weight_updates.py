"""New weights while requests run: KV of one model at a time, or the update is refused.

The server has less device memory than its requests need, so that KV is missing all the time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil
import pytest

from ellm_sgl.client.process import DEMO_ARGUMENTS, DEMO_MODEL, ServerProcess
from tests.e2e.load import ask, greedy, prompts, token_ids
from tests.e2e.retrained import retrained_into
from tests.e2e.streams import Bodies, Streams
from tests.servers import STRICT

pytestmark = pytest.mark.slow
POOL = 2048
TOKENS = 300
PAUSED_S = 2.0


@pytest.fixture(scope="module")
def retrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with other weights."""
    return retrained_into(tmp_path_factory.mktemp("retrained"))


@pytest.fixture(scope="module")
def fresh(retrained: Path) -> Iterator[ServerProcess]:
    """Started with the new weights, with ample memory."""
    arguments = ["--model-path", str(retrained), "--dtype", "float32"]
    with ServerProcess([*arguments, "--ellm-policy", "fixed-ratio"], STRICT) as server:
        yield server


@pytest.fixture(scope="module")
def shared() -> Iterator[ServerProcess]:
    arguments = [*DEMO_ARGUMENTS, "--ellm-policy", "fixed-ratio", "--ellm-ratio", "0.5",
                 "--ellm-layer-group", "2", "--ellm-device-kv-tokens", str(POOL),
                 "--ellm-host-kv-tokens", "512", "--chunked-prefill-size", "128"]  # fmt: skip
    with ServerProcess(arguments, STRICT) as server:
        yield server


@pytest.fixture(scope="module")
def old(shared: ServerProcess) -> list[list[int]]:
    """What the old weights say, undisturbed,"""
    assert update(shared, DEMO_MODEL).status_code == 200
    return token_ids(ask(shared.url, BODIES))


@pytest.fixture(scope="module")
def new(fresh: ServerProcess) -> list[list[int]]:
    """and the new ones."""
    return token_ids(ask(fresh.url, BODIES))


@pytest.fixture(scope="module")
def brief() -> Iterator[ServerProcess]:
    """Its queue holds half of the requests, and one."""
    arguments = [*DEMO_ARGUMENTS, "--ellm-policy", "fixed-ratio", "--ellm-ratio", "0.5",
                 "--max-queued-requests", str(len(BODIES) // 2 + 1)]  # fmt: skip
    with ServerProcess(arguments, STRICT) as server:
        yield server
        assert server.alive(), server.last_words()


@pytest.fixture
def small(shared: ServerProcess) -> Iterator[ServerProcess]:
    """With the old weights again, whatever the test before did."""
    assert update(shared, DEMO_MODEL).status_code == 200
    yield shared
    assert shared.alive(), shared.last_words()
    go_on(shared)  # if it has not come so far
    assert shared.state()["integrity"] == "ok"
    shared.flush_cache()
    state = shared.state()
    assert state["device_units_free"] == state["device_units_total"]
    assert state["host_units_free"] == state["host_units_total"]


def post(server: ServerProcess, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/{path}", json=body, timeout=120)


def update(server: ServerProcess, model: Path, flush_cache: bool = True) -> httpx.Response:
    return post(server, "update_weights_from_disk", model_path=str(model), flush_cache=flush_cache)


BODIES = [greedy(p, TOKENS) for p in prompts(6, 40, 80, seed=11)]


def under_way(server: ServerProcess, *parts: Bodies) -> Streams:
    """Requests of which all speak; those of a part are asked once all before them do."""
    streams = Streams(server)
    for part in parts or [BODIES]:
        streams.begin(part)
        streams.wait_until_all_speak()
    return streams


def stopped_by(server: ServerProcess, path: str, *parts: Bodies, **body: Any) -> Streams:
    """Requests that `path` stopped, all of them.

    On a busy machine the first may end before the last has begun: they are asked once more.
    """
    for _ in range(5):
        streams = under_way(server, *parts)
        post(server, path, **body).raise_for_status()
        streams.settled()
        if not streams.one_is_complete():
            return streams
        go_on(server)
        streams.end()
    raise AssertionError("the requests are too short for this machine")


def go_on(server: ServerProcess) -> None:
    """Whatever it was that stopped it."""
    for path in ("resume_memory_occupation", "continue_generation"):
        post(server, path, tags=["kv_cache"]).raise_for_status()


@pytest.mark.parametrize("flush_cache", [True, False])
def test_retracted_requests_go_on_with_the_new_weights_alone(
    small: ServerProcess, fresh: ServerProcess, retrained: Path, flush_cache: bool
) -> None:
    streams = stopped_by(small, "pause_generation", mode="retract")
    before = streams.settled()
    assert post(small, "flush_cache").status_code == 400  # SGLang's answer: there is a queue
    answer = update(small, retrained, flush_cache)
    assert answer.json()["success"], answer.text
    state = small.state()
    assert state["device_units_free"] == state["device_units_total"]
    assert state["host_units_free"] == state["host_units_total"]
    post(small, "continue_generation").raise_for_status()
    assert_new_from_then_on(streams.end(), before, fresh)


def assert_new_from_then_on(
    said: list[list[int]], before: list[list[int]], fresh: ServerProcess
) -> None:
    """What had been said `before` stands, and the rest is what the new weights say to it."""
    rest = [
        greedy(body["input_ids"] + first, TOKENS - len(first))
        for body, first in zip(BODIES, before, strict=True)
    ]
    expected = token_ids(ask(fresh.url, rest))
    for whole, first, then in zip(said, before, expected, strict=True):
        assert whole[: len(first)] == first
        assert whole[len(first) :] == then, f"after {len(first)} tokens of the old weights"


def test_while_requests_are_paused_in_place_weights_stay_as_they_are(
    small: ServerProcess, old: list[list[int]], retrained: Path
) -> None:
    streams = stopped_by(small, "pause_generation", mode="in_place")
    held = f"(requests: {len(BODIES)})"
    for flush_cache in (True, False):
        answer = update(small, retrained, flush_cache)
        assert answer.status_code == 400
        assert held in answer.text and "mode retract or abort" in answer.text
    overwritten = post(small, "weights_checker", action="reset_tensors")
    assert not overwritten.json()["success"] and held in overwritten.text
    pause_s = PAUSED_S + 2 * longest_step_s(small)
    time.sleep(pause_s)
    post(small, "continue_generation").raise_for_status()
    assert streams.end() == old
    assert longest_step_s(small) < pause_s, "the pause is no step's time"


def longest_step_s(server: ServerProcess) -> float:
    return max(float(step["seconds"]) for step in server.steps())


@pytest.mark.parametrize("flush_cache", [True, False])
def test_an_idle_server_forgets_prefixes_of_the_old_weights(
    small: ServerProcess,
    old: list[list[int]],
    new: list[list[int]],
    retrained: Path,
    flush_cache: bool,
) -> None:
    assert token_ids(ask(small.url, BODIES)) == old
    assert update(small, retrained, flush_cache).status_code == 200
    assert token_ids(ask(small.url, BODIES)) == new != old


def test_aborted_requests_make_way_for_the_new_weights(
    small: ServerProcess, new: list[list[int]], retrained: Path
) -> None:
    stopped_by(small, "pause_generation", mode="abort").end()
    assert update(small, retrained).status_code == 200
    post(small, "continue_generation").raise_for_status()
    assert token_ids(ask(small.url, BODIES)) == new


def test_whom_a_pause_in_place_holds_can_be_aborted(
    small: ServerProcess, old: list[list[int]]
) -> None:
    streams = stopped_by(small, "pause_generation", mode="in_place")
    post(small, "pause_generation", mode="abort").raise_for_status()
    assert all(len(said) < TOKENS for said in streams.end())
    post(small, "continue_generation").raise_for_status()
    assert token_ids(ask(small.url, BODIES)) == old


@pytest.mark.parametrize("sampling", [
    {"repetition_penalty": 1.3}, {"frequency_penalty": 0.4, "presence_penalty": 0.3},
    {"min_new_tokens": 200, "ignore_eos": False},
], ids=str)  # fmt: skip
def test_penalties_of_retracted_requests_do_not_begin_anew(
    small: ServerProcess, old: list[list[int]], sampling: dict[str, Any]
) -> None:
    if "min_new_tokens" in sampling:  # all but a few tokens end it, once they may
        few = set(old[0][:12])
        sampling |= {"stop_token_ids": [token for token in range(256) if token not in few]}
    body = greedy(BODIES[0]["input_ids"], TOKENS, **sampling)
    [undisturbed] = token_ids(ask(small.url, [body]))
    assert undisturbed != old[0]
    assert len(undisturbed) in range(200, TOKENS) or "min_new_tokens" not in sampling
    streams = stopped_by(small, "pause_generation", [body], mode="retract")
    post(small, "continue_generation").raise_for_status()
    assert streams.end() == [undisturbed]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("update_weights_from_disk", {"model_path": str(DEMO_MODEL), "load_format": "none such"}),
        ("update_weights_from_distributed",
         {"names": [], "dtypes": [], "shapes": [], "group_name": "none such"}),
    ],
    ids=["disk", "distributed"],
)  # fmt: skip
def test_an_update_that_cannot_be_done_ends_nobody(
    small: ServerProcess, old: list[list[int]], path: str, body: dict[str, Any]
) -> None:
    refused = post(small, path, **body)
    assert refused.status_code == 400 and "update them again" in refused.text
    assert update(small, DEMO_MODEL).status_code == 200
    assert token_ids(ask(small.url, BODIES)) == old


def test_a_checkpoint_that_does_not_exist_changes_nothing(
    small: ServerProcess, old: list[list[int]]
) -> None:
    assert update(small, Path("/no/such/checkpoint")).status_code == 400
    assert token_ids(ask(small.url, BODIES)) == old


@pytest.mark.parametrize("paused", ["", "in_place"])
def test_memory_is_released_and_comes_back_while_requests_are_under_way(
    small: ServerProcess, old: list[list[int]], paused: str
) -> None:
    release = {"tags": ["kv_cache"]}
    if paused:
        streams = stopped_by(small, "pause_generation", mode=paused)
    else:
        streams = stopped_by(small, "release_memory_occupation", **release)
    for _ in range(2):  # once more changes nothing
        assert post(small, "release_memory_occupation", **release).status_code == 200
    said = streams.settled()
    state = small.state()
    assert state["device_bytes_committed"] <= 2 << 20 and state["integrity"] == "ok"
    assert state["resize"]["outcome"] == "applied" and state["waiting"] == len(BODIES)
    time.sleep(0.5)
    assert streams.settled() == said, "no step runs meanwhile"
    for _ in range(2):
        assert post(small, "resume_memory_occupation", tags=["kv_cache"]).status_code == 200
    if paused:
        assert small.state()["running"] == 0, "it was paused before"
        post(small, "continue_generation").raise_for_status()
    assert streams.end() == old
    state = small.state()
    assert state["resize"]["wanted_tokens"] == POOL and state["resize"]["outcome"] == "applied"


AWAY_AND_BACK = pytest.mark.parametrize(
    ("away", "back", "body"),
    [
        ("pause_generation", "continue_generation", {"mode": "retract"}),
        ("release_memory_occupation", "resume_memory_occupation", {"tags": ["kv_cache"]}),
    ],
    ids=["pause", "release"],
)


@AWAY_AND_BACK
def test_a_server_without_anything_to_do_leaves_its_core_to_others(
    small: ServerProcess, old: list[list[int]], away: str, back: str, body: dict[str, Any]
) -> None:
    streams = stopped_by(small, away, **body)
    children = psutil.Process(small.pid).children(recursive=True)
    [scheduler] = [p for p in children if "sglang::scheduler" in " ".join(p.cmdline())]
    before = scheduler.cpu_times()
    time.sleep(PAUSED_S)
    after = scheduler.cpu_times()
    assert after.user + after.system - before.user - before.system < PAUSED_S / 10
    took = []
    for _ in range(3):
        begin = time.monotonic()
        post(small, "set_internal_state", server_args={}).raise_for_status()
        took.append(time.monotonic() - begin)
    assert median(took) < PAUSED_S / 4, "it wakes when it is asked"
    post(small, back, **body if back.startswith("resume") else {}).raise_for_status()
    assert streams.end() == old


@AWAY_AND_BACK
def test_who_goes_back_to_a_short_queue_is_not_turned_away(
    brief: ServerProcess, old: list[list[int]], away: str, back: str, body: dict[str, Any]
) -> None:
    half = len(BODIES) // 2
    tokens = {"max_new_tokens": 3 * TOKENS // 2}  # the first run yet when the last begin
    longer = [body | {"sampling_params": body["sampling_params"] | tokens} for body in BODIES]
    # Together they would be turned away as they come.
    streams = stopped_by(brief, away, longer[:half], longer[half:], **body)
    assert brief.state()["waiting"] == len(BODIES) > half + 1
    post(brief, back, **body if back.startswith("resume") else {}).raise_for_status()
    ended = streams.end()
    assert [said[:TOKENS] for said in ended] == old
    assert {len(said) for said in ended} == {3 * TOKENS // 2}


def test_new_weights_while_memory_is_released(
    small: ServerProcess, new: list[list[int]], retrained: Path
) -> None:
    """As training frameworks do it."""
    ask(small.url, BODIES)
    post(small, "release_memory_occupation", tags=["kv_cache"]).raise_for_status()
    assert update(small, retrained).status_code == 200
    post(small, "resume_memory_occupation", tags=["kv_cache"]).raise_for_status()
    assert token_ids(ask(small.url, BODIES)) == new


def test_memory_is_released_from_requests_under_way_and_new_weights_come(
    small: ServerProcess, fresh: ServerProcess, retrained: Path
) -> None:
    """A pause that comes meanwhile is over when it is said to be, whatever memory does."""
    streams = stopped_by(small, "release_memory_occupation", tags=["kv_cache"])
    before = streams.settled()
    assert update(small, retrained).status_code == 200
    post(small, "continue_generation").raise_for_status()
    time.sleep(0.5)
    assert streams.settled() == before, "there is no memory to go on with"
    post(small, "pause_generation", mode="retract").raise_for_status()
    post(small, "resume_memory_occupation", tags=["kv_cache"]).raise_for_status()
    time.sleep(0.5)
    assert streams.settled() == before, "it was paused meanwhile"
    post(small, "continue_generation").raise_for_status()
    assert_new_from_then_on(streams.end(), before, fresh)


def test_other_memory_is_not_released(small: ServerProcess, old: list[list[int]]) -> None:
    streams = under_way(small)
    for tags in (None, [], ["weights"], ["kv_cache", "weights"], ["?"]):
        for path in ("release_memory_occupation", "resume_memory_occupation"):
            answer = post(small, path, tags=tags)
            assert answer.status_code == 400 and "--enable-memory-saver" in answer.text
            assert 'give [\\"kv_cache\\"]' in answer.text
    assert streams.end() == old
