"""The simulator against a real server: what it predicts beside what is measured, on this machine.

`python -m ellm_sgl.eval.validate [--model-path DIR] [--only N] [--json]` serves a model (the demo
model unless told otherwise) with eLLM. Loads of their own teach the simulator the machine: the
hardware profile is fitted to the steps that the server reports. Then each configuration of load,
memory and policy is replayed and simulated. About 10 minutes for all 14; nothing else should run.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import httpx
from rich import box
from rich.console import Console
from rich.table import Table

from ellm_sgl.config import ConfigError
from ellm_sgl.eval.replay import replay
from ellm_sgl.eval.simulator import Load, Machine, Settings, simulate
from ellm_sgl.eval.simulator.machines import read_model
from ellm_sgl.eval.summary import Summary, summarize
from ellm_sgl.eval.traces import Trace
from ellm_sgl.eval.workloads import paper_workload, to_requests
from ellm_sgl.latency import HardwareProfile, StepWork
from ellm_sgl.latency.fit import fit_profile
from ellm_sgl.serve.process import DEMO_MODEL, ServerError, ServerProcess

POOL_TOKENS = 16_000
MAX_RUNNING, CHUNK_TOKENS, LAYER_GROUP = 48, 1024, 4
REQUESTS = 50
SHORTER = 0.12
"""ShareGPT's lengths times this: about 27 tokens in and 160 out."""
MEASURES: dict[str, Callable[[Summary], float]] = {
    "tokens_per_s": lambda s: s.tokens_per_s,
    "ttft": lambda s: s.ttft.mean,
    "tpot": lambda s: s.tpot.mean,
}

Say = Callable[[str], None]


@dataclass(frozen=True)
class Configuration:
    """One thing to predict."""

    policy: str
    device_tokens: int
    per_second: float
    ratio: float | None = None
    """Of the policy fixed-ratio."""

    @property
    def options(self) -> dict[str, float]:
        return {} if self.ratio is None else {"ratio": self.ratio}

    def __str__(self) -> str:
        name = self.policy if self.ratio is None else f"{self.policy} {self.ratio:g}"
        return f"{name}, {self.device_tokens:,} tokens, {self.per_second:g}/s"

    def trace(self, seed: int) -> Trace:
        return paper_workload("sharegpt", REQUESTS, seed, self.per_second).scaled(lengths=SHORTER)


CONFIGURATIONS = (
    *(
        Configuration(policy, tokens, rate)
        for tokens, rate, policy in itertools.product(
            (2000, 4000, POOL_TOKENS), (3.0, 20.0), ("stock", "fcfs")
        )
    ),
    Configuration("fixed-ratio", 4000, 20.0, 0.25),
    Configuration("slo-priority", 2000, 20.0),
)
TEACHING = (
    Configuration("stock", POOL_TOKENS, 20.0),
    Configuration("stock", 1500, 20.0),
    Configuration("fixed-ratio", 4000, 5.0, 0.25),
)
"""Loads that the machine's profile is fitted to."""


@dataclass(frozen=True)
class Comparison:
    """One configuration. Keys are those of `MEASURES`; seconds, or tokens per second."""

    configuration: Configuration
    measured: dict[str, float]
    predicted: dict[str, float]

    def errors(self) -> dict[str, float]:
        """|predicted - measured| / measured."""
        return {n: abs(self.predicted[n] / m - 1) for n, m in self.measured.items()}


@dataclass(frozen=True)
class Validation:
    """All of them."""

    model_path: str
    hardware: HardwareProfile
    latency_model: float
    """MAPE of the fitted latency model over the steps it was fitted to."""
    comparisons: Sequence[Comparison]

    @property
    def mape(self) -> dict[str, float]:
        errors = [c.errors() for c in self.comparisons]
        means = {name: statistics.fmean(e[name] for e in errors) for name in MEASURES}
        return means | {"latency_model": self.latency_model}

    def rankings(self) -> tuple[int, int]:
        """Of all pairs of policies under one load and memory: how many the simulator ranks as
        measured, by tokens per second, and how many there are."""
        right = pairs = 0
        for one, two in itertools.combinations(self.comparisons, 2):
            a, b = one.configuration, two.configuration
            if (a.device_tokens, a.per_second) == (b.device_tokens, b.per_second):
                pairs += 1
                measured = one.measured["tokens_per_s"] - two.measured["tokens_per_s"]
                predicted = one.predicted["tokens_per_s"] - two.predicted["tokens_per_s"]
                right += measured * predicted >= 0
        return right, pairs

    def to_json(self) -> dict[str, Any]:
        right, pairs = self.rankings()
        return {
            "model_path": self.model_path,
            "hardware": dataclasses.asdict(self.hardware),
            "mape": self.mape,
            "rankings_right": right,
            "rankings": pairs,
            "configurations": [dataclasses.asdict(c) for c in self.comparisons],
        }


