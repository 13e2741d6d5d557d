"""`ellm-sgl verify`: the proof that nothing changes, for every supported architecture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ellm_sgl.eval.tiny_models import TINY_MODELS, write

pytestmark = pytest.mark.slow

EVERY_SETTING = "llama-mha"
"""As the demo model (grouped heads), this one (all heads) is tried at every ratio and split."""


def verify(*arguments: str) -> dict[str, object]:
    command = [sys.executable, "-m", "ellm_sgl.serve.cli", "verify", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, object] = json.loads(done.stdout)
    return report


def test_demo_model() -> None:
    """fp32 and bf16, prompts of 1 to 1,500 tokens, every ratio and forced eviction."""
    report = verify()
    assert report["passed"] is True
    comparisons = report["comparisons"]
    assert isinstance(comparisons, list)
    assert {c["dtype"] for c in comparisons} == {"float32", "bfloat16"}
    for comparison in comparisons:
        setting = comparison["setting"]
        assert (comparison["fetched_units"] > 0) == setting.startswith("host")
        recomputes = setting not in ("r = 0.0", "host 1:0", "host, forced eviction")
        assert (comparison["recomputed_tokens"] > 0) == recomputes
        assert comparison["retractions"] == 0
        # Near ties may tip in bf16, but not many of them do.
        assert comparison["agreement"] > 0.8


@pytest.mark.parametrize("name", TINY_MODELS)
def test_tiny_model(name: str, tmp_path: Path) -> None:
    """Random weights of each architecture, head size and kind of attention; a group of two
    layers, so that some of these have a last, shorter one."""
    model = write(name, tmp_path / name)
    settings = ["--quick"] if name != EVERY_SETTING else []
    report = verify("--model-path", str(model), "--dtype", "float32", "--max-prompt-tokens", "500",
                    "--output-tokens", "12", "--ellm-layer-group", "2", *settings)  # fmt: skip
    assert report["passed"] is True
