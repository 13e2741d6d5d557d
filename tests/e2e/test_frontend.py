"""SGLang's frontend language against a server with half of every request's KV missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ellm_sgl.client.process import ServerProcess

pytestmark = pytest.mark.slow

PROGRAM = """
from ellm_sgl.sglang.platform.torchvision_ops import declare
declare()
import sys
import sglang as sgl

@sgl.function
def tour(s, topic):
    s += "Python's " + topic + " " * 40
    forks = s.fork(3)
    for i, fork in enumerate(forks):
        fork += f"Point {i}: " + sgl.gen("point", max_tokens=30, temperature=0)
    for fork in forks:
        s += fork["point"]
    s += "So it is " + sgl.select("verdict", choices=["good", "bad"])

sgl.set_default_backend(sgl.RuntimeEndpoint(sys.argv[1]))
state = tour.run(topic="str.split")
print(repr(state.text()), state["verdict"] in ("good", "bad"))
"""


def run(server: ServerProcess) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, server.url],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_gen_fork_and_select(server: ServerProcess) -> None:
    everything = run(server)
    server.flush_cache()
    server.adjust(ellm_ratio=0.5)
    before = server.state()["recomputed_tokens_total"]
    assert run(server) == everything
    assert everything.rstrip().endswith("True")
    assert server.state()["recomputed_tokens_total"] > before