def validate(model_path: Path, configurations: Sequence[Configuration], say: Say) -> Validation:
    """Serve, teach, replay and predict.

    Raises:
        ServerError: the server did not start.
        ConfigError: the model's configuration cannot be read.
    """
    shape = dataclasses.replace(read_model(model_path / "config.json"), weight_bytes=4, kv_bytes=4)
    say("starting a server")
    with ServerProcess(_arguments(model_path), {"OMP_NUM_THREADS": "1"}) as server:
        measured_steps = list(_teach(server, say))
        guess = HardwareProfile(**server.state()["hardware"])
        profile = fit_profile(shape, guess, measured_steps)
        machine = Machine(str(model_path), shape, profile, POOL_TOKENS, host_tokens=0)
        comparisons = [_compare(server, machine, c, say) for c in configurations]
    return Validation(str(model_path), profile, _error(machine, measured_steps), comparisons)


def _arguments(model_path: Path) -> list[str]:
    return [
        "--model-path", str(model_path), "--dtype", "float32", "--skip-tokenizer-init",
        "--ellm-policy", "stock", "--ellm-device-kv-tokens", str(POOL_TOKENS),
        "--ellm-layer-group", str(LAYER_GROUP), "--max-running-requests", str(MAX_RUNNING),
        "--chunked-prefill-size", str(CHUNK_TOKENS), "--random-seed", "1",
    ]  # fmt: skip


def _teach(server: ServerProcess, say: Say) -> Iterator[tuple[StepWork, float]]:
    """Steps of the teaching loads, with their times."""
    for configuration in TEACHING:
        say(f"learning the machine: {configuration}")
        _measure(server, configuration, seed=100)
        answer = httpx.get(f"{server.url}/ellm/steps", timeout=60, trust_env=False)
        fields = [f.name for f in dataclasses.fields(StepWork)]
        for step in answer.raise_for_status().json()[-1000:]:
            yield StepWork(**{name: step[name] for name in fields}), step["seconds"]


def _measure(server: ServerProcess, configuration: Configuration, seed: int) -> Summary:
    """A replay against the server in this configuration."""
    server.flush_cache()
    body = {"name": configuration.policy, "options": configuration.options}
    httpx.post(f"{server.url}/ellm/policy", json=body, timeout=60, trust_env=False)
    server.adjust(ellm_device_kv_tokens=configuration.device_tokens)
    summary = summarize(replay(server.url, to_requests(configuration.trace(seed), seed)))
    if not server.alive() or summary.failed:
        raise ServerError(
            f"{configuration}: {summary.failed} of {summary.requests} requests failed\n"
            f"{server.last_words()}"
        )
    return summary


def _predict(machine: Machine, configuration: Configuration, seed: int) -> Summary:
    settings = Settings(
        policy=configuration.policy,
        policy_options=configuration.options,
        restore="recompute",
        layer_group=LAYER_GROUP,
        max_running=MAX_RUNNING,
        chunk_tokens=CHUNK_TOKENS,
        stride=1,
    )
    limited = machine.limited(configuration.device_tokens, None)
    return simulate(limited, settings, Load.of(configuration.trace(seed))).summary


def _compare(
    server: ServerProcess, machine: Machine, configuration: Configuration, say: Say
) -> Comparison:
    say(str(configuration))
    measured = _measure(server, configuration, seed=0)
    predicted = _predict(machine, configuration, seed=0)
    return Comparison(
        configuration,
        {name: value(measured) for name, value in MEASURES.items()},
        {name: value(predicted) for name, value in MEASURES.items()},
    )


def _error(machine: Machine, steps: Sequence[tuple[StepWork, float]]) -> float:
    from ellm_sgl.latency import RooflineLatencyModel

    model = RooflineLatencyModel(machine.shape, machine.profile)
    return statistics.fmean(abs(float(model.step_seconds(w)) / s - 1) for w, s in steps)


def _table(validation: Validation) -> Table:
    table = Table(
        "configuration", box=box.SIMPLE, pad_edge=False,
        title="measured / predicted on this machine",
    )  # fmt: skip
    for heading in ("tokens/s", "mean TTFT ms", "mean TPOT ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    for c in validation.comparisons:
        m, p = c.measured, c.predicted
        table.add_row(
            str(c.configuration),
            f"{m['tokens_per_s']:.0f} / {p['tokens_per_s']:.0f}",
            *(f"{m[n] * 1e3:.0f} / {p[n] * 1e3:.0f}" for n in ("ttft", "tpot")),
        )
    table.add_row("MAPE", *(f"{validation.mape[name]:.1%}" for name in MEASURES))
    return table


@click.command()
@click.option("--model-path", type=click.Path(path_type=Path, exists=True), default=DEMO_MODEL)
@click.option("--only", type=click.IntRange(1), help="The first so many configurations.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, nothing else.")
def main(model_path: Path, only: int | None, as_json: bool) -> None:
    """Hold the simulator's predictions against a real server."""
    err = Console(stderr=True)
    try:
        found = validate(
            model_path, CONFIGURATIONS[:only], lambda line: err.print(f"[dim]{line}[/dim]")
        )
    except (ServerError, ConfigError) as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        click.echo(json.dumps(found.to_json()))
        return
    Console().print(_table(found))
    right, pairs = found.rankings()
    click.echo(f"rankings by tokens/s as measured: {right} of {pairs}")


if __name__ == "__main__":
    main()
