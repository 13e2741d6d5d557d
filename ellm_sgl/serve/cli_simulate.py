"""`ellm-sgl simulate`: a load on a machine that is not at hand, under eLLM and the baselines."""

from __future__ import annotations

import math
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from click.core import ParameterSource
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ellm_sgl.client import workloads
from ellm_sgl.client.traces import Trace, read_azure, read_lengths
from ellm_sgl.config import LATENCY_MODELS
from ellm_sgl.config.click_types import (
    FACTOR,
    MILLISECONDS,
    PER_SECOND,
    REQUESTS,
    SEED,
    TOKENS,
    TOKENS_OR_NONE,
)
from ellm_sgl.config.commands import (
    FILE,
    answer,
    json_flag,
    plain_table,
    policy_options,
    told_in_a_line,
)

if TYPE_CHECKING:
    from ellm_sgl.eval.simulator import Machine, SimReport

BASELINES = ("recompute", "swap", "hcache")
ADMISSIONS = ("sglang", "vllm", "paper")


def _read_baselines(_: click.Context, __: click.Parameter, text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name and name != "none")
    if unknown := [name for name in names if name not in BASELINES]:
        raise click.BadParameter(f"{', '.join(unknown)}: give some of {', '.join(BASELINES)}")
    return names


@click.command()
@click.option(
    "--preset",
    "preset_name",
    metavar="NAME",
    default="llama2-13b",
    help="llama2-13b (A100-80G), llama2-70b (4 x A100-80G), llama2-70b-pcie (no NVLink) or "
    "llama3-8b (L4).",
)
@click.option("--config", type=FILE, help="A Hugging Face config.json, instead of a preset.")
@click.option(
    "--device",
    metavar="NAME|FILE",
    default="a100-80g",
    help="With --config: a100-80g, h100-80g, l4, rtx-4090, rtx-5090, or a JSON file.",
)
@click.option(
    "--ranks", type=click.IntRange(1, 1024), default=1, help="With --config: tensor parallelism."
)
@click.option("--kv-tokens", type=TOKENS, help="Device KV tokens.  [default: what fits]")
@click.option("--host-tokens", type=TOKENS_OR_NONE, help="Host KV tokens.  [default: no bound]")
@click.option("--policy", default="fcfs")
@policy_options("Passed to the policy's constructor.")
@click.option(
    "--restore",
    type=click.Choice(["recompute", "swap", "both"]),
    default="both",
    help="How eLLM brings missing KV back.",
)
@click.option(
    "--baselines",
    default=",".join(BASELINES),
    callback=_read_baselines,
    help="Whole-request servers beside it; or 'none'.",
)
@click.option(
    "--latency-model",
    type=click.Choice(LATENCY_MODELS),
    default="roofline",
    help="What the device does; 'paper' counts FLOPs only.",
)
@click.option(
    "--lengths",
    metavar="NAME|FILE",
    default="sharegpt",
    help="sharegpt, l-eval, or a CSV file with prompt_tokens,output_tokens.",
)
@click.option("--trace", type=FILE, help="Arrivals and lengths from an Azure-format CSV file.")
@click.option("--requests", default=300, type=REQUESTS, help="How many; of a trace, the first.")
@click.option(
    "--rate",
    type=PER_SECOND,
    help="Requests per second, Gamma gaps.  [default: the paper's 50; of l-eval, 12.5]",
)
@click.option("--scale-rate", type=FACTOR, default=1.0, help="Multiply the arrival rate.")
@click.option("--scale-lengths", type=FACTOR, default=1.0, help="Multiply all lengths.")
@click.option(
    "--max-new-tokens",
    type=TOKENS,
    help="What requests say they may generate.  [default: what they will]",
)
@click.option("--tpot-slo-ms", type=MILLISECONDS)
@click.option("--ttft-slo-ms", type=MILLISECONDS)
@click.option("--max-running", default=256, type=click.IntRange(1, 10**6))
@click.option(
    "--conservativeness", type=FACTOR, default=1.0, help="SGLang's --schedule-conservativeness."
)
@click.option(
    "--admission",
    type=click.Choice(ADMISSIONS),
    default="sglang",
    help="How the baselines admit: as SGLang; as vLLM; 'paper': as vLLM, within the TPOT SLO.",
)
@click.option(
    "--stride",
    default=8,
    type=click.IntRange(1, 10**6),
    help="Decode steps per decision, at most; 1 is a server's.",
)
@click.option(
    "--host-scaling", is_flag=True, help="eLLM counts on as much of host memory as SLOs allow."
)
@click.option("--seed", type=SEED, default=0)
@json_flag
def simulate(
    as_json: bool,
    policy: str,
    options: dict[str, Any],
    restore: str,
    baselines: tuple[str, ...],
    **given: Any,
) -> None:
    """Run a load through the server's own policies, page table and control loop, with a latency
    model for the device. Deterministic by --seed.
    """
    # The simulator imports PyTorch, which takes seconds.
    from ellm_sgl.eval.simulator import Load, Settings
    from ellm_sgl.eval.simulator import simulate as run

    _refuse_idle()
    with told_in_a_line(ValueError):
        machine, trace = _machine(given), _trace(given)
        slo, ttft_slo = _seconds(given["tpot_slo_ms"]), _seconds(given["ttft_slo_ms"])
        load = Load.of(trace, given["max_new_tokens"], slo, ttft_slo)
        shared = {
            name: given[name]
            for name in ("latency_model", "max_running", "conservativeness", "stride")
        }
        settings = [
            Settings(
                "ellm",
                policy,
                options,
                restore,
                tpot_slo_s=slo,
                host_scaling=given["host_scaling"],
                **shared,
            ),
            *(Settings(mode, admission=given["admission"], **shared) for mode in baselines),
        ]
        reports = []
        with Progress(console=Console(stderr=True), transient=True) as bar:
            for each in settings:
                task = bar.add_task(each.mode, total=len(load))
                # Called at every step: only a number that has changed is shown.
                tick = lru_cache(maxsize=1)(lambda n, task=task: bar.update(task, completed=n))
                reports.append(run(machine, each, load, tick))
    document = {
        "machine": asdict(machine),
        "requests": len(load),
        "reports": [asdict(report) for report in reports],
    }
    answer(as_json, document, _table(machine, reports))


