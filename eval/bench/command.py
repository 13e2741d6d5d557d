"""Makes a command of `ellm-sgl bench` of a scenario."""

from __future__ import annotations

import dataclasses
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ellm_sgl.client.process import ServerError
from ellm_sgl.eval.bench import report
from ellm_sgl.eval.bench.result import MeasurementError
from ellm_sgl.eval.bench.runner import run
from ellm_sgl.eval.bench.scenario import OPTION, Scenario
from ellm_sgl.eval.plotting import check_plot_file


def command(name: str, kind: type[Scenario]) -> click.Command:
    """The docstring of its module as help, its fields as options, and --plot and --json."""
    about = sys.modules[kind.__module__].__doc__
    made = click.Command(name, callback=partial(_run, name, kind), help=about)
    for field in dataclasses.fields(kind):
        flag, given = field.metadata[OPTION]
        declared = [flag or "--" + field.name.replace("_", "-"), field.name]
        made.params.append(click.Option(declared, **given))
    file = click.Path(path_type=Path, dir_okay=False)
    said = "One JSON document on stdout, nothing else."
    made.params += [
        click.Option(["--plot", "file"], type=file, help="Write a plot to this PNG, SVG or PDF."),
        click.Option(["--json", "as_json"], is_flag=True, help=said),
    ]
    return made


def _run(name: str, kind: type[Scenario], file: Path | None, as_json: bool, **options: Any) -> None:
    try:
        if file is not None:
            check_plot_file(file)
        scenario = kind(**options)
        scenario.check()
        _measure(name, scenario, file, as_json)
    except (ServerError, MeasurementError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        raise click.Abort from None


def _measure(name: str, scenario: Scenario, file: Path | None, as_json: bool) -> None:
    begun = report.provenance()
    with Progress(console=Console(stderr=True)) as bar:
        total = scenario.rounds * len(scenario.cells()) * len(scenario.settings())
        task = bar.add_task(name, total=total)
        result = run(
            scenario,
            lambda line: bar.console.print(line, style="dim", highlight=False, markup=False),
            lambda: bar.advance(task),
        )
    if file is not None:
        report.plot(scenario, result, file)
    if as_json:
        click.echo(json.dumps(begun | report.document(name, scenario, result)))
        return
    parts, console = list(report.render(scenario, result)), Console()
    # Rather lines that a narrow terminal breaks than columns cut off.
    needed = [Console(width=1000).measure(p).maximum for p in parts if isinstance(p, Table)]
    wide = Console(width=max(console.width, *needed))
    for part in parts:
        (wide if isinstance(part, Table) else console).print(part)
