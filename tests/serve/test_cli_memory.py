"""`ellm-sgl memory`: all servers of a budget, also those that are gone; ledgers that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result

from ellm_sgl.budget import Member, Row, file, path_of
from ellm_sgl.budget.file import LedgerFile
from ellm_sgl.serve.cli import main

MIB = 1 << 20
BUDGET = 100 * MIB


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(file, "FOLDER", tmp_path)
    monkeypatch.setattr("ellm_sgl.budget.listing.FOLDER", tmp_path)
    return tmp_path


@pytest.fixture
def chat(folder: Path) -> list[Member]:
    servers = [Member("chat", BUDGET, name, 4 * MIB, 30_000 + i) for i, name in enumerate("abc")]
    for server, needs, has in zip(servers, (80, 60, 0), (40, 50, 0), strict=True):
        server.publish(needs * MIB)
        assert server.debit(has * MIB)
    servers[0].publish(80 * MIB)
    gone = Row(1, 30_009, "gone", 4 * MIB, committed=7 * MIB)
    LedgerFile(path_of("chat"), create=False).write(9, gone)
    return servers


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["memory", *arguments])


def test_one_document_has_every_server(chat: list[Member]) -> None:
    found: dict[str, Any] = json.loads(run("chat", "--json").stdout)
    (budget,) = found["budgets"]
    assert (budget["name"], budget["bytes"], budget["problem"]) == ("chat", BUDGET, None)
    assert budget["committed_bytes"] == 90 * MIB
    states = {server["name"]: server["state"] for server in budget["servers"]}
    assert states == {"a": "grows", "b": "gives back", "c": "steady", "gone": "gone"}
    first = budget["servers"][0]
    assert first["port"] == 30_000 and first["pid"] > 0
    names = ("floor", "needed", "share", "committed")
    assert [first[f"{name}_bytes"] // MIB for name in names] == [4, 80, 48, 40]


def test_people_read_a_table(chat: list[Member]) -> None:
    shown = run()
    assert shown.exit_code == 0
    assert "chat: 90 of 100 MiB committed, in MiB:" in shown.stdout
    for word in ("server", "floor", "gives back", "30001"):
        assert word in shown.stdout


def test_without_budgets_there_is_nothing_to_list() -> None:
    assert run().stdout == "no budgets\n"
    assert json.loads(run("--json").stdout) == {"budgets": []}
    missing = run("chat")
    assert missing.exit_code == 1 and "chat: no such budget" in missing.stderr


def test_a_ledger_that_is_none_is_told_of_and_the_others_are_listed(
    chat: list[Member], folder: Path
) -> None:
    path_of("broken").write_bytes(b"something else")
    shown = run("--json")
    assert shown.exit_code == 1
    broken, good = json.loads(shown.stdout)["budgets"]
    assert "is corrupt; remove it" in broken["problem"] and broken["servers"] == []
    assert good["problem"] is None and len(good["servers"]) == 4
    assert "is corrupt" in run("broken").stdout


def state(outcome: str, units: int) -> dict[str, Any]:
    """Of a server whose pool has units of 4 layer groups and 16 tokens; at most 8,000 tokens."""
    return {
        "device_units_total": units, "layer_groups": 4, "block_tokens": 16,
        "device_bytes_committed": units * MIB // 4,
        "resize": {"outcome": outcome, "most_tokens": 8000},
    }  # fmt: skip


def answering(
    monkeypatch: pytest.MonkeyPatch, states: list[dict[str, Any]], accepted: Any = (True,)
) -> list[Any]:
    """Have servers answer with these states in turn; what they are asked for."""
    asked: list[Any] = []
    left = iter(states)

    def handler(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            asked.append((request.url.path, json.loads(request.content)))
            return httpx.Response(200, json=accepted)
        return httpx.Response(200, json=next(left))

    client = httpx.Client(base_url="http://server:1", transport=httpx.MockTransport(handler))
    monkeypatch.setattr("ellm_sgl.serve.cli_memory.connected", lambda *_: client)
    return asked


@pytest.mark.parametrize(("outcome", "code"), [("applied", 0), ("floor", 1), ("ceiling", 1)])
def test_a_pool_comes_to_a_size_and_how_is_told(
    outcome: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [state("applied", 2000), state("under way", 1500), state(outcome, 1000)]
    asked = answering(monkeypatch, states)
    answer = run("--resize", "4000", "--json")
    assert answer.exit_code == code
    assert json.loads(answer.stdout) == {
        "asked_tokens": 4000, "tokens": 4000, "committed_bytes": 250 * MIB, "outcome": outcome,
    }  # fmt: skip
    wanted = {"server_args": {"ellm_device_kv_tokens": 4000}}
    assert asked == [("/set_internal_state", wanted)]


def test_of_replicas_all_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {"replicas": [state("applied", 2000), state("applied", 2000)]}
    after = {"replicas": [state("applied", 1000), state("floor", 1200)]}
    answering(monkeypatch, [before, after], [True, True])
    answer = run("--resize", "4000")
    assert answer.exit_code == 1
    assert "4,000 tokens asked for, 4,000 there, 550.0 MiB: what is in use" in answer.stdout


def test_sizes_that_are_refused_are_told_with_what_is_possible(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answering(monkeypatch, [state("applied", 2000)], [False])
    answer = run("--resize", "9000")
    assert answer.exit_code == 1 and answer.stdout == ""
    assert "9000 tokens are refused: give a block at least, and 8000 at most" in answer.stderr


def test_the_admin_key_is_for_the_change_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: dict[str, str | None] = {}

    def handler(request: httpx.Request) -> httpx.Response:
        keys[request.method] = request.headers.get("Authorization")
        if request.method == "POST":
            return httpx.Response(200, json=[True])
        return httpx.Response(200, json=state("applied", 1000))

    def connected(url: str, api_key: str | None) -> httpx.Client:
        headers = {"Authorization": f"Bearer {api_key}"}
        return httpx.Client(base_url=url, headers=headers, transport=httpx.MockTransport(handler))

    monkeypatch.setattr("ellm_sgl.serve.cli_memory.connected", connected)
    answer = run("--resize", "4000", "--api-key", "all", "--admin-api-key", "admin")
    assert answer.exit_code == 0
    assert keys == {"GET": "Bearer all", "POST": "Bearer admin"}


def test_a_size_that_others_keep_it_from_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, [state("applied", 500), state("applied", 500)])
    answer = run("--resize", "4000")
    assert answer.exit_code == 1
    assert "4,000 tokens asked for, 2,000 there" in answer.stdout and "budget" in answer.stdout


def test_a_server_of_another_version_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, [{"device_units_total": 3}] * 2)
    answer = run("--resize", "4000")
    assert answer.exit_code == 1 and "another shape" in answer.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--resize", "0"), "0 is not in the range"),
        (("chat", "--resize", "100"), "--resize is of a server, not of budget chat"),
        (("--resize", "100", "--url", "http://127.0.0.1:1"), "no answer"),
        (("--resize", "100", "--url", "http://127.0.0.1:port"), "Invalid port"),
    ],
)
def test_what_makes_no_sense_is_told_in_a_line(arguments: tuple[str, ...], told: str) -> None:
    answer = run(*arguments)
    assert answer.exit_code in (1, 2) and told in answer.stderr
