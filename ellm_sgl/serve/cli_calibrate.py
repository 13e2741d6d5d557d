"""`ellm-sgl calibrate`: what this machine sustains, and how good the latency models are."""

from __future__ import annotations

import dataclasses

import click
from rich import box
from rich.table import Table

from ellm_sgl.client.process import ServerError
from ellm_sgl.latency import HardwareProfile
from ellm_sgl.serve import calibrate as calibration
from ellm_sgl.serve.cli_shared import (
    answer,
    json_flag,
    model_path_option,
    plain_table,
    progress_lines,
    told_in_a_line,
)


@click.command()
@model_path_option
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32")
@json_flag
def calibrate(model_path: str | None, dtype: str, as_json: bool) -> None:
    """Measure this machine as a server does at start-up, and check the latency models against
    steps of many batch sizes, lengths and uncached ratios.
    """
    with told_in_a_line(ServerError, OSError):
        report = calibration.calibrate(model_path, dtype, progress_lines)
    found = _profile_table(report.hardware), _error_table(report)
    answer(as_json, dataclasses.asdict(report), *found)


def _profile_table(hardware: HardwareProfile) -> Table:
    table = Table("hardware profile", "", box=box.SIMPLE, pad_edge=False)
    for name, value in dataclasses.asdict(hardware).items():
        table.add_row(name, value if isinstance(value, str) else f"{value:.3g}")
    return table


def _error_table(report: calibration.CalibrationReport) -> Table:
    figures = ("steps", "mean error", "median error")
    table = plain_table("latency model", figures, title=report.model_path)
    for e in (*report.errors, *report.step_noise):
        table.add_row(e.model, str(e.steps), f"{e.mape:.1%}", f"{e.median_ape:.1%}")
    return table
