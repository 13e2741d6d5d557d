"""The example plugin, built and installed: found by name, checked, and its own tests pass."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.policy_plugin import EXAMPLE, NAME, install_plugin

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return install_plugin(tmp_path_factory.mktemp("plugin"))


def run(plugin: dict[str, str], *command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command],
        env={**os.environ, **plugin},
        cwd=cwd,
        text=True,
        capture_output=True,
    )


def policies(plugin: dict[str, str], *arguments: str, cwd: Path) -> Any:
    done = run(plugin, "ellm_sgl.serve.cli", "policies", *arguments, "--json", cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_list_finds_it_without_loading_trouble(plugin: dict[str, str], tmp_path: Path) -> None:
    found = {p["name"]: p for p in policies(plugin, "list", cwd=tmp_path)["policies"]}
    assert found[NAME]["package"] == "ellm-shortest-first 0.1.0"
    assert found[NAME]["options"] == "(tokens_per_second: 'float' = 20.0)"
    assert found[NAME]["error"] is None
    assert "fixed-ratio" in found


def test_check_passes(plugin: dict[str, str], tmp_path: Path) -> None:
    options = '{"tokens_per_second": 50}'
    report = policies(
        plugin, "check", NAME, "--options", options, "--budget-ms", "1000", cwd=tmp_path
    )
    assert report["ok"] is True and report["options"] == {"tokens_per_second": 50}


def test_bench_times_it(plugin: dict[str, str], tmp_path: Path) -> None:
    (figures,) = policies(plugin, "bench", NAME, cwd=tmp_path)["policies"]
    assert figures["policy"] == NAME


def test_its_own_tests_pass(plugin: dict[str, str], tmp_path: Path) -> None:
    own = str(EXAMPLE / "test_shortest_first.py")
    done = run(
        plugin, "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", own, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout
    assert "9 passed, 2 skipped" in done.stdout


def test_its_options_are_checked(plugin: dict[str, str], tmp_path: Path) -> None:
    arguments = ("policies", "check", NAME, "--options", '{"tokens_per_second": 0}')
    done = run(plugin, "ellm_sgl.serve.cli", *arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert "tokens_per_second is 0; give more than 0" in done.stderr
