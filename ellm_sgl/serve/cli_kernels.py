"""`ellm-sgl kernels`: build the C++ attention kernels; measure these, or a CUDA device's."""

from __future__ import annotations

import json
import os
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from ellm_sgl.config.click_types import ROUNDS
from ellm_sgl.serve.cli_shared import json_flag, told_in_a_line


@click.group()
def kernels() -> None:
    """Build and measure the C++ attention kernels."""


@kernels.command()
def build() -> None:
    """Compile the kernels where the package lies: for a plain checkout, or after an update."""
    from ellm_sgl.kernels.cpu.build import FOLDER, LIBRARY, BuildError
    from ellm_sgl.kernels.cpu.build import build as compile_kernels

    with told_in_a_line(BuildError, OSError):
        compile_kernels(FOLDER / LIBRARY)
    click.echo(FOLDER / LIBRARY)


@kernels.command()
@click.option("--rounds", type=ROUNDS, default=9, help="Odd, for a median.")
@click.option("--threads", type=click.IntRange(1, 4096), help="CPU only.  [default: PyTorch's]")
@click.option(
    "--largest-context",
    type=click.IntRange(1, 2**24),
    default=65536,
    help="CPU only. From 32768 on, doubled.",
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu")
@json_flag
def bench(
    rounds: int, threads: int | None, largest_context: int, device: str, as_json: bool
) -> None:
    """Time the kernels against PyTorch's (on CUDA: FlashInfer's) and the machine's limits.

    `read` and `mul.`: share of the machine's read bandwidth and of its matrix-product rate (fp32
    on the CPU; copy bandwidth and bf16 on CUDA).
    """
    if device == "cuda":
        _bench_cuda(rounds, as_json)
        return
    from ellm_sgl.client.process import SERVER_ENVIRONMENT

    for name, value in SERVER_ENVIRONMENT.items():  # before PyTorch reads it: as servers run
        os.environ.setdefault(name, value)
    import torch

    from ellm_sgl.kernels import bench as benchmark
    from ellm_sgl.kernels.cpu.attention import instruction_set_for
    from ellm_sgl.kernels.cpu.library import load

    if problem := load().problem:
        raise click.ClickException(f"C++ kernels: {problem}")
    if threads is not None:
        torch.set_num_threads(threads)
    limits = benchmark.machine_limits(rounds)
    results = []
    for case in benchmark.cases(largest_context):
        click.echo(f"{case}", err=True)
        results.append(benchmark.measure(case, rounds))
    if as_json:
        document = {
            "instruction_set": instruction_set_for(64)[1],
            "threads": torch.get_num_threads(),
            "machine": limits,
            "results": [result.to_json() for result in results],
        }
        click.echo(json.dumps(document))
        return
    Console().print(_table(results))
    line = ", ".join(f"{name} {value:.0f}" for name, value in limits.items())
    Console().print(f"machine (GB/s, GFLOP/s): {line}; {torch.get_num_threads()} threads")


def _bench_cuda(rounds: int, as_json: bool) -> None:
    import torch

    from ellm_sgl.kernels.experimental import bench_gpu as benchmark

    if not torch.cuda.is_available():
        raise click.ClickException("--device cuda: there is no CUDA device; leave it out")
    limits = benchmark.limits()
    results = []
    for case in benchmark.cases():
        click.echo(f"{case}", err=True)
        results.append(benchmark.measure(case, rounds, limits))
    if as_json:
        found = [result.to_json() for result in results]
        name = torch.cuda.get_device_name()
        click.echo(json.dumps({"device": name, "machine": limits, "results": found}))
        return
    table = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    for heading in ("batch×context", "r", "heads/kv", "ms", "δ", "read", "mul.", "times faster"):
        table.add_column(heading, no_wrap=True)
    for result in results:
        case = result.case
        table.add_row(
            f"{case.batch}×{case.context}", f"{case.missing:g}", f"{case.heads}/{case.kv_heads}",
            f"{result.milliseconds[f'fused {result.best_delta}']:.3f}", str(result.best_delta),
            f"{result.read_share:.0%}", f"{result.multiply_share:.0%}",
            "\n".join(f"{name} {ratio:.2f}" for name, ratio in result.ratio.items()),
        )  # fmt: skip
    Console().print(table)
    Console().print(", ".join(f"{name} {value:.0f}" for name, value in limits.items()))


def _table(results: list[Any]) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    for heading in ("case", "batch×context", "heads/kv/size", "ms", "read", "mul."):
        table.add_column(heading, no_wrap=True)
    table.add_column("times faster than")
    for result in results:
        case = result.case
        table.add_row(
            case.name,
            f"{case.batch}×{case.context}",
            f"{case.heads}/{case.kv_heads}/{case.head_dim} {case.dtype[0]}{case.dtype[-2:]}",
            f"{result.milliseconds['cpu']:.2f}",
            f"{result.read_share:.0%}",
            f"{result.multiply_share:.0%}",
            "\n".join(f"{name} {ratio:.1f}" for name, ratio in result.ratio.items()),
        )
    return table
