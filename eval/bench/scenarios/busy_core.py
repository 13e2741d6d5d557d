"""What a busy process on one of two cores costs decode attention.

The C++ kernels and what SGLang's `torch_native` does, on two threads and two cores: alone, then
with a busy loop pinned to one of the cores. OpenMP's threads are as PyTorch starts them: they spin
while they wait. No server.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ellm_sgl.config import ConfigError
from ellm_sgl.eval.bench.result import Column, Paired, Taken
from ellm_sgl.eval.bench.scenario import Scenario, Setting, rounds_option

CASE = ("decode", 32, 1024, 1, 16, 4, 64, "float32")
SECONDS = 1.0
"""Each kernel is called again and again for so long."""
ALONE, BESIDE = "alone", "beside a busy loop"
Calls = Mapping[str, Callable[[], Any]]


@dataclass(frozen=True)
class BusyCore(Scenario):
    rounds: int = rounds_option(5)

    against: ClassVar = {ALONE: BESIDE}
    cell_heading = "kernel"
    columns = (Column("calls/s", "calls_per_s"), Paired("times fewer beside", "calls_per_s"))

    def check(self) -> None:
        if len(os.sched_getaffinity(0)) < 2:
            raise ConfigError("busy-core needs two cores")

    def starters(self) -> dict[str, Callable[[], contextlib.AbstractContextManager[Calls]]]:
        return {"kernels": _kernels}

    def settings(self) -> list[Setting]:
        return [Setting(ALONE, "kernels", contextlib.nullcontext),
                Setting(BESIDE, "kernels", _busy_loop)]  # fmt: skip

    def cells(self) -> tuple[str, ...]:
        return ("cpu", "torch_native")

    def load(self, cell: str, seed: int) -> str:
        return cell

    def measure(self, server: Calls, setting: Setting, load: str) -> Taken:
        call, calls = server[load], 0
        with setting.value():
            call()
            begin = time.perf_counter()
            while (seconds := time.perf_counter() - begin) < SECONDS:
                call()
                calls += 1
        return Taken({"calls_per_s": calls / seconds})


def _kernels() -> contextlib.AbstractContextManager[Calls]:
    """This process, and its kernels, are on two cores from now on."""
    import torch

    from ellm_sgl.kernels import bench

    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    torch.set_num_threads(2)
    case = bench.Case(*CASE)
    return contextlib.nullcontext(bench.peers(case, bench.step_of(case)))


@contextlib.contextmanager
def _busy_loop() -> Iterator[None]:
    core = max(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, [{core}])\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            time.sleep(0.2)
            yield
        finally:
            process.kill()
