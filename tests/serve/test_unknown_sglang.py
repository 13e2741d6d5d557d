"""Commands that are about eLLM, on a version of SGLang on which it is off."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from ellm_sgl.serve.cli import main
from ellm_sgl.sglang import versions


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(versions, "installed", lambda: "0.9.1")
    versions.adapter.cache_clear()
    yield
    versions.adapter.cache_clear()


@pytest.mark.parametrize("command", ["verify", "demo", "demo --colocated", "compare"])
def test_they_say_so_in_one_line(unknown: None, command: str) -> None:
    done = CliRunner().invoke(main, command.split())
    assert done.exit_code == 1
    last = done.output.strip().splitlines()[-1]
    assert last.startswith("Error: eLLM has not been tested with sglang 0.9.1; install sglang 0.5")
