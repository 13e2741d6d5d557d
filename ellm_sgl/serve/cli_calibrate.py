"""`ellm-sgl calibrate`: what this machine sustains, and how good the latency models are."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import click
from rich import box
from rich.console import Console
from rich.table import Table

from ellm_sgl.serve.cli_shared import (
    json_flag,
    model_path_option,
    plain_table,
    progress_lines,
    told_in_a_line,
)

if TYPE_CHECKING:
    from ellm_sgl.latency import HardwareProfile
    from ellm_sgl.serve.calibrate import CalibrationReport


@click.command()
@model_path_option
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32")
@json_flag
def calibrate(model_path: str | None, dtype: str, as_json: bool) -> None:
    """Measure this machine as a server does at start-up, and check the latency models against
    steps of many batch sizes, lengths and uncached ratios.
    """
    from ellm_sgl.client.process import ServerError
    from ellm_sgl.serve import calibrate as calibration

    with told_in_a_line(ServerError, OSError):
        report = calibration.calibrate(model_path, dtype, progress_lines)
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
    figures = ("steps", "mean error", "median error")
    table = plain_table("latency model", figures, title=report.model_path)
    for e in (*report.errors, *report.step_noise):
        table.add_row(e.model, str(e.steps), f"{e.mape:.1%}", f"{e.median_ape:.1%}")
    return table
