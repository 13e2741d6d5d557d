"""What the closed loop does while a load rises to a multiple of memory and falls again.

`python -m ellm_sgl.eval.pressure [--policy fcfs] [--peak 3] [--plot FILE] [--json]` serves the demo
model, with a host tier from which what left the device is fetched, and plots, step by step, the
uncached share r, the requests that decode b, and the step's time beside the SLO.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import Progress

from ellm_sgl.client.process import DEMO_ARGUMENTS, ServerProcess
from ellm_sgl.client.replay import Request, replay
from ellm_sgl.client.summary import Summary, summarize
from ellm_sgl.config.click_types import FACTOR, MILLISECONDS, TOKENS, TOKENS_OR_NONE

PROMPT_TOKENS, OUTPUT_TOKENS = 96, 384
CALM_S, RISE_S = 8.0, 14.0
"""Seconds of calm before and after, and of the peak between."""


@dataclass(frozen=True)
class Trace:
    """Every decode step of one run, in columns."""

    at_s: list[float]
    """Seconds of work before the step; idle time left out."""
    r: list[float]
    """Share of the batch's tokens that the step restored."""
    b: list[int]
    """Requests that decoded."""
    step_ms: list[float]
    predicted_ms: list[float]
    """What the model had expected of the step."""


@dataclass(frozen=True)
class PressureReport:
    """One run."""

    policy: str
    tpot_slo_ms: float
    device_tokens: int
    host_tokens: int
    peak: float
    """Tokens of all requests at the peak, as a multiple of the device's."""
    trace: Trace
    summary: Summary
    within_slo: float
    """Share of the decode steps that took no longer than the SLO."""
    r_final: float
    r_calm_max: float
    """Largest r before the load rose."""
    r_peak_max: float
    retractions: int
    fallbacks: dict[str, int]


def load(device_tokens: int, peak: float, seed: int) -> list[Request]:
    """Calm at a third of memory, a peak, calm again."""
    rng = random.Random(seed)
    size = PROMPT_TOKENS + OUTPUT_TOKENS
    calm = max(int(device_tokens / 3 / size), 1)
    times = [rng.uniform(0, CALM_S / 2) for _ in range(calm)]
    times += [CALM_S + rng.uniform(0, RISE_S / 4) for _ in range(int(peak * device_tokens / size))]
    times += [CALM_S + 2 * RISE_S + rng.uniform(0, CALM_S / 2) for _ in range(calm)]
    return [
        Request(
            at,
            tuple(rng.randrange(32, 127) for _ in range(PROMPT_TOKENS)),
            OUTPUT_TOKENS,
            exact=False,
        )
        for at in sorted(times)
    ]


def measure(
    policy: str, slo_ms: float, device_tokens: int, host_tokens: int, peak: float
) -> PressureReport:
    """Serve the demo model under the load and read every step back."""
    arguments = [*DEMO_ARGUMENTS, "--ellm-policy", policy, "--ellm-tpot-slo-ms", str(slo_ms),
                 "--ellm-device-kv-tokens", str(device_tokens), "--ellm-layer-group", "1",
                 "--ellm-host-kv-tokens", str(host_tokens),
                 "--disable-radix-cache"]  # fmt: skip
    requests = load(device_tokens, peak, seed=1)
    with (
        Progress(console=Console(stderr=True)) as bar,
        ServerProcess(arguments, {"OMP_NUM_THREADS": "1"}) as server,
    ):
        task = bar.add_task(f"{policy}, {peak:g} x memory", total=len(requests))
        outcomes = replay(server.url, requests, lambda done: bar.update(task, completed=done))
        steps = server.steps()
        state = server.state()
    decode = [s for s in steps if s["decode_rows"]]
    trace = _trace(decode)
    calm = [s["span_rows"] / s["decode_tokens"] for s in decode if s["decode_rows"] <= 2]
    return PressureReport(
        policy=policy,
        tpot_slo_ms=slo_ms,
        device_tokens=device_tokens,
        host_tokens=host_tokens,
        peak=peak,
        trace=trace,
        summary=summarize(outcomes),
        within_slo=float(np.mean(np.array(trace.step_ms) <= slo_ms)),
        r_final=trace.r[-1],
        r_calm_max=max(calm, default=0.0),
        r_peak_max=max(trace.r),
        retractions=state["retractions_total"],
        fallbacks=state["policy"]["fallbacks"],
    )


def _trace(steps: list[dict[str, Any]]) -> Trace:
    return Trace(
        at_s=np.cumsum([s["seconds"] for s in steps]).tolist(),
        r=[s["span_rows"] / max(s["decode_tokens"], 1) for s in steps],
        b=[int(s["decode_rows"]) for s in steps],
        step_ms=[s["seconds"] * 1e3 for s in steps],
        predicted_ms=[s["predicted_s"] * 1e3 for s in steps],
    )


def plot(report: PressureReport, file: Path) -> None:
    """Three panels over time: b, r, step time and SLO."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    top, middle, bottom = figure.subplots(3, 1, sharex=True)
    trace = report.trace
    top.step(trace.at_s, trace.b, where="post")
    top.set_ylabel("requests decoding, b")
    middle.step(trace.at_s, trace.r, where="post", color="tab:orange")
    middle.set_ylabel("uncached share, r")
    middle.set_ylim(bottom=0)
    bottom.plot(trace.at_s, trace.step_ms, ".", markersize=2, label="measured")
    bottom.plot(trace.at_s, trace.predicted_ms, linewidth=0.8, label="predicted")
    bottom.axhline(report.tpot_slo_ms, color="tab:red", linestyle="--", label="TPOT SLO")
    bottom.set(ylabel="step time, ms", xlabel="time with work to do, s")
    bottom.legend()
    figure.suptitle(
        f"{report.policy}: load up to {report.peak:g} x the {report.device_tokens:,} tokens of "
        f"device memory; {report.retractions} retractions"
    )
    figure.savefig(file, dpi=120)


@click.command()
@click.option("--policy", default="fcfs", show_default=True)
@click.option("--tpot-slo-ms", type=MILLISECONDS, default=50.0, show_default=True)
@click.option("--device-tokens", type=TOKENS, default=3072, show_default=True)
@click.option(
    "--host-tokens", type=TOKENS_OR_NONE, default=12_288, show_default=True, help="0: no host tier."
)
@click.option(
    "--peak", type=FACTOR, default=3.0, show_default=True, help="Multiple of device memory."
)
@click.option("--plot", "file", type=click.Path(path_type=Path), help="Write a PNG or SVG here.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, nothing else.")
def main(
    policy: str, tpot_slo_ms: float, device_tokens: int, host_tokens: int, peak: float,
    file: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Trace r, b and step time while a load rises and falls."""
    report = measure(policy, tpot_slo_ms, device_tokens, host_tokens, peak)
    if file is not None:
        plot(report, file)
    if as_json:
        click.echo(json.dumps(asdict(report)))
        return
    click.echo(
        f"{report.policy}: r {report.r_calm_max:.2f} in the calm, up to {report.r_peak_max:.2f} at "
        f"the peak, {report.r_final:.2f} at the end; {report.within_slo:.1%} of "
        f"{len(report.trace.r)} steps within {report.tpot_slo_ms:g} ms, TPOT p99 "
        f"{report.summary.tpot.p99 * 1e3:.0f} ms; {report.summary.tokens_per_s:.0f} tokens/s; "
        f"{report.summary.failed} failed; "
        f"{report.retractions} retractions; answers replaced: {report.fallbacks or 'none'}"
    )


if __name__ == "__main__":
    main()
