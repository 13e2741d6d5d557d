"""`ellm-sgl verify`: the proof that nothing changes, for every supported architecture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ellm_sgl.eval.tiny_models import TINY_MODELS, write

pytestmark = pytest.mark.slow

COVERED = "llama-gqa"
"""By the demo model, of the same architecture and kind of attention."""


def verify(*arguments: str) -> dict[str, object]:
    command = [sys.executable, "-m", "ellm_sgl.serve.cli", "verify", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, object] = json.loads(done.stdout)
    return report


def test_demo_model() -> None:
    """fp32, prompts of 1 to 1,500 tokens, every ratio and split, forced eviction."""
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
        if not setting.endswith(", forced eviction"):
            recomputes = setting != "r = 0.0" and not setting.endswith(" 1:0")
            assert (comparison["recomputed_tokens"] > 0) == recomputes


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


@pytest.mark.parametrize("name", [name for name in TINY_MODELS if name != COVERED])
def test_tiny_model(name: str, tmp_path: Path) -> None:
    """Random weights of each architecture, head size and kind of attention; a group of two
    layers, so that some of these have a last, shorter one."""
    model = write(name, tmp_path / name)
    report = verify("--model-path", str(model), "--dtype", "float32", "--max-prompt-tokens", "500",
                    "--output-tokens", "12", "--ellm-layer-group", "2", "--quick")  # fmt: skip
    assert report["passed"] is True
