"""`ellm-sgl verify`: the proof that nothing changes, for every supported architecture."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ellm_sgl.eval.tiny_models import TINY_MODELS, write
from ellm_sgl.serve.cli import main
from ellm_sgl.serve.verify.stages import RESIZES
from tests.e2e import planted_errors

pytestmark = pytest.mark.slow

COVERED = "llama-gqa"
"""By the demo model, of the same architecture and kind of attention."""
CROWDED = ("chats", "aborts")
STORED = ("chats, stored", "chats, from the store")
NEED_NOT_PAUSE = ("chats, fcfs", "chats, mixed chunk, full", "chats, resized",
                  "chats, two ranks, resized", *STORED)  # fmt: skip
"""Whether they do is theirs to decide."""
LIMIT_S = 1200
"""For one run; the full one starts twelve servers."""


def run(
    *arguments: str, environment: Mapping[str, str] | None = None
) -> tuple[int, dict[str, Any], str]:
    """Exit status, report, and what was said on the way."""
    command = [sys.executable, "-m", "ellm_sgl.serve.cli", "verify", "--json", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S - 50, check=False,
        env={**os.environ, **(environment or {})},
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


def verify(*arguments: str) -> dict[str, Any]:
    """The report, of the command in this process: its servers are copies of what all tests' are."""
    runner = CliRunner(env={"OMP_NUM_THREADS": "1"})
    done = runner.invoke(main, ["verify", "--json", *arguments], catch_exceptions=False)
    assert done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert done.exit_code == 0, (report["failures"], done.stderr)
    assert report["failures"] == [] and all(c["failure"] is None for c in report["comparisons"])
    return report


@pytest.mark.timeout(LIMIT_S)
def test_demo_model() -> None:
    """fp32, prompts of 1 to 1,500 tokens, every ratio and split, forced eviction; chats, aborted
    streams, a store on disk, mixed chunks and two ranks."""
    report = verify("--dtype", "float32")
    assert report["passed"] is True
    comparisons = report["comparisons"]
    assert isinstance(comparisons, list)
    for comparison in comparisons:
        setting = comparison["setting"]
        recomputed_only = setting in ("forced eviction", "unfused 0:1")
        fetches = not (recomputed_only or setting.startswith("r = "))
        assert (comparison["fetched_units"] > 0) == fetches
        assert (comparison["projected_units"] > 0) == setting.startswith(("hidden", "mixed"))
        assert comparison["retractions"] == 0
        # With a small device units to fetch into may be lacking: then blocks are recomputed.
        if not setting.endswith(", forced eviction") and not setting.startswith(CROWDED):
            recomputes = setting != "r = 0.0" and not setting.endswith(" 1:0")
            assert (comparison["recomputed_tokens"] > 0) == recomputes
    crowded = {c["setting"]: c for c in comparisons if c["setting"].startswith(CROWDED)}
    assert list(crowded) == [
        "chats, paused", "chats, fcfs", "chats, resized", "aborts, paused", *STORED,
        "chats, mixed chunk", "chats, mixed chunk, full", "chats, two ranks",
        "chats, two ranks, resized",
    ]  # fmt: skip
    for name, comparison in crowded.items():
        assert comparison["evicted_units"] > 0
        assert (comparison["stored_tokens"] > 0) or name not in STORED[1:]
        assert (comparison["aborted"] > 0) == name.startswith("aborts")
        resized = [comparison[n] for n in ("resized", "at_floor", "overtaken")]
        assert sum(resized) == (RESIZES if name.endswith("resized") else 0)
        if name not in NEED_NOT_PAUSE:
            assert comparison["pauses"] > 0
    assert report["left_out"] == []


def test_demo_model_in_16_bits() -> None:
    report = verify("--dtype", "bfloat16", "--quick")
    assert report["passed"] is True
    comparisons = report["comparisons"]
    assert isinstance(comparisons, list)
    settings = ["0:1", "1:1", "1:0"]
    expected = [f"mixed {s}" for s in settings] + ["mixed, forced eviction"]
    assert [c["setting"] for c in comparisons] == expected
    # Near ties may tip in bf16, but not many of them do.
    assert all(c["dtype"] == "bfloat16" and c["agreement"] > 0.8 for c in comparisons)
    for comparison in comparisons:
        assert comparison["forced"]["tokens"] == comparison["noise"]["tokens"] == 18 * 16
        assert 0 < comparison["noise"]["mean"] < 0.01


@pytest.mark.parametrize("error", ["shifted", "stale"])
def test_errors_in_saved_kv_are_found(error: str, tmp_path: Path) -> None:
    """In both dtypes, wherever saved KV is fetched, and nowhere else."""
    status, report, said = run(
        "--quick", "--max-prompt-tokens", "500", environment=planted_errors.install(tmp_path, error)
    )
    assert status == 1 and report["passed"] is False
    failures = {(c["dtype"], c["setting"]): c["failure"] for c in report["comparisons"]}
    for dtype, words in (("float32", "outputs differ"), ("bfloat16", "rounding explains")):
        for setting in ("mixed 1:1", "mixed 1:0"):
            assert words in failures[dtype, setting]
        assert failures[dtype, "mixed 0:1"] is None  # all is recomputed
    first = f"float32, mixed 1:1: {failures['float32', 'mixed 1:1']}"
    last = said.rstrip().splitlines()[-1]
    assert last.startswith(f"Error: verify failed: {first} (and ")


@pytest.mark.parametrize("name", [name for name in TINY_MODELS if name != COVERED])
def test_tiny_model(name: str, tmp_path: Path) -> None:
    """Random weights of each architecture, head size and kind of attention; a group of two
    layers, so that some of these have a last, shorter one."""
    model = write(name, tmp_path / name)
    report = verify("--model-path", str(model), "--dtype", "float32", "--max-prompt-tokens", "500",
                    "--output-tokens", "12", "--ellm-layer-group", "2", "--quick")  # fmt: skip
    assert report["passed"] is True
