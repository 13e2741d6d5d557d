"""`ellm-sgl doctor`: each thing that is wrong is told, with what to do about it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ellm_sgl.budget.machine import Room
from ellm_sgl.kernels.cpu import library
from ellm_sgl.serve import doctor
from ellm_sgl.serve.cli import main


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *arguments])


def remedies() -> dict[str, str]:
    """By what is wrong."""
    return {finding.name: finding.remedy for finding in doctor.examine() if not finding.ok}


def test_what_is_wrong_is_told_with_a_remedy_and_ends_with_1(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a container what it may have, whatever the machine has."""
    monkeypatch.setattr(doctor, "tightest", lambda _: Room(2 * 10**9, 10**9, "the container (x)"))
    told = run("--json")
    assert told.exit_code == 1
    document: dict[str, Any] = json.loads(told.stdout)
    [wrong] = [finding for finding in document["findings"] if not finding["ok"]]
    assert (wrong["name"], wrong["found"]) == ("memory", "1.0 GB free of the container (x)")
    assert wrong["remedy"] == "free some memory: a small server needs about 3 GB"
    shown = run()
    assert shown.exit_code == 1 and "free some memory" in shown.stdout


def test_a_python_that_is_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 14, 0))
    assert remedies() == {"python": "use Python 3.11 or 3.12"}


def test_without_kernels_it_says_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They are not needed, only fast."""
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    library.load.cache_clear()
    try:
        [found] = [finding for finding in doctor.examine() if finding.name == "attention"]
    finally:
        library.load.cache_clear()
    assert found.ok and "then: ellm-sgl kernels build" in found.found


def test_a_check_that_fails_is_a_finding_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> doctor.Finding:
        raise ImportError("half an install")

    broken.__name__ = "_hooks"
    monkeypatch.setattr(doctor, "_hooks", broken)
    assert remedies() == {"hooks": "reinstall from the lock files: make setup"}
