"""`ellm-sgl memory`: all servers of a budget, also those that are gone; ledgers that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
