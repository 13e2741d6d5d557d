"""`ellm-sgl demo` with a small load; and stopped half-way, as its user does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from ellm_sgl.memory.arena import HUGE_PAGE
from ellm_sgl.serve.cli import main
from tests.servers import still_there

pytestmark = pytest.mark.slow

DEMO = (sys.executable, "-m", "ellm_sgl.serve.cli", "demo")


def demo(*arguments: str) -> tuple[dict[str, Any], str]:
    """The report and what was said meanwhile, of the command in this process: its servers are
    copies of what all tests' are. They measure as long as others do: it is not to depend on a
    moment of this machine whether the policy finds that restoring pays."""
    runner = CliRunner(env={"OMP_NUM_THREADS": "1", "ELLM_SGL_CALIBRATION_S": "3"})
    done = runner.invoke(main, ["demo", *arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.stdout + done.stderr
    return json.loads(done.stdout), done.stderr


def test_outputs_are_those_of_ample_memory() -> None:
    """24 chats of 128 + 128 tokens, and room for a third of that."""
    report, said = demo("--output-tokens", "128")
    assert report["ok"] is True and report["outputs_identical"] == 24
    ample, stock, ellm = report["runs"]
    assert ample["completed"] == ellm["completed"] == stock["completed"] == 24
    assert ample["pool_tokens"] > report["needed_tokens"] >= 3 * ellm["pool_tokens"]
    assert ellm["retractions"] == ample["retractions"] == 0
    assert ellm["restoration"]["integrity"] == "ok"
    assert ellm["restoration"]["evicted_units"] > 0
    assert ellm["restoration"]["fetched_units"] > 0
    assert "\x1b" not in said
    for line in ("1/3 stock, ample", "2/3 eLLM, small", "3/3 stock, small"):
        assert line in said


def test_two_servers_share_a_budget() -> None:
    """Outputs are the same whoever has how much memory; each gets nearly all of it in its turn."""
    report, said = demo("--colocated", "--output-tokens", "64")
    assert report["ok"] is True and report["failures"] == []
    alone, halves, shared = report["runs"]
    for run in (alone, halves, shared):
        assert run["completed"] == run["identical_to_alone"] == 192
    assert max(halves["most_bytes"]) <= report["memory_bytes"] / 2 + HUGE_PAGE  # whole ones
    assert min(shared["most_bytes"]) > 1.2 * min(halves["most_bytes"])
    assert shared["most_together_bytes"] <= report["memory_bytes"]
    assert set(report["ratios"]) == set(shared["servers"]) == {"model A", "model B"}
    assert "\x1b" not in said


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_demo_leaves_nothing_behind(sent: signal.Signals, tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    demo = subprocess.Popen([*DEMO, "--streams", "2"], stderr=subprocess.PIPE, env=environment)
    try:
        servers = _servers_of(demo.pid)
    finally:
        demo.send_signal(sent)
        _, said = demo.communicate(timeout=120)
    assert demo.returncode == 1
    assert b"Aborted!" in said and b"Traceback" not in said
    assert not still_there(servers)
    assert not list(tmp_path.glob("ellm-sgl-*"))


def _servers_of(demo: int) -> list[psutil.Process]:
    """The server and its worker processes, once there are some."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        children: list[psutil.Process] = psutil.Process(demo).children(recursive=True)
        if len(children) >= 3:
            return children
        time.sleep(0.5)
    raise AssertionError("no server appeared")
