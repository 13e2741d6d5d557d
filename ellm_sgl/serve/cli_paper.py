"""`ellm-sgl paper`: the eLLM paper's evaluation, redone in the simulator."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import Progress

from ellm_sgl.config import LATENCY_MODELS, ConfigError

if TYPE_CHECKING:
    from ellm_sgl.eval.paper.jobs import Done

_file = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.option("--out", type=_file, default="report.html", show_default=True)
@click.option(
    "--latency-model",
    type=click.Choice(LATENCY_MODELS),
    default="roofline",
    show_default=True,
    help="'paper' shows what the paper's own cost model predicts.",
)
@click.option(
    "--scale",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0, 1, min_open=True),
    help="Share of the requests to simulate, for a quick look.",
)
@click.option("--measured", type=_file, help="JSON of `python -m ellm_sgl.eval.validate --json`.")
@click.option("--workers", default=2, show_default=True, type=click.IntRange(1))
def paper(out: Path, latency_model: str, scale: float, measured: Path | None, workers: int) -> None:
    """Simulate the eLLM paper's figures and tables, and write one HTML report: what the paper
    said, what the simulator says, what was measured here, and why they differ.
    """
    from ellm_sgl.eval.paper.report import evaluate, read_measured, render

    try:
        known = read_measured(measured) if measured is not None else {}
    except ConfigError as error:
        raise click.ClickException(str(error)) from None
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("simulating", total=None)

        def tick(done: Done) -> None:
            bar.update(task, advance=1, description=f"{done.job.figure}: {done.job.variant}")

        results = evaluate(
            scale, latency_model, workers, known, lambda n: bar.update(task, total=n), tick
        )
    try:
        out.write_text(render(results))
    except OSError as error:
        raise click.ClickException(f"{out}: cannot be written: {error}") from None
    click.echo(f"wrote {out}")
