"""`ellm-sgl doctor`: what this machine and this install can run, each problem with its remedy."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
import warnings
from dataclasses import dataclass

import psutil

from ellm_sgl.budget.machine import ROOT, tightest
from ellm_sgl.client.process import DEMO_MODEL
from ellm_sgl.sglang.versions import VERSIONS, installed, untested

MINIMUM_FREE_MEMORY_GB = 3.0


@dataclass(frozen=True)
class Finding:
    """One thing looked at."""

    name: str
    ok: bool
    found: str
    remedy: str = ""
    """What to do; empty when `ok`."""


def examine() -> list[Finding]:
    """Look at everything; later findings that need earlier ones are left out when those fail."""
    findings: list[Finding] = []
    for check in (_python, _memory, _torch, _sglang, _accelerator, _kernels, _hooks, _demo_model):
        try:
            findings.append(check())
        except Exception as error:  # a broken install may raise anything on import
            name = check.__name__.strip("_")
            remedy = "reinstall from the lock files: make setup"
            findings.append(Finding(name, False, f"{type(error).__name__}: {error}", remedy))
        if not findings[-1].ok and check in (_torch, _sglang):
            break
    return findings


def _python() -> Finding:
    ok = (3, 11) <= sys.version_info < (3, 13)
    return _found("python", ok, platform.python_version(), "use Python 3.11 or 3.12")


def _memory() -> Finding:
    room = tightest(ROOT)
    free = room.free / 1e9
    remedy = f"free some memory: a small server needs about {MINIMUM_FREE_MEMORY_GB:.0f} GB"
    return _found(
        "memory", free >= MINIMUM_FREE_MEMORY_GB, f"{free:.1f} GB free of {room.of}", remedy
    )


def _torch() -> Finding:
    return _installed("torch", "install PyTorch first (see requirements/README.md)")


def _sglang() -> Finding:
    host = "on a CPU host use the lock files (requirements/README.md)"
    found = _installed("sglang", f"pip install '.[cuda]' in the checkout on a CUDA host; {host}")
    if found.ok and found.found not in VERSIONS:
        found = Finding("sglang", False, found.found, untested(found.found))
    return found


def _accelerator() -> Finding:
    import torch

    from ellm_sgl.sglang import cuda
    from ellm_sgl.sglang.platform_entry import activate

    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        tried = cuda.available() and os.environ.get(cuda.EXPERIMENTAL) == "1"
        runs = "eLLM runs experimentally" if tried else "SGLang runs as stock"
        remedy = f"experimental, see docs/gpu.md; to try it set {cuda.EXPERIMENTAL}=1"
        return _found("platform", tried, f"{device}: {runs} here", remedy)
    if activate() is None:
        remedy = "use an x86 host, and leave SGLANG_USE_CPU_ENGINE unset"
        return Finding("platform", False, f"{platform.machine()}, no accelerator", remedy)
    return Finding("platform", True, f"x86 CPU, {psutil.cpu_count(logical=False)} cores")


def _kernels() -> Finding:
    """Not having the C++ kernels costs speed only: not a problem, but worth telling."""
    import torch

    from ellm_sgl.kernels.choose import choose
    from ellm_sgl.kernels.cpu.library import load

    chosen = choose(torch.device("cpu"), 128, torch.float32, torch.float32)
    hint = (
        "; install g++ 11 or newer, or clang, then: ellm-sgl kernels build"
        if load().problem
        else ""
    )
    return Finding("attention", True, chosen.said + hint)


def _hooks() -> Finding:
    from ellm_sgl.sglang.platform.torchvision_ops import declare

    declare()
    from ellm_sgl.sglang.versions.signatures import differences

    with warnings.catch_warnings(action="ignore"):  # of GPU parts that a CPU host lacks
        changed = differences()
    found = "; ".join(changed) or "every function of SGLang is as recorded"
    return _found("hooks", not changed, found, f"reinstall sglang {installed()}: eLLM is off")


def _demo_model() -> Finding:
    ok = (DEMO_MODEL / "model.safetensors").is_file()
    return _found("demo model", ok, str(DEMO_MODEL), "reinstall ellm-sgl")


def _found(name: str, ok: bool, found: str, remedy: str) -> Finding:
    return Finding(name, ok, found, "" if ok else remedy)


def _installed(name: str, remedy: str) -> Finding:
    if importlib.util.find_spec(name) is None:
        return Finding(name, False, "not installed", remedy)
    return Finding(name, True, importlib.metadata.version(name))
