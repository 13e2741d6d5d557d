"""The CPU platform is offered only where there is nothing else."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from ellm_sgl.config import ConfigError
from ellm_sgl.sglang import platform_entry
from ellm_sgl.sglang.platform.cores import VARIABLE, bind
from ellm_sgl.sglang.platform.torchvision_ops import declare

declare()


def test_offered_on_an_x86_host_without_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert platform_entry.activate() == platform_entry.PLATFORM


def test_out_of_the_way_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert platform_entry.activate() is None
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert platform_entry.activate() is None
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert platform_entry.activate() is None


def test_class_loads_and_is_out_of_tree() -> None:
    from sglang.srt.platforms import _load_platform_class

    instance = _load_platform_class(platform_entry.PLATFORM)()
    assert instance.is_out_of_tree()
    assert instance.device_type == "cpu"
    assert not instance.is_pin_memory_available()


MULTIPLIED = """
import sys, psutil, torch
from torch.nn.functional import linear
from ellm_sgl.kernels.cpu.onednn import linear_of_many

def resident():
    return psutil.Process().memory_info().rss / 1e6

def multiply(x, weight):
    return linear(x, weight) if linear_of_many(x, weight) is None else None

dtype = getattr(torch, sys.argv[1])
torch.set_grad_enabled(False)
weights = [torch.randn(outputs, 64).to(dtype) for outputs in (96, 128)]
x = torch.randn(700, 64).to(dtype)
for w in weights:
    multiply(x, w)
before = resident()
for rows in range(65, 365):
    for w in weights:
        multiply(x[:rows], w)
print(resident() - before)
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_of_ever_other_numbers_of_rows_take_no_more_memory(dtype: str) -> None:
    """oneDNN compiles one for each; without a limit these are 350 MB."""
    import sglang.srt.platforms  # noqa: F401  which itself imports the next

    from ellm_sgl.sglang.platform.cpu import ONEDNN_KEEPS

    environment = os.environ | ONEDNN_KEEPS
    run = [sys.executable, "-c", MULTIPLIED, dtype]
    megabytes = subprocess.check_output(run, env=environment, text=True)
    assert float(megabytes) < 60


CPUS = sorted(os.sched_getaffinity(0))


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[list[int], int]]]:
    """Binds a thread that ends after it: its CPUs, and how many threads it would start."""
    threads = torch.get_num_threads()

    def bound(cpus: str, ranks: int, named: str | None) -> tuple[list[int], int]:
        monkeypatch.delenv(VARIABLE, raising=False)
        if named is not None:
            monkeypatch.setenv(VARIABLE, named)

        def in_thread() -> tuple[list[int], int]:
            torch.set_num_threads(8)
            bind(cpus, tp_rank=0, tp_size=ranks)
            return sorted(os.sched_getaffinity(0)), torch.get_num_threads()

        with ThreadPoolExecutor(1) as executor:
            return executor.submit(in_thread).result()

    yield bound
    torch.set_num_threads(threads)


@pytest.mark.parametrize("named", [f"{CPUS[-1]}|0", None])
def test_a_rank_runs_on_the_cores_that_sglang_gave_it(bound: Any, named: str | None) -> None:
    assert bound(str(CPUS[-1]), 2, named) == ([CPUS[-1]], 1)


def test_a_single_rank_is_bound_where_cores_were_named_for_it(bound: Any) -> None:
    assert bound(str(CPUS[0]), 1, str(CPUS[0])) == ([CPUS[0]], 1)
    assert bound(str(CPUS[0]), 1, "all") == (CPUS, 8)
    for nobody in (None, ""):
        assert bound(str(CPUS[0]), 1, nobody) == bound("", 2, nobody) == (CPUS, 8)


@pytest.mark.parametrize("wrong", ["", "a", "1-", "3-1", "0-1-2", "0,,1", "-1"])
def test_cores_that_are_none_are_refused_by_name(bound: Any, wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"^{VARIABLE} {wrong!r}: name CPUs as 0-31"):
        bound(wrong, 2, f"{wrong}|0")


def test_cores_of_others_are_refused_where_named_and_left_where_not(bound: Any) -> None:
    with pytest.raises(ConfigError, match="4095: this process may use CPUs"):
        bound(f"{CPUS[0]},4095", 2, f"{CPUS[0]},4095|1")
    assert bound("4095", 2, None) == (CPUS, 8)
