"""`ellm-sgl calibrate`: what this machine sustains, and how good the latency models are."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import click
from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from ellm_sgl.latency import HardwareProfile
    from ellm_sgl.serve.calibrate import CalibrationReport


@click.command()
@click.option("--model-path", metavar="DIR", help="A local model.  [default: the demo model]")
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, nothing else.")
def calibrate(model_path: str | None, dtype: str, as_json: bool) -> None:
    """Measure this machine as a server does at start-up, and check the latency models against
    steps of many batch sizes, lengths and uncached ratios.
    """
    from ellm_sgl.client.process import ServerError
    from ellm_sgl.serve import calibrate as calibration

    err = Console(stderr=True)
    try:
        report = calibration.calibrate(
            model_path, dtype, say=lambda line: err.print(f"[dim]{line}[/dim]")
        )
    except (ServerError, OSError) as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        click.echo(json.dumps(report.to_json()))
    else:
        Console().print(_profile_table(report.hardware))
        Console().print(_error_table(report))


def _profile_table(hardware: HardwareProfile) -> Table:
    table = Table("hardware profile", "", box=box.SIMPLE, pad_edge=False)
    for name, value in dataclasses.asdict(hardware).items():
        table.add_row(name, value if isinstance(value, str) else f"{value:.3g}")
    return table


def _error_table(report: CalibrationReport) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False, title=report.model_path)
    table.add_column("latency model")
    for heading in ("steps", "mean error", "median error"):
        table.add_column(heading, justify="right")
    for e in (*report.errors, *report.unevenness):
        table.add_row(e.model, str(e.steps), f"{e.mape:.1%}", f"{e.median_ape:.1%}")
    return table
