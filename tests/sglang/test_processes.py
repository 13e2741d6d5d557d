"""Worker processes are copies of the first one, where that is sound."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from ellm_sgl.client.process import SERVER_ENVIRONMENT

PROGRAM = """
import json, multiprocessing, os, sys, threading
from ellm_sgl.sglang.platform.torchvision_ops import declare
declare()
from sglang.srt.entrypoints import engine
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import prepare_server_args
from ellm_sgl.client.process import DEMO_ARGUMENTS
from ellm_sgl.sglang.processes import may_be_copied


MORE = {"a numa node": ["--numa-node", "0"], "replicas": ["--dp-size", "2"]}


def start(case):
    if case == "another plugin":
        HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.__init__", lambda *_: None)
    load_plugins()
    policy = "off" if case in ("off", "replicas") else "fcfs"
    more = MORE.get(case, [])
    arguments = prepare_server_args([*DEMO_ARGUMENTS, "--ellm-policy", policy, *more])
    may_be_copied()
    if case == "a second thread":
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    engine._set_envs_and_config(arguments)
    hooked = hasattr(Scheduler.handle_generate_request, "__wrapped__")
    print(json.dumps([case, multiprocessing.get_start_method(), hooked]), flush=True)


for case in ("alone", "off", "a second thread", "another plugin", "a numa node", "replicas"):
    if os.fork() == 0:
        start(case)
        os._exit(0)
    assert os.wait()[1] == 0, case
"""


@pytest.mark.slow
def test_how_workers_come_about() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, **SERVER_ENVIRONMENT},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert [json.loads(line) for line in lines] == [
        ["alone", "fork", True],
        ["off", "fork", False],
        ["a second thread", "spawn", True],
        ["another plugin", "spawn", False],
        ["a numa node", "spawn", True],
        ["replicas", "spawn", False],
    ]
