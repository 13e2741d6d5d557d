"""`examples/offline_batch`: two processes that share less memory than the batch needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ellm_sgl.budget import list_budgets, path_of
from ellm_sgl.client.process import DEMO_MODEL, SERVER_ENVIRONMENT, ServerProcess
from tests.e2e.load import ask, greedy, prompts, token_ids

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples/offline_batch"
MIB = 1 << 20
BUDGET, TOKENS = 12 * MIB, 2_900
"""A quarter of what the batch's 11,200 tokens take, all at once."""


@pytest.mark.parametrize(
    ("script", "workers"), [("batch.py", "--processes"), ("on_ray.py", "--actors")]
)
def test_two_processes_answer_a_batch_larger_than_their_memory(
    server: ServerProcess, tmp_path: Path, script: str, workers: str
) -> None:
    if script == "on_ray.py":
        pytest.importorskip("ray.data", reason="needs ray: pip install 'ellm-sgl[ray]'")
    bodies = [greedy(prompt, 40) for prompt in prompts(32, 250, 350, seed=21)]
    expected = token_ids(ask(server.url, bodies))
    requests, answers = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    requests.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    name = f"batch-{os.getpid()}"
    command = [
        sys.executable, str(EXAMPLES / script), "--model-path", str(DEMO_MODEL),
        "--dtype", "float32", "--input", str(requests), "--output", str(answers),
        "--at-once", "16", workers, "2", "--memory-budget", f"{name}:{BUDGET}",
        "--device-kv-tokens", str(TOKENS),
    ]  # fmt: skip
    environment = {
        **SERVER_ENVIRONMENT,
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with Watcher(name) as watcher:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    path_of(name).unlink(missing_ok=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in answers.read_text().splitlines()]
    assert token_ids(found) == expected
    assert len(watcher.processes) == 2
    assert BUDGET / 2 < watcher.most <= BUDGET


class Watcher:
    """Looks at a ledger every 10 ms."""

    def __init__(self, budget: str) -> None:
        self._budget, self._stop = budget, threading.Event()
        self.most = 0
        """Bytes that all together had at a time."""
        self.processes: set[int] = set()

    def __enter__(self) -> Watcher:
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            for budget in list_budgets(self._budget):
                rows = [sharer.row for sharer in budget.sharers if sharer.alive]
                self.processes |= {row.pid for row in rows}
                self.most = max(self.most, sum(row.committed for row in rows))
