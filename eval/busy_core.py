"""What decode attention loses when another process takes one of the cores.

`python -m ellm_sgl.eval.busy_core [--rounds N] [--json]` times the C++ kernels and what SGLang's
`torch_native` does, on two threads and two cores: alone, then with a busy loop pinned to one of
the cores, in turn. OpenMP's threads are as PyTorch starts them: they spin while they wait.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import click
import torch

from ellm_sgl.config.click_types import ROUNDS
from ellm_sgl.kernels import bench

CASE = bench.Case("decode", 32, 1024, 1, 16, 4, 64, "float32")
KERNELS = ("cpu", "torch_native")
SECONDS = 1.0
"""Each kernel is called again and again for so long."""


@dataclass(frozen=True)
class Fall:
    """Calls per second of every round, and how many times fewer with the busy loop."""

    alone: dict[str, list[float]]
    beside: dict[str, list[float]]
    ratio_median: dict[str, float]
    ratio_max: dict[str, float]


def measure(rounds: int) -> Fall:
    """Time both kernels in both circumstances, `rounds` times."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise click.ClickException("this needs two cores")
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(2)
    runs = bench.peers(CASE)
    alone: dict[str, list[float]] = {name: [] for name in KERNELS}
    beside: dict[str, list[float]] = {name: [] for name in KERNELS}
    for _ in range(rounds):
        for name in KERNELS:
            alone[name].append(_calls_per_second(runs[name]))
            with _busy_loop(cores[1]):
                beside[name].append(_calls_per_second(runs[name]))
    ratios = {
        name: [a / b for a, b in zip(alone[name], beside[name], strict=True)] for name in KERNELS
    }
    return Fall(
        alone,
        beside,
        {name: statistics.median(r) for name, r in ratios.items()},
        {name: max(r) for name, r in ratios.items()},
    )


def _calls_per_second(run: Any) -> float:
    run()
    begin, calls = time.perf_counter(), 0
    while (seconds := time.perf_counter() - begin) < SECONDS:
        run()
        calls += 1
    return calls / seconds


@contextlib.contextmanager
def _busy_loop(core: int) -> Iterator[None]:
    code = f"import os; os.sched_setaffinity(0, [{core}])\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        time.sleep(0.2)
        try:
            yield
        finally:
            process.kill()


@click.command()
@click.option("--rounds", type=ROUNDS, default=5, show_default=True, help="Odd, for a median.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, nothing else.")
def main(rounds: int, as_json: bool) -> None:
    """Measure what a busy process on one of two cores costs decode attention."""
    result = measure(rounds)
    if as_json:
        click.echo(json.dumps(asdict(result)))
        return
    for name in KERNELS:
        click.echo(
            f"{name}: {statistics.median(result.alone[name]):.0f} calls/s alone, "
            f"{statistics.median(result.beside[name]):.0f} beside a busy loop: "
            f"{result.ratio_median[name]:.1f} times fewer (at worst {result.ratio_max[name]:.1f})"
        )


if __name__ == "__main__":
    main()
