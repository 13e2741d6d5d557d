"""What eLLM costs when it is off, and when it is on but has nothing to do.

`python -m ellm_sgl.eval.overhead [--rounds N] [--json]` runs four servers on the demo model side
by side and loads one at a time, in turn, so that a machine whose speed drifts hits all alike:

- `stock`: SGLang with only the CPU platform loaded,
- `off`: the plugin loaded, eLLM not enabled, SGLang's attention as in `stock`,
- `off, ellm_cpu`: same, with the C++ kernels, as is the default,
- `r = 0`: eLLM enabled, everything fits.

Idle servers sleep. The ratio of a round compares neighbours in time; the median of the rounds is
what counts.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import time
from dataclasses import asdict, dataclass

import click
from rich.console import Console

from ellm_sgl.serve.process import DEMO_ARGUMENTS, ServerProcess
from ellm_sgl.serve.verify import generate

POOL_TOKENS = "20000"
PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 24, 128, 128
SERVERS: dict[str, tuple[list[str], dict[str, str]]] = {
    "stock": (["--max-total-tokens", POOL_TOKENS], {"SGLANG_PLUGINS": "ellm_cpu"}),
    "off": (["--max-total-tokens", POOL_TOKENS, "--attention-backend", "torch_native"], {}),
    "off, ellm_cpu": (["--max-total-tokens", POOL_TOKENS], {}),
    "r = 0": (["--ellm-policy", "fixed-ratio", "--ellm-device-kv-tokens", POOL_TOKENS], {}),
}
AGAINST = {"off": "stock", "off, ellm_cpu": "stock", "r = 0": "off, ellm_cpu"}
"""What each is compared with."""


@dataclass(frozen=True)
class Overhead:
    """Output tokens per second of every round, and ratios (see `AGAINST`) of the same round."""

    tokens_per_second: dict[str, list[float]]
    ratio_median: dict[str, float]
    ratio_min: dict[str, float]
    ratio_max: dict[str, float]


def measure(rounds: int, console: Console) -> Overhead:
    """Run the servers and load them in turn."""
    rng = random.Random(0)
    speeds: dict[str, list[float]] = {name: [] for name in SERVERS}
    with contextlib.ExitStack() as stack:
        servers = {
            name: stack.enter_context(
                ServerProcess([*DEMO_ARGUMENTS, *arguments], {"OMP_NUM_THREADS": "1", **variables})
            )
            for name, (arguments, variables) in SERVERS.items()
        }
        for turn in range(rounds + 1):
            prompts = [
                [rng.randrange(32, 127) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)
            ]
            # Reverse every other round: whoever comes second is second only half of the time.
            for name in list(servers)[:: -1 if turn % 2 else 1]:
                begin = time.perf_counter()
                outputs = generate(servers[name].url, prompts, OUTPUT_TOKENS)
                seconds = time.perf_counter() - begin
                if turn:  # the first round warms up
                    speeds[name].append(sum(len(o.token_ids) for o in outputs) / seconds)
            if turn:
                line = ", ".join(f"{name} {speeds[name][-1]:.0f}" for name in servers)
                console.print(f"round {turn}/{rounds}: {line} tokens/s", style="dim")
    ratios = {
        name: [a / b for a, b in zip(speeds[name], speeds[other], strict=True)]
        for name, other in AGAINST.items()
    }
    return Overhead(
        tokens_per_second=speeds,
        ratio_median={n: statistics.median(r) for n, r in ratios.items()},
        ratio_min={n: min(r) for n, r in ratios.items()},
        ratio_max={n: max(r) for n, r in ratios.items()},
    )


@click.command()
@click.option("--rounds", default=7, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, nothing else.")
def main(rounds: int, as_json: bool) -> None:
    """Measure eLLM's overhead against stock SGLang on this machine."""
    result = measure(rounds, Console(stderr=True))
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
