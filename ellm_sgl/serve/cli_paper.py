"""`ellm-sgl paper`: the eLLM paper's evaluation, and Figs. 9 to 11 of that on elastic memory,
redone in the simulator."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress

from ellm_sgl.config import LATENCY_MODELS, ConfigError
from ellm_sgl.config.click_types import FiniteRange
from ellm_sgl.config.commands import FILE, answer, told_in_a_line


@click.command()
@click.option("--out", type=FILE, default="report.html")
@click.option(
    "--latency-model",
    type=click.Choice(LATENCY_MODELS),
    default="roofline",
    help="'paper' shows what the paper's own cost model predicts.",
)
@click.option(
    "--scale",
    default=1.0,
    type=FiniteRange(0, 1, low_open=True),
    help="Share of the requests to simulate, for a quick look.",
)
@click.option(
    "--measured",
    type=FILE,
    multiple=True,
    help="What `ellm-sgl compare --json` printed, or eval.validate, or bench load-sweep, "
    "layer-groups, fusion or rotation, for the table's column; may be given several times.",
)
@click.option("--workers", default=2, type=click.IntRange(1, 1024))
@click.option("--json", "as_json", is_flag=True, help="The table on stdout, nothing else.")
def paper(
    out: Path,
    latency_model: str,
    scale: float,
    measured: tuple[Path, ...],
    workers: int,
    as_json: bool,
) -> None:
    """Simulate the eLLM paper's figures and tables, and Figs. 9 to 11 of the paper on elastic
    memory, and write one HTML report: what the paper said, what the simulator says, what was
    measured here, and why they differ.
    """
    # The simulator imports PyTorch, which takes seconds.
    from ellm_sgl.eval.paper.jobs import Done
    from ellm_sgl.eval.paper.measured import read_measured
    from ellm_sgl.eval.paper.report import render
    from ellm_sgl.eval.paper.results import evaluate
    from ellm_sgl.eval.paper.table import rows
    from ellm_sgl.eval.plotting import require_matplotlib

    with told_in_a_line(ConfigError):
        if not out.absolute().parent.is_dir():
            raise ConfigError(f"{out}: its folder does not exist; create it, or give another")
        require_matplotlib("ellm-sgl paper")
        known = read_measured(measured)
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
    table = [dataclasses.asdict(row) for row in rows(results)]
    answer(as_json, {"report": str(out), "rows": table}, f"wrote {out}")
