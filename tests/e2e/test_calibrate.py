"""`ellm-sgl calibrate` on the demo model, with a real server."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest

from ellm_sgl.client.process import ServerProcess
from ellm_sgl.serve.calibrate import LEARNING_STEPS
from ellm_sgl.sglang import calibration


@pytest.mark.slow
def test_calibrate_reports_profile_and_errors() -> None:
    command = [sys.executable, "-m", "ellm_sgl.serve.cli", "calibrate", "--json"]
    environment = {k: v for k, v in os.environ.items() if k != calibration.VARIABLE}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=580, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    hardware = report["hardware"]
    assert hardware.pop("name") == "cpu"
    assert all(math.isfinite(value) and value >= 0 for value in hardware.values())
    assert hardware["flops"] > 0 and hardware["device_bytes_per_s"] > 0
    profile, on_line, paper = report["errors"]
    assert profile["steps"] == paper["steps"]
    assert on_line["steps"] == profile["steps"] - LEARNING_STEPS > 200
    same, beside = report["step_noise"]
    assert same["steps"] == beside["steps"] > 100 and beside["mape"] > 0
    # Far apart on any machine: the paper's model knows neither overhead nor bandwidth.
    assert on_line["median_ape"] < paper["median_ape"] / 2


@pytest.mark.slow
def test_calibration_leaves_nothing_behind(shared_server: ServerProcess) -> None:
    state = shared_server.state()
    assert state["hardware"] is not None
    shared_server.flush_cache()
    state = shared_server.state()
    assert state["integrity"] == "ok"
    assert state["device_units_free"] == state["device_units_total"]
