"""`import ellm_sgl`: cheap, and what it offers."""

from __future__ import annotations

import subprocess
import sys

import pytest

import ellm_sgl


def run(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_importing_it_imports_nothing_large() -> None:
    large = run(
        "import sys; before = set(sys.modules); import ellm_sgl\n"
        "print({n.partition('.')[0] for n in set(sys.modules) - before} - sys.stdlib_module_names)"
    )
    assert large.strip() == "{'ellm_sgl'}"


def test_it_offers_what_it_says() -> None:
    assert ellm_sgl.enabled.__module__ == "ellm_sgl.sglang.enabling"
    assert issubclass(ellm_sgl.ConfigError, ValueError)
    with pytest.raises(AttributeError, match="'ellm_sgl' has no attribute 'enable'"):
        _ = ellm_sgl.enable


@pytest.mark.slow
def test_torchvision_can_be_imported_after_it() -> None:
    """On a CPU build of PyTorch it cannot before."""
    assert run("import ellm_sgl, torchvision; print(torchvision.__name__)") == "torchvision\n"
