"""`ellm-sgl advise`: what to set for a model on a device, with the reasons."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ellm_sgl.client.process import DEMO_MODEL, ServerError, ServerProcess, stop_on_signals
from ellm_sgl.config.click_types import MILLISECONDS, TOKENS
from ellm_sgl.config.commands import (
    FILE,
    answer,
    json_flag,
    model_path_option,
    plain_table,
    progress_lines,
    told_in_a_line,
)

if TYPE_CHECKING:
    from ellm_sgl.eval.advice import Advice, Point, Shapes
    from ellm_sgl.eval.simulator import Machine

HERE = "here"


@click.command()
@model_path_option
@click.option(
    "--device",
    metavar="NAME|FILE|here",
    default=HERE,
    help="a100-80g, h100-80g, l4, rtx-4090, rtx-5090, a JSON file, or this machine, measured by a "
    "server that is started for it.",
)
@click.option(
    "--ranks",
    type=click.IntRange(1, 1024),
    default=1,
    help="Of a named device: tensor parallelism.",
)
@click.option("--kv-tokens", type=TOKENS, help="Device KV tokens.  [default: what fits]")
@click.option("--host-tokens", type=TOKENS, help="Host KV tokens, at most.  [default: no bound]")
@click.option("--prompt-tokens", type=TOKENS, default=512, help="Of a request.")
@click.option("--output-tokens", type=TOKENS, default=256, help="Of a request.")
@click.option("--tpot-slo-ms", type=MILLISECONDS, help="No step may be longer.")
@click.option("--plot", type=FILE, help="Simulated tokens/s over memory, as PNG, SVG or PDF.")
@json_flag
def advise(
    model_path: str | None,
    device: str,
    ranks: int,
    kv_tokens: int | None,
    host_tokens: int | None,
    prompt_tokens: int,
    output_tokens: int,
    tpot_slo_ms: float | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """What share of KV a step can restore on a device, which way pays, and what to set.

    By the latency model, for requests that are all alike; `ellm-sgl simulate` takes a load.
    """
    from ellm_sgl.eval.advice import Shapes
    from ellm_sgl.eval.advice import advise as find
    from ellm_sgl.eval.plotting import check_plot_file

    with told_in_a_line(ServerError, ValueError, OSError):
        if plot is not None:
            check_plot_file(plot)
        path = Path(model_path or DEMO_MODEL)
        machine = _here(path) if device == HERE else _named(path, device, ranks)
        machine = machine.limited(kv_tokens, host_tokens)
        shapes = Shapes(prompt_tokens, output_tokens)
        slo = {} if tpot_slo_ms is None else {"tpot_slo_s": tpot_slo_ms / 1e3}
        advice = find(machine, shapes, **slo)
        points = [] if plot is None else _plot(plot, machine, shapes)
    document = asdict(advice) | {"plot": [asdict(point) for point in points]}
    answer(as_json, document, _ways(advice), _settings(advice))


def _named(path: Path, device: str, ranks: int) -> Machine:
    from ellm_sgl.eval.simulator import machines

    found = machines.device_named(device)
    model = machines.read_unquantised(path / "config.json")
    return machines.assemble(model, found, ranks, f"{path.name} on {device}")


def _here(path: Path) -> Machine:
    """This machine, as a server on it measures it, and what it has room for."""
    from ellm_sgl.eval.simulator import Machine, machines
    from ellm_sgl.latency import HardwareProfile

    shape = machines.read_unquantised(path / "config.json")
    dtype = "float32" if shape.kv_bytes == 4 else "auto"
    progress_lines("starting a server, which measures this machine")
    arguments = ["--model-path", str(path), "--dtype", dtype, "--skip-tokenizer-init"]
    arguments += ["--ellm-policy", "fixed-ratio"]
    with stop_on_signals(), ServerProcess(arguments) as server:
        state = server.state()
    profile = HardwareProfile(**state["hardware"])
    tokens = state["resize"]["start_tokens"]
    machine = Machine(f"{path.name} on {profile.name}", shape, profile, tokens)
    left = state["bytes"]["left"]
    host_tokens = None if left is None else machine.host_tokens_in(max(left, 0))
    return machine.limited(None, host_tokens)


def _plot(file: Path, machine: Machine, shapes: Shapes) -> list[Point]:
    from ellm_sgl.eval.advice import PLOTTED, POINTS, over_memory
    from ellm_sgl.eval.plotting import new_figure

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("simulating", total=len(POINTS) * len(PLOTTED))
        points = over_memory(machine, shapes, lambda done: bar.update(task, completed=done))
    figure = new_figure(figsize=(6, 4))
    axes = figure.subplots()
    for mode in PLOTTED:
        own = [point for point in points if point.mode == mode]
        label = "eLLM" if mode == "ellm" else f"whole requests, {mode}"
        axes.plot([p.kv_tokens for p in own], [p.tokens_per_s for p in own], "o-", label=label)
    axes.set(
        xlabel="tokens of KV on the device", ylabel="output tokens/s (simulated)", ylim=(0, None)
    )
    axes.set_title(machine.name)
    axes.legend()
    figure.savefig(file)
    progress_lines(f"written: {file}")
    return points


def _ways(advice: Advice) -> Table:
    from ellm_sgl.eval.advice import BUDGET, WAYS

    table = plain_table(
        "missing KV: a way back",
        ("tokens", "of the KV", "best r", "tokens/s", "step ms"),
        title=f"{advice.machine}: {advice.kv_tokens:,} KV tokens of "
        f"{advice.kv_bytes_per_token / 1024:,.0f} KiB, {advice.requests} requests at once, "
        f"{advice.step_s * 1e3:.1f} ms a step",
        caption=f"tokens: restored by one step that takes {BUDGET:.0%} longer; best r: the "
        "uncached share with most tokens/s, as a multiple of r = 0, and its step; -: none keeps "
        "the SLO",
    )
    for way in advice.ways:
        table.add_row(
            WAYS[way.name],
            f"{way.tokens:,}",
            f"{way.share:.1%}",
            *((f"{way.ratio:.2f}", f"{way.gain:.2f}") if way.gain else ("-", "-")),
            f"{way.step_s * 1e3:.1f}",
        )
    return table


def _settings(advice: Advice) -> Table:
    table = Table("set", "to", "because", box=box.SIMPLE, pad_edge=False)
    for each in advice.settings:
        table.add_row(each.flag, each.value, each.reason)
    return table
