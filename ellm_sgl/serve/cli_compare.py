"""`ellm-sgl compare`: eLLM beside whole-request baselines and stock SGLang, measured here."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console

from ellm_sgl.config.click_types import FACTOR, LAYERS, MILLISECONDS, ROUNDS, SECONDS, FiniteRange


def _read_names(_: click.Context, __: click.Parameter, text: str | None) -> tuple[str, ...]:
    return tuple(text.split(",")) if text else ()


@click.command()
@click.option(
    "--scenario",
    type=click.Choice(["oversubscribed"]),
    default="oversubscribed",
    show_default=True,
    help="Requests whose KV is a multiple of device memory, with output lengths known and unknown.",
)
@click.option("--rounds", type=ROUNDS, default=2, show_default=True)
@click.option(
    "--requests",
    type=click.IntRange(4, 10**6),
    default=24,
    show_default=True,
    help="At most at once.",
)
@click.option(
    "--factor",
    "factors",
    type=FiniteRange(1, 1000),
    multiple=True,
    default=(1.5, 3.0),
    show_default=True,
    help="Multiple of device memory; may be given several times.",
)
@click.option(
    "--outputs",
    type=click.Choice(["known", "unknown", "both"]),
    default="both",
    show_default=True,
    help="Whether servers may rely on output lengths, or clients stop early.",
)
@click.option(
    "--conservativeness",
    type=FACTOR,
    multiple=True,
    default=(0.3,),
    show_default=True,
    help="SGLang's --schedule-conservativeness to try beside its default; several times.",
)
@click.option(
    "--servers",
    metavar="NAME,...",
    callback=_read_names,
    help="Only these, for instance ellm,recompute,swap.",
)
@click.option(
    "--trace",
    metavar="FILE",
    help="Arrivals and lengths from an Azure-format CSV file, scaled to this machine.",
)
@click.option("--policy", default="fcfs", show_default=True, help="eLLM's.")
@click.option("--layer-group", type=LAYERS, default=1, show_default=True)
@click.option(
    "--tpot-slo-ms",
    type=MILLISECONDS,
    default=50.0,
    show_default=True,
    help="To count requests in SLO.",
)
@click.option("--ttft-slo-s", type=SECONDS, default=10.0, show_default=True, help="Likewise.")
@click.option("--model-path", metavar="DIR", help="A local model.  [default: the demo model]")
@click.option(
    "--plot",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write tokens per second over time to this PNG or SVG.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, nothing else.")
def compare(
    scenario: str,
    rounds: int,
    requests: int,
    factors: tuple[float, ...],
    outputs: str,
    conservativeness: tuple[float, ...],
    servers: tuple[str, ...],
    trace: str | None,
    policy: str,
    layer_group: int,
    tpot_slo_ms: float,
    ttft_slo_s: float,
    model_path: str | None,
    file: Path | None,
    as_json: bool,
) -> None:
    """The same load on eLLM, its baseline modes and stock SGLang, in turn. About 15 minutes.

    Arrivals, lengths and prompts are the same for all; the servers share the machine, but only
    one is under load at a time; each round starts them anew. Ample memory is eLLM's own server
    with all the memory it wants.
    """
    from ellm_sgl.client.process import ServerError
    from ellm_sgl.eval import compare as comparing
    from ellm_sgl.eval.compare.plot import plot
    from ellm_sgl.eval.compare.table import render

    err = Console(stderr=True)
    wanted = comparing.Scenario(
        requests=requests, rounds=rounds, factors=factors,
        outputs=comparing.OUTPUTS if outputs == "both" else (outputs,),
        conservativeness=conservativeness, servers=servers, trace=trace,
        model_path=model_path, policy=policy, layer_group=layer_group,
        tpot_slo_ms=tpot_slo_ms, ttft_slo_s=ttft_slo_s,
    )  # fmt: skip
    try:
        known = [c.name for c in comparing.Scenario(conservativeness=conservativeness).contenders()]
        if unknown := set(servers).difference(known):
            raise click.ClickException(
                f"--servers {','.join(sorted(unknown))}: give some of {', '.join(known)}"
            )
        for cell in wanted.cells:  # what is wrong with a trace is told before servers start
            wanted.load(cell, 0)
        found = comparing.compare(wanted, lambda line: err.print(line, style="dim"))
    except (ServerError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        raise click.Abort from None
    if file is not None:
        plot(found, file)
    if as_json:
        click.echo(json.dumps(found.to_json()))
        return
    for part in render(found):
        Console().print(part)