def _refuse_idle() -> None:
    """Options on the command line that would change nothing, because of what else is there."""
    ctx = click.get_current_context()

    def said(name: str) -> bool:
        return ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE

    no_config = ctx.params["config"] is None
    for names, when, why in (
        (("rate", "lengths", "seed"), said("trace"), "with --trace, which has all that"),
        (("preset_name",), said("config"), "with --config, which is in its place"),
        (("device", "ranks"), no_config, "without --config: presets have theirs"),
    ):
        if when and (idle := [f"--{name.removesuffix('_name')}" for name in names if said(name)]):
            raise click.UsageError(f"{', '.join(idle)} changes nothing {why}; leave it out")


def _machine(given: dict[str, Any]) -> Machine:
    from ellm_sgl.eval.simulator import machines

    if given["config"] is None:
        machine = machines.preset(given["preset_name"])
    else:
        device = machines.device_named(given["device"])
        model = machines.read_unquantised(given["config"])
        machine = machines.assemble(model, device, given["ranks"], str(given["config"]))
    return machine.limited(given["kv_tokens"], given["host_tokens"])


def _trace(given: dict[str, Any]) -> Trace:
    if given["trace"] is not None:
        trace = read_azure(given["trace"]).first(given["requests"])
    elif given["lengths"] in workloads.LENGTHS:
        trace = workloads.paper_workload(
            given["lengths"], given["requests"], given["seed"], given["rate"]
        )
    else:
        rng = np.random.default_rng(given["seed"])
        rate = given["rate"] or workloads.PAPER_RATES["sharegpt"]
        times = workloads.gamma_arrivals(given["requests"], rate, rng)
        trace = workloads.sampled(read_lengths(Path(given["lengths"])), times, rng)
    return trace.scaled(given["scale_rate"], given["scale_lengths"])


def _seconds(milliseconds: float | None) -> float:
    return math.inf if milliseconds is None else milliseconds / 1e3


def _table(machine: Machine, reports: list[SimReport]) -> Table:
    table = plain_table(
        "mode",
        ("tok/s", "steady", "in SLO", "TTFT s", "TPOT ms", "SLO", "running", "r", "retr.", "ref."),
        collapse_padding=True,
        title=f"{machine.name}: {machine.kv_tokens:,} KV tokens, "
        f"{reports[0].summary.requests:,} requests (simulated)",
        caption="tokens/s in all, while requests wait, and of requests within the TPOT SLO; "
        "mean/p99; SLO: share of requests within both; r: uncached share; "
        "retr.: lost their place; ref.: larger than the device",
    )
    for report in reports:
        s = report.summary
        table.add_row(
            report.settings.mode,
            f"{s.tokens_per_s:,.0f}",
            f"{s.steady_tokens_per_s:,.0f}",
            f"{s.slo_tokens_per_s:,.0f}",
            f"{s.ttft.mean:.1f}/{s.ttft.p99:.1f}",
            f"{s.tpot.mean * 1e3:.1f}/{s.tpot.p99 * 1e3:.1f}",
            f"{s.slo_attainment:.0%}",
            f"{report.running_mean:.1f}",
            f"{report.uncached_share:.1%}",
            str(report.retractions),
            str(report.refused),
        )
    return table
