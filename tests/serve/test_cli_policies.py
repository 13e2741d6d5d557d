"""`ellm-sgl policies`: what it prints, in words and in JSON, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ellm_sgl.policies.testing.checks import CHECKS
from ellm_sgl.serve.cli import main

PLUGIN = """
from ellm_sgl.policies import Batch, Stock

class Backwards(Stock):
    '''Admits from the end.

    More about it.
    '''

    def __init__(self, pace: int = 3) -> None:
        super().__init__()

    def batch(self, state):
        return Batch(admit=tuple(-1 - i for i in range(len(state.waiting))))
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with two policies: one answers nonsense, one cannot be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "backwards_plugin.py").write_text(PLUGIN)
    info = tmp_path / "backwards-0.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: backwards\nVersion: 0.3\n")
    (info / "entry_points.txt").write_text(
        "[ellm_sgl.policies]\nbackwards = backwards_plugin:Backwards\nbroken = no_such_module:P\n"
    )


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["policies", *arguments])


def document(result: Result) -> Any:
    """The one JSON document on stdout."""
    return json.loads(result.stdout)


def test_list_tells_each_with_its_package_and_options() -> None:
    result = run("list")
    assert result.exit_code == 0, result.output
    assert "fixed-ratio(ratio: 'float' = 0.0, " in result.stdout
    assert "from ellm-sgl " in result.stdout


@pytest.mark.usefixtures("plugin")
def test_list_shows_a_broken_plugin_beside_the_others() -> None:
    result = run("list", "--json")
    assert result.exit_code == 1
    found = {policy["name"]: policy for policy in document(result)["policies"]}
    assert found["backwards"] == {
        "name": "backwards",
        "package": "backwards 0.3",
        "class": "backwards_plugin:Backwards",
        "summary": "Admits from the end.",
        "options": "(pace: int = 3)",
        "error": None,
    }
    assert "No module named 'no_such_module'" in found["broken"]["error"]
    assert found["fixed-ratio"]["error"] is None
    assert "No module named 'no_such_module'" in run("list").stdout


def test_check_of_a_good_policy() -> None:
    arguments = ("check", "fixed-ratio", "--states", "5", "--budget-ms", "1000")
    told = document(run(*arguments, "--options", '{"ratio": 0.25}', "--json"))
    assert told["ok"] is True
    assert (told["policy"], told["options"]) == ("fixed-ratio", {"ratio": 0.25})
    assert [check["name"] for check in told["checks"]] == list(CHECKS)
    result = run(*arguments)
    assert result.exit_code == 0
    assert "fixed-ratio: passed" in result.stdout


@pytest.mark.usefixtures("plugin")
def test_check_of_a_bad_policy() -> None:
    result = run("check", "backwards", "--states", "5", "--json")
    assert result.exit_code == 1
    (failure,) = [c for c in document(result)["checks"] if c["name"] == "answers-are-valid"]
    assert failure["outcome"] == "failed" and "admit has -" in failure["detail"]
    shown = run("check", "backwards", "--states", "5")
    assert shown.exit_code == 1
    assert "backwards: failed" in shown.stdout


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("command", ["check", "bench"])
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("nope",), "no policy 'nope'; installed: backwards, broken, "),
        (("broken",), "No module named 'no_such_module'"),
        (("fixed-ratio", "--options", '{"ratio": 2}'), "refuses its options {'ratio': 2}"),
        (("fixed-ratio", "--options", "ratio=2"), "'ratio=2' is not JSON"),
        (("fixed-ratio", "--options", "[]"), "'[]' is not a JSON object"),
    ],
)
def test_what_cannot_be_run(command: str, arguments: tuple[str, ...], told: str) -> None:
    result = run(command, *arguments, "--json")
    assert result.exit_code != 0
    assert result.stdout == "" and told in result.stderr


def test_bench_tells_its_figures_and_the_papers() -> None:
    told = document(run("bench", "fixed-ratio", "--json"))
    assert (told["running"], told["waiting"]) == (256, 1024)
    assert told["paper"] == {"decision_mean_us": [2910.0, 6040.0], "split_us": 30.0}
    (figures,) = told["policies"]
    assert figures["policy"] == "fixed-ratio"
    for kind in ("decision", "steady", "split", "checks"):
        timing = figures[kind]
        assert timing["calls"] == 200
        assert 0 < timing["p50_us"] <= timing["p99_us"]
    assert "the paper" in run("bench", "fixed-ratio").stdout


@pytest.mark.usefixtures("plugin")
def test_bench_refuses_nonsense() -> None:
    result = run("bench", "backwards")
    assert result.exit_code == 1
    assert "admit has -" in result.stderr


def test_bench_of_all_needs_no_options() -> None:
    result = run("bench", "--options", '{"ratio": 0.5}')
    assert result.exit_code == 2
    assert "--options needs NAME" in result.stderr
