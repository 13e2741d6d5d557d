"""`ellm-sgl kernels`: build the C++ kernels; measure these, or a CUDA device's."""

from __future__ import annotations

import os
from typing import Any

import click
from rich import box
from rich.table import Table

from ellm_sgl.client.process import SERVER_ENVIRONMENT
from ellm_sgl.config.click_types import ROUNDS
from ellm_sgl.config.commands import answer, json_flag, told_in_a_line


@click.group()
def kernels() -> None:
    """Build and measure the C++ kernels."""


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
    for name, value in SERVER_ENVIRONMENT.items():  # before PyTorch reads it: as servers run
        os.environ.setdefault(name, value)
    import torch

    from ellm_sgl.kernels import bench as benchmark
    from ellm_sgl.kernels import bench_operators, bench_products
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
    table = _table(
        "case", "batch×context", "heads/kv/size", "ms", "read", "mul.", "prefetch",
        "times faster than",
    )  # fmt: skip
    for result in results:
        case, ms = result.case, result.milliseconds["cpu"]
        size = f"{case.heads}/{case.kv_heads}/{case.head_dim} {case.dtype[0]}{case.dtype[-2:]}"
        read, multiply, faster = _shares(result, 1)
        table.add_row(
            case.name, f"{case.batch}×{case.context}", size, f"{ms:.2f}", read, multiply,
            result.prefetch, faster,
        )  # fmt: skip
    products = []
    for product in bench_products.cases():
        click.echo(f"{product}", err=True)
        products.append(bench_products.measure(product, rounds))
    operators = []
    for operator in bench_operators.cases():
        click.echo(f"{operator}", err=True)
        operators.append(bench_operators.measure(operator, rounds))
    document = {
        "instruction_set": instruction_set_for(64)[1],
        "threads": torch.get_num_threads(),
        "machine": limits,
        "results": [result.to_json() for result in results],
        "products": [product.to_json() for product in products],
        "operators": [operator.to_json() for operator in operators],
    }
    line = f"machine (GB/s, GFLOP/s): {_line(limits)}; {torch.get_num_threads()} threads"
    answer(as_json, document, table, _product_table(products), _operator_table(operators), line)


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
    table = _table("batch×context", "r", "heads/kv", "ms", "δ", "read", "mul.", "times faster")
    for result in results:
        case, delta = result.case, result.best_delta
        step = f"{case.batch}×{case.context}", f"{case.missing:g}", f"{case.heads}/{case.kv_heads}"
        ms = f"{result.milliseconds[f'fused {delta}']:.3f}"
        table.add_row(*step, ms, str(delta), *_shares(result, 2))
    document = {
        "device": torch.cuda.get_device_name(),
        "machine": limits,
        "results": [result.to_json() for result in results],
    }
    answer(as_json, document, table, _line(limits))


def _product_table(products: list[Any]) -> Table:
    table = _table("product: rows", "weight", "ms", "read", "times faster than")
    for result in products:
        case = result.case
        ratios = ", ".join(f"{name} {ratio:.1f}" for name, ratio in result.ratio.items())
        weight = f"{case.outputs}×{case.size} {case.dtype[0]}{case.dtype[-2:]}"
        ms = f"{result.milliseconds['cpu']:.3f}"
        table.add_row(str(case.rows), weight, ms, f"{result.read_share:.0%}", ratios)
    return table


def _operator_table(operators: list[Any]) -> Table:
    table = _table("operator: rows", "size", "µs", "times faster than PyTorch's")
    for result in operators:
        case = result.case
        size = f"{case.size} {case.dtype[0]}{case.dtype[-2:]}"
        microseconds = f"{result.microseconds['cpu']:.1f}"
        table.add_row(f"{case.name} {case.rows}", size, microseconds, f"{result.ratio:.1f}")
    return table


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    for heading in headings:
        table.add_column(heading, no_wrap=heading != headings[-1])
    return table


def _shares(result: Any, digits: int) -> tuple[str, str, str]:
    """Shares of the machine's limits, and the times faster than each peer."""
    ratios = (f"{name} {ratio:.{digits}f}" for name, ratio in result.ratio.items())
    return f"{result.read_share:.0%}", f"{result.multiply_share:.0%}", "\n".join(ratios)


def _line(limits: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.0f}" for name, value in limits.items())
