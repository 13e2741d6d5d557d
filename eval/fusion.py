"""Recomputing in the step's own pass against recomputing in a pass before it.

`python -m ellm_sgl.eval.fusion [--model-path DIR] [--ratio R] [--rounds N] [--largest N] [--json]`
runs two servers side by side, `--ellm-fusion on` and `off`, and loads them in turn with the same
requests, of whose tokens `fixed-ratio` leaves a share uncached. A step's time is the server's own,
from its start to the start of the next; only steps in which all requests decode count.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
from dataclasses import asdict, dataclass

import click
from rich import box
from rich.console import Console
from rich.table import Table

from ellm_sgl.client.process import DEMO_MODEL, ServerProcess
from ellm_sgl.config.click_types import ROUNDS, SHARE, TOKENS
from ellm_sgl.serve.verify import generate

SHAPES = ((1, 64), (1, 256), (4, 64), (4, 256), (16, 64), (16, 256))
"""(requests, prompt tokens of each)."""
OUTPUT_TOKENS = 40
POOL_TOKENS = "16384"


@dataclass(frozen=True)
class Fusion:
    """One shape of load, over all rounds."""

    requests: int
    prompt_tokens: int
    span_rows: float
    """Tokens recomputed per step, mean."""
    fused_ms: float
    """A step's median, median of the rounds; likewise below."""
    separate_ms: float
    ratios: tuple[float, ...]
    """Separate over fused, of each round."""
    same_output: bool

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)


@dataclass(frozen=True)
class _Run:
    """One load on one server."""

    step_s: float
    span_rows: float
    outputs: tuple[tuple[int, ...], ...]


def measure(
    model_path: str, ratio: float, rounds: int, largest: int, console: Console
) -> list[Fusion]:
    """Run both servers and load them in turn, in another order every other round."""
    rng = random.Random(0)
    arguments = ["--model-path", model_path, "--dtype", "float32", "--skip-tokenizer-init",
                 "--ellm-policy", "fixed-ratio", "--ellm-ratio", str(ratio),
                 "--ellm-device-kv-tokens", POOL_TOKENS]  # fmt: skip
    shapes = [(n, tokens) for n, tokens in SHAPES if n * tokens <= largest]
    runs: dict[tuple[str, tuple[int, int]], list[_Run]] = {}
    with contextlib.ExitStack() as stack:
        servers = {
            fusion: stack.enter_context(
                ServerProcess([*arguments, "--ellm-fusion", fusion], {"OMP_NUM_THREADS": "1"})
            )
            for fusion in ("on", "off")
        }
        for turn in range(rounds + 1):
            for shape in shapes:
                requests, tokens = shape
                prompts = [[rng.randrange(3, 250) for _ in range(tokens)] for _ in range(requests)]
                for fusion in list(servers)[:: -1 if turn % 2 else 1]:
                    run = _run(servers[fusion], prompts)
                    if turn:  # the first round warms up
                        runs.setdefault((fusion, shape), []).append(run)
            console.print(f"round {turn}/{rounds}", style="dim")
    return [_summary(shape, runs["on", shape], runs["off", shape]) for shape in shapes]


def _run(server: ServerProcess, prompts: list[list[int]]) -> _Run:
    outputs = generate(server.url, prompts, OUTPUT_TOKENS)
    full = [s for s in server.steps()[-OUTPUT_TOKENS:] if s["decode_rows"] == len(prompts)]
    return _Run(
        statistics.median(s["seconds"] for s in full),
        statistics.mean(s["span_rows"] for s in full),
        tuple(output.token_ids for output in outputs),
    )


def _summary(shape: tuple[int, int], fused: list[_Run], separate: list[_Run]) -> Fusion:
    return Fusion(
        requests=shape[0],
        prompt_tokens=shape[1],
        span_rows=statistics.mean(run.span_rows for run in fused),
        fused_ms=1e3 * statistics.median(run.step_s for run in fused),
        separate_ms=1e3 * statistics.median(run.step_s for run in separate),
        ratios=tuple(s.step_s / f.step_s for f, s in zip(fused, separate, strict=True)),
        same_output=all(f.outputs == s.outputs for f, s in zip(fused, separate, strict=True)),
    )


@click.command()
@click.option("--model-path", default=str(DEMO_MODEL), help="A local model.  [default: the demo's]")
@click.option(
    "--ratio", type=SHARE, default=0.4, show_default=True, help="Share of each request's tokens."
)
@click.option("--rounds", type=ROUNDS, default=5, show_default=True)
@click.option(
    "--largest", type=TOKENS, default=4096, show_default=True, help="Most tokens of a load."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, nothing else.")
def main(model_path: str, ratio: float, rounds: int, largest: int, as_json: bool) -> None:
    """Time of a step that recomputes, in one pass and in two."""
    found = measure(model_path, ratio, rounds, largest, Console(stderr=True))
    if as_json:
        print(json.dumps([asdict(f) | {"ratio": f.ratio} for f in found]))
        return
    table = Table(box=box.SIMPLE, title=f"r = {ratio}: one pass or two")
    for heading in ("requests", "tokens", "recomputed", "fused ms", "separate ms", "ratio", "same"):
        table.add_column(heading, justify="right")
    for f in found:
        table.add_row(
            str(f.requests), str(f.prompt_tokens), f"{f.span_rows:.0f}", f"{f.fused_ms:.2f}",
            f"{f.separate_ms:.2f}", f"{f.ratio:.2f} ({min(f.ratios):.2f} to {max(f.ratios):.2f})",
            "yes" if f.same_output else "NO",
        )  # fmt: skip
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
