"""What the parts of restoration bring: copies beside computation, and fetching with recomputing.

`python -m ellm_sgl.eval.ablation [--rounds N] [--ratio R] [--json]` runs two servers on the demo
model with a host tier, one with `--ellm-overlap off`, and loads them in turn at every split between
layers that are fetched and layers that are recomputed. Steps are compared within a round.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import click
from rich.console import Console

from ellm_sgl.client.process import DEMO_ARGUMENTS, ServerProcess
from ellm_sgl.config.click_types import ROUNDS, SHARE
from ellm_sgl.serve.verify import generate

SPLITS = ((1, 0), (3, 1), (1, 1), (0, 1))
"""(l1, l2): of l1 + l2 layers l1 are fetched and l2 are recomputed."""
BASELINE = ("on", (1, 0))
PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 224, 24
POOL_TOKENS = 8192


@dataclass(frozen=True)
class Steps:
    """Decode steps that restored, of one replay."""

    step_ms: float
    """Median."""
    stall_ms: float
    """Waited for copies, in the mean."""
    fetched_units: float
    """Per step."""
    recomputed_rows: float
    """Per step."""
    ring_units: float
    """Device units that fetched units passed through, per step."""


@dataclass(frozen=True)
class Ablation:
    """One setting; medians over rounds."""

    overlap: str
    split: tuple[int, int]
    steps: Steps
    relative: float
    """Step time over that of BASELINE in the same round."""


def measure(rounds: int, ratio: float, console: Console) -> list[Ablation]:
    """Load both servers in turn; a first round warms up and is dropped."""
    rng = random.Random(0)
    keys = [(overlap, split) for split in SPLITS for overlap in ("on", "off")]
    keys.remove(("off", (0, 1)))  # without copies there is nothing to overlap
    taken: dict[tuple[str, tuple[int, int]], list[Steps]] = {key: [] for key in keys}
    with contextlib.ExitStack() as stack:
        servers = {o: stack.enter_context(_server(o)) for o in ("on", "off")}
        for turn in range(rounds + 1):
            prompts = [
                [rng.randrange(32, 127) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)
            ]
            for overlap, split in keys[:: -1 if turn % 2 else 1]:
                server = servers[overlap]
                server.switch_policy("fixed-ratio", ratio=ratio, layers=split)
                steps = _steps(server, prompts)
                if turn:
                    taken[overlap, split].append(steps)
            console.print(f"round {turn}/{rounds} done", style="dim")
    return [
        Ablation(
            overlap=overlap,
            split=split,
            steps=_median(values),
            relative=statistics.median(
                a.step_ms / b.step_ms for a, b in zip(values, taken[BASELINE], strict=True)
            ),
        )
        for (overlap, split), values in taken.items()
    ]


def _server(overlap: str) -> ServerProcess:
    arguments = [*DEMO_ARGUMENTS, "--ellm-policy", "fixed-ratio", "--disable-radix-cache",
                 "--ellm-layer-group", "1", "--ellm-device-kv-tokens", str(POOL_TOKENS),
                 "--ellm-host-kv-tokens", str(POOL_TOKENS),
                 "--ellm-overlap", overlap]  # fmt: skip
    return ServerProcess(arguments, {"OMP_NUM_THREADS": "1"})


def _steps(server: ServerProcess, prompts: list[list[int]]) -> Steps:
    before = server.state()
    outputs = generate(server.url, prompts, OUTPUT_TOKENS)
    assert all(len(o.token_ids) == OUTPUT_TOKENS for o in outputs)
    after = server.state()
    # The last steps are this replay's: one per output token after the first, less its end.
    last = [s for s in server.steps()[-OUTPUT_TOKENS:] if s["decode_rows"] == PROMPTS]

    def per_step(counter: str) -> float:
        return float(after[counter] - before[counter]) / (OUTPUT_TOKENS - 1)

    return Steps(
        step_ms=1e3 * statistics.median(s["seconds"] for s in last),
        stall_ms=1e3 * statistics.fmean(s["swap_stall_s"] for s in last),
        fetched_units=per_step("fetched_units_total"),
        recomputed_rows=per_step("recomputed_tokens_total"),
        ring_units=per_step("borrowed_units_total"),
    )


def _median(values: Sequence[Steps]) -> Steps:
    columns = {
        name: statistics.median(getattr(v, name) for v in values) for name in vars(values[0])
    }
    return Steps(**columns)


@click.command()
@click.option("--rounds", type=ROUNDS, default=5, show_default=True)
@click.option("--ratio", type=SHARE, default=0.6, show_default=True, help="r of every request.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, nothing else.")
def main(rounds: int, ratio: float, as_json: bool) -> None:
    """Compare steps with and without overlap, and at every split of the layers."""
    found = measure(rounds, ratio, Console(stderr=True))
    if as_json:
        click.echo(json.dumps([asdict(one) for one in found]))
        return
    for one in found:
        s, (l1, l2) = one.steps, one.split
        click.echo(
            f"{l1} fetched : {l2} recomputed, overlap {one.overlap:3}: {s.step_ms:5.1f} ms per "
            f"step ({one.relative:.2f}), waited {s.stall_ms:.2f} ms, fetched "
            f"{s.fetched_units:.0f} units, recomputed {s.recomputed_rows:.0f} rows, ring "
            f"{s.ring_units:.0f} units"
        )


if __name__ == "__main__":
    main()
