"""What eLLM costs when it is off or has nothing to do, and what the C++ kernels gain.

`python -m ellm_sgl.eval.overhead [--rounds N] [--json]` runs four servers on the demo model side
by side and loads one at a time, in turn, so that a machine whose speed drifts hits all alike:

- `stock`: SGLang with only the CPU platform loaded,
- `off`: the plugin loaded, eLLM not enabled, SGLang's attention as in `stock`,
- `off, ellm_cpu`: same, with the C++ kernels, as is the default,
- `r = 0`: eLLM enabled, everything fits.

Idle servers sleep. The ratio of a round compares neighbours in time, a second or two apart; the
median of many short rounds is what counts.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import click
from rich.console import Console

from ellm_sgl.client.process import DEMO_ARGUMENTS, ServerProcess
from ellm_sgl.config.click_types import REQUESTS, ROUNDS, TOKENS
from ellm_sgl.serve.verify import generate

POOL_TOKENS = "40000"
SERVERS: dict[str, tuple[list[str], dict[str, str]]] = {
    "stock": (["--max-total-tokens", POOL_TOKENS], {"SGLANG_PLUGINS": "ellm_cpu"}),
    "off": (["--max-total-tokens", POOL_TOKENS, "--attention-backend", "torch_native"], {}),
    "off, ellm_cpu": (["--max-total-tokens", POOL_TOKENS], {}),
    "r = 0": (["--ellm-policy", "fixed-ratio", "--ellm-device-kv-tokens", POOL_TOKENS], {}),
}
AGAINST = {"off": "stock", "off, ellm_cpu": "off", "r = 0": "off, ellm_cpu"}
"""What each is compared with."""


@dataclass(frozen=True)
class Load:
    """Requests of one size, sent at once."""

    requests: int = 24
    prompt_tokens: int = 128
    output_tokens: int = 96


@dataclass(frozen=True)
class Overhead:
    """Output tokens per second of every round, and ratios (see `AGAINST`) of the same round."""

    tokens_per_second: dict[str, list[float]]
    ratio_median: dict[str, float]
    ratio_min: dict[str, float]
    ratio_max: dict[str, float]


def measure(load: Load, names: Sequence[str], rounds: int, console: Console) -> Overhead:
    """Run the servers called `names` and load them in turn."""
    rng = random.Random(0)
    speeds: dict[str, list[float]] = {name: [] for name in SERVERS if name in names}
    with contextlib.ExitStack() as stack:
        servers = {
            name: stack.enter_context(
                ServerProcess([*DEMO_ARGUMENTS, *arguments], {"OMP_NUM_THREADS": "1", **variables})
            )
            for name, (arguments, variables) in SERVERS.items()
            if name in names
        }
        for turn in range(rounds + 1):
            prompts = [
                [rng.randrange(32, 127) for _ in range(load.prompt_tokens)]
                for _ in range(load.requests)
            ]
            # Reverse every other round: whoever comes second is second only half of the time.
            for name in list(servers)[:: -1 if turn % 2 else 1]:
                begin = time.perf_counter()
                outputs = generate(servers[name].url, prompts, load.output_tokens)
                seconds = time.perf_counter() - begin
                if turn:  # the first round warms up
                    speeds[name].append(sum(len(o.token_ids) for o in outputs) / seconds)
            if turn:
                line = ", ".join(f"{name} {speeds[name][-1]:.0f}" for name in servers)
                console.print(f"round {turn}/{rounds}: {line} tokens/s", style="dim")
    ratios = {
        name: [a / b for a, b in zip(speeds[name], speeds[other], strict=True)]
        for name, other in AGAINST.items()
        if name in names and other in names
    }
    return Overhead(
        tokens_per_second=speeds,
        ratio_median={n: statistics.median(r) for n, r in ratios.items()},
        ratio_min={n: min(r) for n, r in ratios.items()},
        ratio_max={n: max(r) for n, r in ratios.items()},
    )


@click.command()
@click.option("--rounds", type=ROUNDS, default=20, show_default=True)
@click.option("--requests", type=REQUESTS, default=Load.requests, show_default=True)
@click.option("--prompt-tokens", type=TOKENS, default=Load.prompt_tokens, show_default=True)
@click.option("--output-tokens", type=TOKENS, default=Load.output_tokens, show_default=True)
@click.option(
    "--server",
    "names",
    multiple=True,
    type=click.Choice(list(SERVERS)),
    help="Only these; may be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, nothing else.")
def main(
    rounds: int, requests: int, prompt_tokens: int, output_tokens: int, names: tuple[str, ...],
    as_json: bool,
) -> None:  # fmt: skip
    """Measure eLLM's overhead against stock SGLang on this machine."""
    load = Load(requests, prompt_tokens, output_tokens)
    result = measure(load, names or tuple(SERVERS), rounds, Console(stderr=True))
    if as_json:
        click.echo(json.dumps(asdict(result)))
        return
    for name, median in result.ratio_median.items():
        low, high = result.ratio_min[name], result.ratio_max[name]
        click.echo(
            f"{name}: {median:.3f} of the tokens/s of {AGAINST[name]} "
            f"(rounds {low:.3f} to {high:.3f})"
        )


if __name__ == "__main__":
    main()
